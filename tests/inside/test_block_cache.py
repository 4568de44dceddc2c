"""A folder of blocks that threads, processes and jobs share, whatever happens to one of them."""

from __future__ import annotations

import io
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.archives import sample_members, tar_bytes
from support.http_store import HttpStore
from support.programs import output, python

from hybridloader import DataLoader, Pipeline, SharedMemory, Spawn
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import Tar, shards
from hybridloader.sources.shards import BlockCache, private_cache

pytest.importorskip("fcntl")
SHARDS, EACH = 6, 8


def tar_of(store: HttpStore, **options: Any) -> Tar:
    for shard in range(SHARDS):
        store.files[f"/{shard}.tar"] = tar_bytes(sample_members(shard * EACH, EACH))
    return Tar(f"{store.url}/{{0..{SHARDS - 1}}}.tar", fields=("txt",), **options)


def texts() -> list[Any]:
    return [(text,) for _, text in sample_members(0, SHARDS * EACH)[::2]]


def read(tar: Tar, sampler: Any, **options: Any) -> list[Any]:
    loader: Any = DataLoader(tar, 4, sampler=sampler, collate_fn=list, **options)
    return [sample for batch in loader for sample in batch]


def block(number: int, size: int = 1000) -> bytes:
    return bytes([number]) * size


def never() -> bytes:
    raise AssertionError("the block was fetched again")


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(str(tmp_path / "cache"), 10_000)


def names(cache: BlockCache) -> list[str]:
    return sorted(name for name in os.listdir(cache.folder) if not name.endswith(".lock"))


def test_a_block_is_fetched_once_and_read_by_all(cache: BlockCache) -> None:
    assert cache.get("a", lambda: block(1)) == block(1)
    assert cache.get("a", never) == block(1)
    assert BlockCache(cache.folder, 10_000).get("a", never) == block(1)
    code = (
        "import sys; from hybridloader.sources.shards import BlockCache;"
        "print(len(BlockCache(sys.argv[1], 10_000).get('a', None)))"
    )
    assert output("-c", code, cache.folder) == "1000\n"


def test_of_several_threads_one_fetches(cache: BlockCache) -> None:
    gate, fetches = threading.Event(), []

    def fetch() -> bytes:
        fetches.append(1)
        gate.wait()
        return block(1)

    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(cache.get, "a", fetch) for _ in range(4)]
        gate.set()
        assert [bytes(one.result()) for one in found] == [block(1)] * 4
    assert len(fetches) == 1


def test_a_file_that_is_not_whole_is_never_read(cache: BlockCache) -> None:
    cache.get("a", lambda: block(1))
    path = Path(cache.folder, names(cache)[0])
    held = path.read_bytes()
    for damaged in (held[:500], bytes(len(held)), b"", bytes([held[0] ^ 1, *held[1:]])):
        path.write_bytes(damaged)
        assert cache.get("a", lambda: block(1)) == block(1)
        assert cache.get("a", never) == block(1)


def test_what_a_killed_writer_left_is_written_anew(cache: BlockCache) -> None:
    code = """
import os, sys
from hybridloader.sources import shards
cache = shards.BlockCache(sys.argv[1], 10_000)
shards.os.replace = lambda *_: os.kill(os.getpid(), 9)
cache.get("a", lambda: b"x" * 500)
"""
    assert python("-c", code, cache.folder).returncode == -9
    assert [name.split(".")[1] for name in names(cache)] == ["part"]
    assert cache.get("a", lambda: block(1)) == block(1)
    assert [name.split(".")[1] for name in names(cache)] == ["block"]


