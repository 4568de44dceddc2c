"""Files of any place: listed once, in one order, and read by any worker."""

from __future__ import annotations

import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.archives import write_shards
from support.http_store import HttpStore
from support.once import forget_warnings
from support.platforms import posix
from support.programs import output

from hybridloader import DataLoader, Skip
from hybridloader.errors import BackendUnavailable, SourceError
from hybridloader.sources import Files, Tar

NAMES = ["a/1.txt", "a/2.txt", "b/1.txt", "b/deep/3.txt", "b/x.jpg"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name.upper())
    return root


def names(files: Files, folder: Path) -> list[str]:
    return [Path(path).relative_to(folder.as_posix()).as_posix() for path in files.paths]


def test_a_folder_has_all_files_below_it_sorted(folder: Path) -> None:
    for url in (folder, str(folder), f"{folder}/", f"file://{folder}"):
        files = Files(url, decode=bytes.decode)
        assert names(files, folder) == NAMES
        assert list(files) == [name.upper() for name in NAMES]
    assert repr(files) == "Files(5 samples in 1 shards)"


def test_paths_are_compared_shown_and_indexed_as_a_list_is(folder: Path) -> None:
    paths, plain = Files(folder).paths, [f"{folder.as_posix()}/{name}" for name in NAMES]
    assert paths == plain == [*paths]
    for other in (plain[1:], plain[::-1], Files(folder / "b").paths, 5):
        assert paths != other
    assert repr(paths) == f"Texts([{', '.join(map(repr, plain[:3]))}, ...])"
    assert (paths[-5], paths[4], paths[3:]) == (plain[0], plain[4], plain[3:])
    for index in (5, -6):
        with pytest.raises(IndexError, match="no text"):
            paths[index]


def test_globs_and_several_roots_name_each_file_once(folder: Path) -> None:
    assert names(Files(f"{folder}/*/*.txt"), folder) == ["a/1.txt", "a/2.txt", "b/1.txt"]
    assert names(Files(f"{folder}/**/*.txt"), folder) == NAMES[:4]
    files = Files([f"{folder}/b", f"{folder}/**/*.txt", folder / "b" / "1.txt"])
    assert names(files, folder) == [*NAMES[2:], *NAMES[:2]]
    assert files.block_sizes.tolist() == [3, 2, 0]
    assert [files.locate(i)[0] for i in range(5)] == [0, 0, 0, 1, 1]
    assert names(Files(f"{folder}/a/{{1..2}}.txt"), folder) == NAMES[:2]


@posix  # links
def test_folders_that_are_links_are_followed_unless_they_lead_round(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "9.txt").write_text("nine")
    (folder / "c").symlink_to(elsewhere)
    (folder / "a" / "round").symlink_to(folder)
    (folder / "a" / "here").symlink_to(folder / "a")
    (folder / "b" / "file.txt").symlink_to(elsewhere / "9.txt")
    wanted = sorted([*NAMES, "b/file.txt", "c/9.txt"])
    files = Files(folder, decode=bytes.decode)
    assert names(files, folder) == wanted
    assert list(files)[-1] == "nine"
    assert names(Files(f"{folder}/**/*.txt"), folder) == [n for n in wanted if n != "b/x.jpg"]
    assert "c/9.txt" in names(Files(f"{folder}/*/9.txt"), folder)


def test_classes_are_the_folders_below_the_root(folder: Path) -> None:
    files = Files(f"{folder}/**/*.txt", decode=bytes.decode, class_from_folder=True)
    assert files.classes == ["a", "b"]
    assert files.labels == [0, 0, 1, 1]
    assert files[3] == ("B/DEEP/3.TXT", 1)
    with pytest.raises(SourceError, match=r"1\.txt is in no class folder"):
        Files(f"{folder}/a/*.txt", class_from_folder=True)
    with pytest.raises(ValueError, match="pass class_from_folder=True"):
        _ = Files(folder).labels


def test_a_pickle_keeps_the_list_for_other_processes(folder: Path) -> None:
    first = Files(folder)
    kept, contents = pickle.dumps(first), list(first)
    (folder / "a" / "0.txt").write_text("new")
    assert len(Files(folder)) == 6
    code = "import pickle; print(list(pickle.loads(bytes.fromhex(input()))))"
    assert output("-c", code, given=kept.hex()) == f"{contents!r}\n"


def test_files_in_memory(memory: Any) -> None:
    for name in NAMES:
        memory.pipe(f"/data/{name}", name.encode())
    for url in ("memory://data/", "memory://data/**"):
        assert list(Files(url)) == [name.encode() for name in NAMES]
    assert Files("memory://data/b/1.txt")[0] == b"b/1.txt"


TEXTS = [f"text {number}" * 50 for number in range(20)]


def check_texts(url: str, backend: str) -> None:
    files = Files(url, decode=bytes.decode)
    assert files[7] == TEXTS[7]  # open here, too, before any fork
    loader: Any = DataLoader(files, 2, num_workers=2, backend=backend, collate_fn=list)
    assert [text for batch in loader for text in batch] == TEXTS


