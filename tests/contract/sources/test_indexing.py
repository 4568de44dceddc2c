"""Indices made ahead of time, and shared by ranks; remote archives of which only headers are read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.archives import sample_members, tar_bytes
from support.http_store import HttpStore

from hybridloader.errors import SourceError
from hybridloader.sources import Tar

MAKE = "hybridloader.sources.tar.make_index"
"""What makes an index of an archive: None, where it is to be read and not made."""


def put(memory: Any, count: int) -> list[str]:
    for number in range(count):
        memory.pipe(f"/d/{number}.tar", tar_bytes(sample_members(4 * number, 4)))
    return [f"memory://d/{number}.tar" for number in range(count)]


def bytes_read(requests: list[tuple[str, str]]) -> int:
    spans = [asked.removeprefix("bytes=").split("-") for _, asked in requests if asked]
    return sum(int(last) - int(first) + 1 for first, last in spans)


def test_of_large_members_only_the_headers_are_read(store: HttpStore) -> None:
    members = [
        (f"{n}.{end}", bytes(size))
        for n in range(6)
        for end, size in (("bin", 3 << 20), ("cls", 1))
    ]
    store.files["/a.tar"] = tar_bytes(members)
    tar = Tar(f"{store.url}/a.tar")
    assert list(tar.keys) == [*"012345"]
    assert bytes_read(store.requests) < 400_000 < len(store.files["/a.tar"]) // 45
    assert len(store.requests) < 16
    assert tar[5]["bin"] == bytes(3 << 20)


def test_small_members_are_read_through_once(store: HttpStore) -> None:
    store.files["/a.tar"] = data = tar_bytes([(f"{n}.bin", bytes(5000)) for n in range(400)])
    assert len(Tar(f"{store.url}/a.tar")) == 400
    assert bytes_read(store.requests) <= len(data) * 1.05
    assert len(store.requests) < 12


def test_an_index_is_made_once_and_again_only_of_what_failed(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, folder = put(memory, 2), str(tmp_path / "i")
    assert len(Tar(urls, index=folder)) == 8
    memory.pipe("/d/bad.tar", b"x" * 2000)
    with pytest.raises(SourceError, match=r"bad\.tar is not a tar archive"):
        Tar("memory://d/*.tar", index=folder)
    assert len([*Path(folder).glob("*.index")]) == 2
    memory.pipe("/d/bad.tar", tar_bytes(sample_members(8, 1)))
    assert len(Tar("memory://d/*.tar", index=folder)) == 9
    monkeypatch.setattr(MAKE, None)  # none is made again
    assert len(Tar("memory://d/*.tar", index=folder)) == 9


def test_ranks_without_a_shared_index_are_told_the_option(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = put(memory, 1)
    told = "each of the 4 ranks .* set index= to a folder that all ranks share"
    # Lightning's launcher sets the second alone.
    for name, value in {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            for index in (None, "beside"):
                with pytest.raises(ValueError, match=told):
                    Tar(urls, index=index)
            assert len(Tar(urls, index=str(tmp_path))) == 4


def test_ranks_that_read_a_store_without_times_are_warned(
    store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.files["/a.tar"] = tar_bytes(sample_members(0, 1))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="each of the 4 ranks .* neither a time nor a checksum"):
        tar = Tar(f"{store.url}/a.tar", index=str(tmp_path))
    tar.close()


def test_archives_that_another_rank_indexes_are_left_to_it(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has the lock of the folder; this rank waits, and reads the indices of rank 1."""
    urls = put(memory, 3)
    Tar(urls, index=str(tmp_path / "other"))
    fcntl = pytest.importorskip("fcntl")

    def lockf(file: Any, what: int) -> None:
        assert what == fcntl.LOCK_EX
        for made in (tmp_path / "other").glob("*.index"):
            os.rename(made, tmp_path / made.name)  # rank 1 is done

    monkeypatch.setattr(fcntl, "lockf", lockf)
    monkeypatch.setattr(MAKE, None)  # none is made
    assert len(Tar(urls, index=str(tmp_path))) == 12


def test_an_index_that_can_not_be_saved_leaves_nothing_behind(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    urls = put(memory, 1)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert len(Tar(urls, index=str(tmp_path))) == 4
    assert not [name for name in os.listdir(tmp_path) if "index" in name]


def test_a_folder_without_locks_serves_too(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(pytest.importorskip("fcntl"), "lockf", refuse)
    assert len(Tar(put(memory, 2), index=str(tmp_path / "i"))) == 8


def test_an_index_beside_a_remote_archive_is_read(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (url,) = put(memory, 1)
    Tar(url, index=str(tmp_path))
    (kept,) = tmp_path.glob("*.index")
    memory.pipe("/d/0.tar.index", kept.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(MAKE, None)
        assert len(Tar(url, index="beside")) == 4
    memory.pipe("/d/0.tar", tar_bytes(sample_members(4, 2)))
    assert len(Tar(url, index="beside")) == 2  # that index is not this archive's any more