def test_what_was_used_longest_ago_goes_first_and_what_is_in_use_stays(cache: BlockCache) -> None:
    held = cache.get("0", lambda: block(0))
    for number in range(1, 9):
        cache.get(f"{number}", lambda: block(1))
    for number, path in enumerate(sorted(map(str, Path(cache.folder).glob("*.block")))):
        os.utime(path, ns=(number, number))
    kept = {str(number) for number in range(9)}
    for number in range(20, 40):
        cache.get(f"{number}", lambda: block(2))
        size = sum(path.stat().st_size for path in Path(cache.folder).glob("*.block"))
        assert size <= 10_000
    assert cache.get("0", never) == held == block(0)
    assert cache.get("39", never) == block(2)
    fetched: list[str] = []
    for key in sorted(kept - {"0"}):
        cache.get(key, lambda key=key: (fetched.append(key), block(1))[1])  # type: ignore[misc, func-returns-value]
    assert fetched == sorted(kept - {"0"})


def test_without_room_blocks_are_given_out_and_not_kept(cache: BlockCache) -> None:
    held = [cache.get(f"{number}", lambda: block(1)) for number in range(9)]
    assert cache.get("more", lambda: block(2)) == block(2)
    assert len(names(cache)) == len(held) == 9
    held.clear()
    assert cache.get("more", lambda: block(2)) == block(2)
    assert cache.get("more", never) == block(2)


@pytest.mark.parametrize("fails", ["open", "replace"])
def test_a_loader_on_a_full_disk_is_told_and_loses_nothing(
    store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any = b"", *_: Any) -> int:
            raise OSError(28, "No space left on device")

    tar = tar_of(store, cache_dir=str(tmp_path))
    if fails == "open":
        monkeypatch.setattr(shards, "open", lambda *_: Full(), raising=False)
    else:
        monkeypatch.setattr("hybridloader.sources.shards.os.replace", Full().write)
    sampler = BlockShuffleSampler(tar, seed=0, block_size=3, window_blocks=2)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert sorted(read(tar, sampler, num_workers=2, backend="threads")) == sorted(texts())
    assert not [*tmp_path.glob("*.block")]
    tar.close()


def test_a_private_cache_goes_with_its_owner_or_is_removed_after_it(tmp_path: Path) -> None:
    cache = private_cache(1 << 20)
    folder = cache.folder
    assert cache.get("a", lambda: block(1)) == block(1)
    code = (
        "import os; from hybridloader.sources.shards import private_cache;"
        "cache = private_cache(1 << 20); print(cache.folder, flush=True); os.kill(os.getpid(), 9)"
    )
    left = python("-c", code).stdout.strip()
    assert os.path.exists(left)
    other = private_cache(1 << 20)
    assert os.path.exists(folder)
    assert not os.path.exists(left)
    del cache, other
    assert not os.path.exists(folder)


def test_the_second_epoch_and_another_job_read_from_the_folder(
    store: HttpStore, tmp_path: Path
) -> None:
    folder = str(tmp_path / "cache")
    tar = tar_of(store, cache_dir=folder)
    sampler = BlockShuffleSampler(tar, seed=0, block_size=3, window_blocks=2)
    orders = [[texts()[index] for index in sampler] for _ in range(2)]
    sampler.set_epoch(0)
    loader: Any = DataLoader(
        tar, 4, sampler=sampler, collate_fn=list, num_workers=2, backend="threads"
    )
    assert "cache" not in str(loader.state_dict())
    for order, requests in zip(orders, (SHARDS * 3, 0), strict=True):
        store.requests.clear()
        assert [sample for batch in loader for sample in batch] == order
        assert len(store.requests) == requests
    tar.close()
    other = tar_of(store, cache_dir=folder)
    store.requests.clear()
    sampler = BlockShuffleSampler(other, seed=0, block_size=3, window_blocks=2)
    assert list(Pipeline.from_dataset(other, sampler=sampler)) == orders[0]
    assert not store.requests
    other.close()
    store.files["/0.tar"] += bytes(512)  # the archive has changed, so none of its blocks is taken
    changed = Tar(f"{store.url}/0.tar", fields=("txt",), cache_dir=folder)
    store.requests.clear()
    sampler = BlockShuffleSampler(changed, seed=0, block_size=3)
    assert len([changed[index] for index in sampler]) == EACH
    assert len(store.requests) == 3
    changed.close()