@pytest.mark.parametrize("backend", ["threads", "fork", "spawn"])
def test_an_archive_is_opened_in_each_worker(backend: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for number, text in enumerate(TEXTS):
            archive.writestr(f"d/{number:02d}.txt", text)
    check_texts(f"zip://**/*.txt::file://{tmp_path}/all.zip", backend)


@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_files_behind_http(store: HttpStore, backend: str) -> None:
    store.files = {f"/d/{number:02d}.txt": text.encode() for number, text in enumerate(TEXTS)}
    store.files["/d/"] = "".join(f'<a href="{n:02d}.txt">' for n in range(20)).encode()
    for url in (f"{store.url}/d/*.txt", f"{store.url}/d/{{00..19}}.txt"):
        check_texts(url, backend)


def test_a_remote_store_is_read_by_fresh_workers(store: HttpStore) -> None:
    """A fork would lose the thread of fsspec's loop."""
    store.files["/a.txt"] = b"a"
    files = Files(f"{store.url}/a.txt", decode=bytes.decode)
    assert files[0] == "a"
    forget_warnings()
    with pytest.warns(
        UserWarning, match="starts fresh workers instead of forking: fsspec is in use"
    ):
        assert list(DataLoader(files, 1, num_workers=1)) == [["a"]]
    with pytest.raises(BackendUnavailable, match="fsspec is in use"):
        iter(DataLoader(files, 1, num_workers=1, backend="fork"))


# Bad input.


def test_what_names_no_files_is_told(folder: Path, memory: Any) -> None:
    for url in (f"{folder}/*.png", f"{folder}/none/", "memory://none/", "memory://no/**"):
        with pytest.raises(FileNotFoundError):
            Files(url)
    with pytest.raises(FileNotFoundError, match=r"no\.txt"):
        Files(f"{folder}/no.txt")
    with pytest.raises(ValueError, match="no files were named"):
        Files([])
    with pytest.raises(ValueError, match="Protocol not known: nosuch"):
        Files("nosuch://a/*")


def test_a_file_whose_name_looks_like_a_pattern_is_found(folder: Path) -> None:
    named = folder / "run[1]" / "a[2].txt"
    named.parent.mkdir()
    named.write_text("x")
    for url in (named, named.parent, f"{folder}/run[[]1]/*.txt"):
        assert Files(url).paths[:] == [named.as_posix()]
    with pytest.raises(FileNotFoundError, match=r"are read as a pattern; write \[\[\] for a \["):
        Files(f"{folder}/a[0].txt")


def test_a_mistake_of_the_program_is_not_taken_for_a_store_that_fails(store: HttpStore) -> None:
    store.files["/a.txt"] = b"x"
    files = Files(f"{store.url}/a.txt", storage_options={"none_of_its_options": 1})
    with pytest.raises(TypeError, match="none_of_its_options"):
        files[0]
    files.close()


def test_a_missing_library_is_told_with_the_line_that_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dropboxdrivefs", None)
    with pytest.raises(ImportError, match=r"dropbox://a/\* can't be opened: .*pip install fsspec"):
        Files("dropbox://a/*")
    with pytest.raises(ImportError, match="dropbox://a/1 can't be opened"):
        Files("dropbox://a/1")[0]  # which was not listed
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match="pip install fsspec aiohttp"):
        Files(folder)


def test_a_file_that_changed_or_vanished_is_told_by_name(folder: Path) -> None:
    files = Files(folder)
    (folder / "a" / "1.txt").write_text("longer than it was")
    with pytest.raises(SourceError, match=r"a/1\.txt has 18 bytes, and had 7 when it was listed"):
        files[0]
    (folder / "a" / "2.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"a/2\.txt"):
        files[1]
    loader: Any = DataLoader(files, 5, collate_fn=list, on_error=Skip(max_failures=2))
    assert [len(batch) for batch in loader] == [3]
    assert [bad.index for bad in loader.skipped] == [0, 1]


def test_an_error_of_a_function_names_the_file_or_the_sample(folder: Path) -> None:
    (folder / "a" / "1.txt").write_bytes(b"\xff")
    (shard,) = write_shards(folder, [2])
    tar = Tar(shard, fields=("txt",), decode=lambda sample: sample[1])
    for source, kind, place in [
        (Files(folder / "a", decode=bytes.decode), UnicodeDecodeError, "a/1.txt"),
        (tar, IndexError, "loading sample 's0000' of "),
    ]:
        with pytest.raises(kind) as raised:
            source[0]
        if sys.version_info >= (3, 11):
            assert any(place in note for note in raised.value.__notes__)


def test_a_damaged_archive_is_told(tmp_path: Path) -> None:
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a.txt", "a" * 1000)
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    files = Files(f"zip://*.txt::file://{path}")
    with pytest.raises(SourceError, match=r"a\.txt.* can't be read: BadZipFile: Bad CRC"):
        files[0]
    path.write_bytes(data[:700])
    with pytest.raises(SourceError, match=r"all\.zip is not a zip archive, or it is truncated"):
        Files(f"zip://*.txt::file://{path}")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../a.txt", "a")
    with pytest.raises(SourceError, match="a name outside its folder"):
        Files(f"zip://**::file://{path}")
