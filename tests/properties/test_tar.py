"""Tar archives: samples by key, found by an index that is made in one pass."""

from __future__ import annotations

import errno
import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.archives import sample_members, tar_bytes, write_shards
from support.http_store import HttpStore
from support.platforms import posix

from hybridloader import DataLoader, Skip
from hybridloader.errors import SourceError, StoreError
from hybridloader.sources import Tar
from hybridloader.sources.store import Stamp, Store


def written(path: Path, members: Any) -> str:
    path.write_bytes(tar_bytes(members))
    return str(path)


def flipped(data: bytes) -> bytes:
    """Return the file of an index with one wrong bit in the offset of its first member."""
    at = data.index((512).to_bytes(8, "little"))
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def text(number: int) -> bytes:
    return f"text {number} ".encode() * (number % 7 + 1)


def test_members_of_one_key_are_a_sample(tmp_path: Path) -> None:
    names = ["d/a.jpg", "d/a.SEG.png", "d/b.jpg", "./c.d/x.txt", "e.txt", "d/b.seg.png"]
    path = written(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    tar = Tar(path)
    assert list(tar.keys) == ["d/a", "d/b", "./c.d/x", "e"]
    assert tar[0] == {
        "__key__": "d/a",
        "__url__": Path(path).as_posix(),  # by fsspec, also on Windows
        "jpg": b"d/a.jpg",
        "seg.png": b"d/a.SEG.png",
    }
    assert tar[1]["seg.png"] == b"d/b.seg.png"
    assert tar.extensions == ["jpg", "seg.png", "txt"]
    assert len(tar) == 4


def test_files_without_a_key_are_counted(tmp_path: Path) -> None:
    names = ["README", ".hidden.jpg", "in/._b.jpg", "__meta__/x.json", "a.txt", "__b__.txt"]
    tar = Tar(written(tmp_path / "a.tar", [(name, b"") for name in names]))
    assert list(tar.keys) == ["a", "__b__"]
    assert tar.ignored == 4


def test_chosen_members_and_a_function(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", [("0.png", b"p"), ("0.cls", b"0"), ("1.jpg", b"j")])
    tar = Tar(path, fields=("jpg;PNG", "cls"))
    assert tar[0] == (b"p", b"0")
    with pytest.raises(SourceError, match=r"a\.tar, sample '1' has no member cls; it has jpg"):
        tar[1]
    loader: Any = DataLoader(tar, 2, collate_fn=list, on_error="skip")
    assert list(loader) == [[(b"p", b"0")]]
    assert [bad.index for bad in loader.skipped] == [1]
    assert Tar(path, decode=lambda sample: len(sample))[0] == 4
    with pytest.raises(TypeError, match="fields must be a sequence of extensions"):
        Tar(path, fields="jpg")


def test_long_names_and_all_dialects_are_read(tmp_path: Path) -> None:
    name = "long/" * 60 + "ä0.txt"
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / f"{kind}.tar"
        with tarfile.open(path, "w", format=kind) as archive:
            archive.addfile(tarfile.TarInfo("folder"), io.BytesIO())
            for one in (name if kind != tarfile.USTAR_FORMAT else "short/0.txt", "1.txt"):
                member = tarfile.TarInfo(one)
                member.size = 700
                archive.addfile(member, io.BytesIO(bytes(700)))
            folder = tarfile.TarInfo("folder.d")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
        tar = Tar(str(path))
        assert [sample["txt"] for sample in tar] == [bytes(700)] * 2


def test_an_archive_without_samples_is_a_shard_of_none(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "d", [2, 0, 3])
    tar = Tar(paths, fields=("txt",))
    assert tar.block_sizes.tolist() == [2, 0, 3]
    assert list(tar) == [(text(number),) for number in range(5)]
    assert len(Tar(paths[1])) == 0


def test_an_index_is_kept_beside_the_archive_or_in_a_folder(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "d", [4])
    for index, place in [("beside", tmp_path / "d"), (str(tmp_path / "kept"), tmp_path / "kept")]:
        first = Tar(path, index=index)
        (kept,) = place.glob("*.index")
        before = kept.stat().st_ino
        again = Tar(path, index=index)
        assert kept.stat().st_ino == before
        assert list(again) == list(first)
        Path(path).write_bytes(tar_bytes(sample_members(10, 2)))
        assert list(Tar(path, index=index).keys) == ["s0010", "s0011"]
        assert kept.stat().st_ino != before
        for damaged in (b"damaged", flipped(kept.read_bytes())):
            kept.write_bytes(damaged)
            assert len(Tar(path, index=index)) == 2
        assert len(Tar(f"{tmp_path}/d/", index=index)) == 2  # an index is no archive
        assert [*place.glob("*.index")] == [kept]
        Path(path).write_bytes(tar_bytes(sample_members(0, 4)))


def test_an_index_that_can_not_be_kept_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_shards(tmp_path / "d", [4, 2])

    def refuse(path: str, data: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("hybridloader.sources.tar.write_whole", refuse)
    with pytest.warns(
        UserWarning, match=r"not kept in .*d: PermissionError: Perm.* index= to a writable folder"
    ):
        assert len(Tar(paths, index="beside")) == 6


def test_an_index_is_found_again_whatever_the_signature_of_its_url(
    store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tar_bytes(sample_members(0, 4))
    # Of what the server tells nothing else, no index is kept.
    monkeypatch.setattr(Store, "stamp", lambda self, path: Stamp(len(data), "the same"))
    for number in range(2):
        signed = f"/{'long' * 50}.tar?signature={'0' * 200}{number}"
        store.files[signed] = data
        assert len(Tar(store.url + signed, index=str(tmp_path))) == 4
    (kept,) = tmp_path.glob("*.index")
    assert "signature" not in kept.name


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/."), min_size=1)


@settings(max_examples=30)
@given(st.lists(st.tuples(names, st.sampled_from(["a", "b"])), unique=True, max_size=6))
def test_a_kept_index_and_a_pickle_have_the_same_samples(
    tmp_path_factory: Any, pairs: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    members = [(f"{key}.{ext}", b"x" * len(key)) for key, ext in pairs]
    path = written(folder / "a.tar", members)
    made = Tar(path, index="beside")
    for again in (Tar(path, index="beside"), pickle.loads(pickle.dumps(made))):
        assert list(again.keys) == [*dict(pairs)]
        assert list(again) == list(made)
    assert sum(len(sample) - 2 for sample in made) == len(pairs)


# Remote archives.


def test_remote_members_are_read_by_ranges(store: HttpStore, tmp_path: Path) -> None:
    for number in range(3):
        store.files[f"/{number}.tar"] = tar_bytes(sample_members(4 * number, 4))
    options: Any = {"fields": ("txt",), "index": str(tmp_path)}
    tar = Tar(f"{store.url}/{{0..2}}.tar", **options)
    assert not [*tmp_path.glob("*.index")]  # this server tells no time and no checksum
    store.requests.clear()
    assert tar[5] == (text(5),)
    ((path, asked),) = store.requests
    assert path == "/1.tar"
    first, last = map(int, asked.removeprefix("bytes=").split("-"))
    assert last - first + 1 == 512 + len(text(5))
    loader: Any = DataLoader(tar, 2, num_workers=2, backend="threads", collate_fn=list)
    assert [one for batch in loader for one in batch] == [(text(n),) for n in range(12)]


# Bad input.


def test_a_truncated_archive_is_told_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = tar_bytes([("a.txt", b"x" * 600), ("b.txt", b"y" * 100)])
    path = tmp_path / "a.tar"
    for size in (0, 100, 511, 512, 513, 1000, 1112, 1536, 1600, 2048, 2100, 2560, 2600):
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"a\.tar is .*truncated after (its|member '[ab])"):
            Tar(str(path))
    path.write_bytes(whole[:3072])  # with one block of its end
    assert len(Tar(str(path))) == 2


def test_damaged_and_foreign_archives_are_told(tmp_path: Path) -> None:
    whole = tar_bytes(sample_members(0, 3))
    path = tmp_path / "a.tar"
    damaged = bytearray(whole)
    damaged[1024 + 5] ^= 255
    cases = [
        (bytes(damaged), r"damaged or truncated after member 's0000\.txt'"),
        (b"no archive" * 100, "is not a tar archive"),
        (whole + whole, "has more data after the end"),
    ]
    for data, said in cases:
        path.write_bytes(data)
        with pytest.raises(SourceError, match=said):
            Tar(str(path))
    for method in ("gz", "bz2", "xz"):
        with tarfile.open(path, f"w:{method}") as archive:  # type: ignore[call-overload]
            archive.addfile(tarfile.TarInfo("a.txt"))
        with pytest.raises(SourceError, match=r"is compressed by .*: write it uncompressed"):
            Tar(str(path))


def test_members_that_have_no_place_of_their_own_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for kind, said in [
        (tarfile.SYMTYPE, "member 'b.txt' is a link to 'a.txt'"),
        (tarfile.LNKTYPE, "member 'b.txt' is a link to 'a.txt'"),
    ]:
        with tarfile.open(path, "w") as archive:
            archive.addfile(tarfile.TarInfo("a.txt"))
            member = tarfile.TarInfo("b.txt")
            member.type, member.linkname = kind, "a.txt"
            archive.addfile(member)
        with pytest.raises(SourceError, match=said):
            Tar(str(path))
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a.txt")
        member.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "4096"}
        archive.addfile(member)
    with pytest.raises(SourceError, match=r"member 'a\.txt' is sparse"):
        Tar(str(path))


def test_extensions_that_no_member_has_are_told_at_once(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", [("a.jpg", b"x"), ("a.cls", b"1")])
    assert Tar(path, fields=("png;jpg", "cls"))[0] == (b"x", b"1")
    with pytest.raises(ValueError, match=r"extension '\.jpg'; the archives have cls, jpg"):
        Tar(path, fields=(".jpg",))


def test_a_folder_of_indices_alone_has_no_archives(tmp_path: Path) -> None:
    (tmp_path / "a.tar.index").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="names only indices and no archives"):
        Tar(f"{tmp_path}/")


def test_names_that_lead_outside_or_are_there_twice_are_told(tmp_path: Path) -> None:
    for name in ("../a.txt", "b/../../a.txt", "/etc/a.txt"):
        with pytest.raises(SourceError, match=r"a\.tar, member .*leads out of the archive"):
            Tar(written(tmp_path / "a.tar", [("ok.txt", b""), (name, b"")]))
    for second in ("a.txt", "a.TXT"):
        with pytest.raises(SourceError, match=r"a\.tar has two members a\.txt"):
            Tar(written(tmp_path / "a.tar", [("a.txt", b"1"), ("b.txt", b""), (second, b"2")]))


@posix
def test_an_archive_that_changed_since_it_was_indexed_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    tar = Tar(written(path, [("a.txt", b"1"), ("b.txt", b"2")]))
    os.utime(path, (1, 1))
    with pytest.raises(SourceError, match=r"a\.tar has changed since it was indexed: it had"):
        tar[0]
    loader: Any = DataLoader(tar, 2, on_error=Skip(max_failures=2))
    assert list(loader) == []
    assert "has changed" in str(loader.skipped[0].error)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        tar[0]


def test_a_remote_archive_that_changed_is_known_by_its_headers(store: HttpStore) -> None:
    store.files["/a.tar"] = tar_bytes([("a.txt", b"1"), ("b.txt", b"2")])
    tar = Tar(f"{store.url}/a.tar")
    store.files["/a.tar"] = tar_bytes([("a.txt", b"1"), ("c.txt", b"2")])
    assert tar[0]["txt"] == b"1"
    with pytest.raises(SourceError, match=r"a\.tar, member b\.txt: another header is at byte 1024"):
        tar[1]
    store.files["/a.tar"] = tar_bytes([("a.txt", b"1")])[:1024]
    with pytest.raises((SourceError, StoreError), match=r"a\.tar, member b\.txt"):
        tar[1]