def test_without_such_a_sampler_whole_archives_are_kept(store: HttpStore, tmp_path: Path) -> None:
    tar = tar_of(store, cache_dir=str(tmp_path))
    store.requests.clear()
    for _ in range(2):
        assert [*tar] == texts()
        assert len(store.requests) == SHARDS
    tar.close()


def test_a_cache_below_the_window_is_refused_at_once(store: HttpStore, tmp_path: Path) -> None:
    tar = tar_of(store, cache_dir=str(tmp_path), cache_bytes=1000)
    sampler = BlockShuffleSampler(tar, seed=0, window_blocks=2)
    with pytest.raises(
        ValueError, match="cache_bytes=1000 has no room for the 2 blocks of a window"
    ):
        next(iter(sampler))
    tar.close()


@pytest.mark.parametrize(
    ("backend", "kept"), [(Spawn(), True), (SharedMemory(start_method="forkserver"), False)]
)
def test_processes_fetch_each_block_once_between_them(
    store: HttpStore, backend: Any, kept: bool, tmp_path: Path
) -> None:
    tar = tar_of(store, cache_dir=str(tmp_path) if kept else None)
    sampler = BlockShuffleSampler(tar, seed=0, block_size=3, window_blocks=2)
    order = [texts()[index] for index in sampler]
    sampler.set_epoch(0)
    store.requests.clear()
    assert read(tar, sampler, num_workers=2, backend=backend) == order
    assert len(store.requests) == len(set(store.requests)) == SHARDS * 3
    tar.close()


def test_samples_do_not_wait_until_their_block_is_written(
    store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = tar_of(store, cache_dir=str(tmp_path))
    gate, write = threading.Event(), BlockCache._write

    def slowly(*arguments: Any) -> bool:
        gate.wait()
        return write(*arguments)

    monkeypatch.setattr(BlockCache, "_write", slowly)
    # The server's port is in the keys: in 1 run of 17, two blocks would share one of 256 lock files, and
    # the second would wait for the first one's write.
    monkeypatch.setattr(shards, "_LOCKS", 1 << 32)
    sampler = BlockShuffleSampler(tar, seed=0)
    assert sorted(tar[index] for index in sampler) == sorted(texts())
    assert tar._reader is not None
    plan = tar._reader._plan
    assert plan is not None
    assert plan.held > 0  # bytes that are being written count
    gate.set()
    tar.close()
    assert plan.held == 0
    assert len(list(tmp_path.glob("*.block"))) == SHARDS


@pytest.mark.full
@pytest.mark.parametrize("backend", ["inline", "threads", "spawn"])
def test_two_jobs_on_one_small_cache_in_a_storm_lose_and_double_nothing(
    store: HttpStore, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the answers fails; the folder has room for little more than a window of each."""
    monkeypatch.setattr("hybridloader.sources.store._FIRST", 0.0)
    chosen = random.Random(3)
    kinds = ["503", "short", "less", "drop", *["ok"] * 8]
    sources = [tar_of(store, cache_dir=str(tmp_path), cache_bytes=60_000) for _ in range(2)]
    store.faults.extend(chosen.choice(kinds) for _ in range(2000))
    found: dict[tuple[int, int], list[Any]] = {}
    workers = 0 if backend == "inline" else 2

    def job(number: int) -> None:
        sampler = BlockShuffleSampler(sources[number], seed=number, block_size=3, window_blocks=2)
        for epoch in range(6):
            loader: Any = DataLoader(
                sources[number],
                4,
                sampler=sampler,
                collate_fn=list,
                num_workers=workers,
                backend=backend,
            )
            found[number, epoch] = [sample for batch in loader for sample in batch]

    jobs = [threading.Thread(target=job, args=(number,)) for number in range(2)]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join()
    for number, source in enumerate(sources):
        order = BlockShuffleSampler(source.shard_sizes, seed=number, block_size=3, window_blocks=2)
        for epoch in range(6):
            assert found[number, epoch] == [texts()[index] for index in order]
        source.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.block")) <= 66_000
