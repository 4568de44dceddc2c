"""Shards that are written and read again: by ours, and by webdataset where it is installed."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command import main

from hybridloader.errors import StoreError
from hybridloader.sources import Tar, write_shards


def sample(number: int) -> dict[str, Any]:
    return {
        "__key__": f"s{number:03d}",
        "txt": f"text {number}",
        "cls": number % 3,
        "bin": bytes(number),
    }


class Samples:
    """A dataset that counts what is read, and fails at one sample until it is `mended`."""

    def __init__(self, count: int, bad: int = -1) -> None:
        self.count, self.bad, self.read = count, bad, [0] * count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.read[number] += 1
        if number == self.bad:
            raise KeyError("bad")
        return sample(number)


def contents(url: str, **options: Any) -> list[Any]:
    tar = Tar(url, fields=("txt", "cls", "bin"), **options)
    return [(key, *one) for key, one in zip(tar.keys, tar, strict=True)]


def expected(count: int) -> list[Any]:
    return [(f"s{n:03d}", f"text {n}".encode(), b"%d" % (n % 3), bytes(n)) for n in range(count)]


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("kind", ["dataset", "iterable"])
def test_a_tar_comes_back_with_its_index(
    where: str, kind: str, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "out") if where == "local" else "memory://out"
    source: Any = Samples(100) if kind == "dataset" else map(sample, range(100))
    counts = write_shards(source, url, samples_per_shard=30)
    assert counts == [30, 30, 30, 10]
    monkeypatch.setattr("hybridloader.sources.tar.make_index", None)  # none is made
    assert contents(f"{url}/", index="beside") == expected(100)  # the manifest is no archive
    if where == "local":
        names = {path.name for path in (tmp_path / "out").iterdir()}
        shards = {f"shard-{n:06d}.tar" for n in range(4)}
        assert names > {*shards, *(f"{name}.index" for name in shards)}
        assert len(names) == 9


def test_the_same_samples_make_the_same_archives_whoever_reads_them(tmp_path: Path) -> None:
    for name in "ab":
        write_shards(Samples(20), str(tmp_path / name), samples_per_shard=10, workers=2)
    (one, _), (other, _) = (sorted((tmp_path / name).glob("*.tar")) for name in "ab")
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as archive:
        found = [(member.name, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    wanted = [
        (key, dict(zip(("txt", "cls", "bin"), rest, strict=True))) for key, *rest in expected(10)
    ]
    assert found == [(f"{key}.{ext}", data) for key, one in wanted for ext, data in one.items()]


def test_bytes_limit_a_shard(tmp_path: Path) -> None:
    rows = [{"bin": bytes(9728)}] * 100  # 10 KiB with its header
    assert write_shards(rows, str(tmp_path / "a"), bytes_per_shard=300 << 10) == [30, 30, 30, 10]
    assert write_shards(rows, str(tmp_path / "b")) == [100]


def test_a_dataset_is_resumed_with_the_shards_that_lack(tmp_path: Path) -> None:
    url, samples = str(tmp_path / "out"), Samples(400, bad=299)
    with pytest.raises(KeyError, match="bad") as failed:
        write_shards(samples, url, samples_per_shard=100, workers=1)
    assert "packing sample 299" in failed.value.__notes__
    assert not [*(tmp_path / "out").glob(".part*")]
    (tmp_path / "out" / ".part-left").write_bytes(b"half")
    samples.bad, samples.read = -1, [0] * 400
    reported: list[int] = []
    assert write_shards(samples, url, samples_per_shard=100, report=reported.append) == [100] * 4
    assert reported == [2, 3, 4]  # those that are there at once
    assert sum(samples.read[:200]) == 1  # by which the source is known; the rest was there
    assert all(samples.read[200:])
    assert contents(f"{url}/*.tar", index="beside") == expected(400)
    assert not [*(tmp_path / "out").glob(".part*")]


def test_an_iterable_is_resumed_after_its_last_whole_shard(tmp_path: Path) -> None:
    url = str(tmp_path / "out")

    def items(bad: int) -> Any:
        for number in range(50):
            if number == bad:
                raise KeyError("bad")
            yield sample(number)

    with pytest.raises(KeyError, match="bad"):
        write_shards(items(35), url, samples_per_shard=10)
    shards = sorted((tmp_path / "out").glob("shard-*.tar"))
    assert len(shards) == 3
    times = [path.stat().st_mtime_ns for path in shards]
    assert write_shards(items(-1), url, samples_per_shard=10) == [10] * 5
    assert [path.stat().st_mtime_ns for path in shards] == times
    assert contents(f"{url}/*.tar") == expected(50)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    url = str(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"out is not empty \(mine\.txt\), and no file is over"
    ):
        write_shards(Samples(4), url)
    (tmp_path / "out" / "mine.txt").unlink()
    with pytest.raises(KeyError, match="bad"):
        write_shards(Samples(100, bad=99), url, samples_per_shard=50)
    with pytest.raises(FileExistsError, match="another source or with other sizes"):
        write_shards(Samples(100), url, samples_per_shard=25)
    with pytest.raises(FileExistsError, match="another source or with other sizes"):
        write_shards(Samples(99), url, samples_per_shard=50)
    write_shards(Samples(4), str(tmp_path / "whole"))
    with pytest.raises(FileExistsError, match="has a complete pack"):
        write_shards(Samples(4), str(tmp_path / "whole"))


def test_a_store_that_refuses_is_told_and_the_pack_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "out")

    def refuse(index: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hybridloader.sources.writing.packed_index", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_shards(map(sample, range(9)), url, samples_per_shard=1)
    monkeypatch.undo()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".part")]
    assert write_shards(map(sample, range(9)), url, samples_per_shard=1) == [1] * 9
    assert contents(f"{url}/*.tar") == expected(9)


def test_a_sample_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    for number, (bad, told) in enumerate(
        [
            (5, r"sample \d must be a dict of fields by name"),
            ({"txt": object()}, r"sample \d: 'txt' is <object.*neither bytes"),
            ({"__key__": "a.b", "txt": ""}, r"'a\.b\.txt' would not be read as the member 'txt'"),
            ({"__key__": "../a", "txt": ""}, r"and no '\.\.'"),
            ({"JPG": b""}, r"extensions are lowercase"),
            ({"__key__": "s000", "txt": ""}, r"already has a member 's000\.txt'"),
            ({"__key__": "a"}, r"sample \d, 'a', has no fields"),
        ]
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            write_shards([sample(0), bad], str(tmp_path / f"{number}"))
        assert [path.name for path in (tmp_path / f"{number}").iterdir()] == ["_pack.json"]


def test_a_pack_in_a_store_is_not_written_over(memory: Any) -> None:
    write_shards(Samples(9), "memory://out")
    with pytest.raises(FileExistsError, match="has a complete pack"):
        write_shards(Samples(8), "memory://out")
    assert contents("memory://out/*.tar") == expected(9)


def test_a_store_that_refuses_a_file_or_a_listing_is_named(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more room")

    for what, words in (("put_file", "_pack.json, writing"), ("ls", "/out")):
        monkeypatch.setattr(type(memory), what, refuse)
        with pytest.raises(StoreError, match=rf"memory:/{{0,2}}.*{words}.*no more room"):
            write_shards(Samples(4), "memory://out")
        monkeypatch.undo()


def test_arrays_and_json_are_members(tmp_path: Path) -> None:
    write_shards([{"a.npy": np.arange(3), "json": {"b": [1]}, "num": 0.5}], str(tmp_path))
    (path,) = tmp_path.glob("*.tar")
    with tarfile.open(path) as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr]
    assert np.load(io.BytesIO(files["000000000.a.npy"])).tolist() == [0, 1, 2]
    assert json.loads(files["000000000.json"]) == {"b": [1]}
    assert files["000000000.num"] == b"0.5"


def test_arguments_are_checked(tmp_path: Path) -> None:
    url = str(tmp_path)
    with pytest.raises(ValueError, match="pass only one of samples_per_shard, bytes_per_shard"):
        write_shards(Samples(3), url, samples_per_shard=2, bytes_per_shard=3)
    with pytest.raises(ValueError, match="samples_per_shard must be at least 1"):
        write_shards(Samples(3), url, samples_per_shard=0)
    for empty in ([], iter([])):
        with pytest.raises(ValueError, match="the source has no samples"):
            write_shards(empty, url)
    assert not [*tmp_path.iterdir()]


# The command.


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat/1.jpg", "cat/1.json", "dog/2.jpg", "dog/LICENSE", "dog/.hidden.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "photos"


def test_the_command_packs_a_folder(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert (
        main(["write-shards", str(photos), "-o", out, "--classes", "--samples-per-shard", "1"]) == 0
    )
    told = capsys.readouterr().err
    assert "2 files are skipped" in told
    assert "2 samples in 2 shards, 1 to 1 in each" in told
    tar = Tar(f"{out}/*.tar", fields=("jpg", "cls"), index="beside")
    assert [*tar.keys] == ["cat/1", "dog/2"]
    assert [*tar] == [(b"cat/1.jpg", b"0"), (b"dog/2.jpg", b"1")]
    assert tar.extensions == ["cls", "jpg", "json"]
    assert main(["write-shards", str(photos), "-o", out]) == 2
    assert "FileExistsError" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["write-shards", "a", "-o", "b", "--bytes-per-shard", "1X"])
    capsys.readouterr()
    for options in ('["key"]', "{key: 1}"):
        with pytest.raises(SystemExit):
            main(["write-shards", "a", "-o", "b", "--storage-options", options])
        assert f"must be a JSON object, not {options!r}" in capsys.readouterr().err


def test_the_command_counts_shards_on_a_terminal_and_takes_options_of_a_store(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    (photos / "dog").rename(tmp_path / "dog")  # with it, all files that are skipped
    out = f"file://{tmp_path}/out"
    words = ["--samples-per-shard", "1", "--storage-options", '{"skip_instance_cache": true}']
    assert main(["write-shards", str(photos), "-o", out, *words]) == 0
    assert terminal.getvalue() == (
        "0 shards are done\r1 shards are done\r1 samples in 1 shards, 1 to 1 in each\n"
    )
