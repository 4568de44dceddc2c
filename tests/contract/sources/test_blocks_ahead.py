"""Blocks of remote sources: each is fetched once, ahead of its samples, within a bound of bytes."""

from __future__ import annotations

import io
import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.archives import sample_members, tar_bytes
from support.http_store import HttpStore

from hybridloader import DataLoader, Pipeline, Retry, Skip
from hybridloader.errors import StoreError
from hybridloader.sampling import BlockShuffleSampler, ShuffleSampler
from hybridloader.sources import Parquet, Shards, Tar

SHARDS, EACH = 6, 8


def tar_of(store: HttpStore, **options: Any) -> Tar:
    for shard in range(SHARDS):
        store.files[f"/{shard}.tar"] = tar_bytes(sample_members(shard * EACH, EACH))
    return Tar(f"{store.url}/{{0..{SHARDS - 1}}}.tar", fields=("txt", "cls"), **options)


def samples() -> list[Any]:
    members = sample_members(0, SHARDS * EACH)
    return [
        (text, label) for (_, text), (_, label) in zip(members[::2], members[1::2], strict=True)
    ]


def read(loader: Any) -> list[Any]:
    return [sample for batch in loader for sample in batch]


@pytest.mark.parametrize(("workers", "block"), [(0, None), (3, 3)])
def test_each_block_is_one_request(store: HttpStore, block: int | None, workers: int) -> None:
    tar = tar_of(store)
    sampler = BlockShuffleSampler(tar, seed=0, block_size=block, window_blocks=2)
    order = [samples()[index] for index in sampler]
    blocks = SHARDS * (1 if block is None else 3)
    options: dict[str, Any] = {"num_workers": workers, "backend": "threads"} if workers else {}
    for _ in range(2):
        store.requests.clear()
        sampler.set_epoch(0)
        assert read(DataLoader(tar, 4, sampler=sampler, collate_fn=list, **options)) == order
        assert len(store.requests) == blocks
        assert len(set(store.requests)) == blocks
    store.requests.clear()
    sampler.set_epoch(0)
    assert list(Pipeline.from_dataset(tar, sampler=sampler)) == order
    assert len(store.requests) == blocks
    tar.close()


def test_ranks_fetch_blocks_of_their_own_and_a_resumed_run_no_more(store: HttpStore) -> None:
    tar = tar_of(store)
    found: list[Any] = []
    for rank in range(2):
        store.requests.clear()
        sampler = BlockShuffleSampler(tar, seed=0, window_blocks=3, num_replicas=2, rank=rank)
        found += read(DataLoader(tar, 4, sampler=sampler, collate_fn=list))
        assert len(store.requests) == SHARDS // 2
    assert sorted(found) == sorted(samples())
    sampler = BlockShuffleSampler(tar, seed=0, window_blocks=2)
    whole = [samples()[index] for index in sampler]
    for position in range(1, SHARDS * EACH, 7):
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "position": position})
        store.requests.clear()
        assert read(DataLoader(tar, 4, sampler=sampler, collate_fn=list)) == whole[position:]
        assert len(store.requests) == len({*store.requests}) <= SHARDS
    tar.close()


def test_a_sample_that_is_read_again_comes_from_the_cache(store: HttpStore, tmp_path: Path) -> None:
    tar = tar_of(store, cache_dir=str(tmp_path))
    sampler = BlockShuffleSampler(tar, seed=0, window_blocks=2)
    assert sorted(tar[index] for index in sampler) == sorted(samples())
    store.requests.clear()
    assert [tar[index] for index in range(len(tar))] == samples()
    assert not store.requests
    tar.close()


def test_a_sample_whose_archive_can_not_be_kept_is_read_alone(
    store: HttpStore, tmp_path: Path
) -> None:
    tar = tar_of(store, cache_dir=str(tmp_path))
    store.once = dict.fromkeys(store.files, "whole")  # instead of a range: not again
    store.requests.clear()
    assert [*tar] == samples()
    assert len(store.requests) == 3 * SHARDS
    tar.close()
    (tmp_path / "file").touch()
    tar = tar_of(store, cache_dir=str(tmp_path / "file" / "folder"))
    with pytest.warns(UserWarning, match="blocks are not kept in .*folder: .*; set cache_dir="):
        assert [*tar] == samples()
    tar.close()


def test_members_that_lie_apart_are_parts_of_a_block(store: HttpStore) -> None:
    """All texts first and the labels after them, with what nobody asked for between."""
    texts = [(f"{n}.txt", f"text {n}".encode() * 9000) for n in range(6)]
    labels = [(f"{n}.cls", f"{n}".encode()) for n in range(6)]
    store.files["/a.tar"] = tar_bytes([*texts, (".bin", bytes(1 << 20)), *labels])
    tar = Tar(f"{store.url}/a.tar", fields=("txt", "cls"))
    sampler = BlockShuffleSampler(tar, seed=0, block_size=3, window_blocks=1)
    store.requests.clear()
    found = [tar[index] for index in sampler]
    assert sorted(found) == [
        (text, label) for (_, text), (_, label) in zip(texts, labels, strict=True)
    ]
    assert len(store.requests) == 4
    tar.close()


class Gated(Shards[int]):
    """Numbers, in blocks that are fetched when the test lets them."""

    def __init__(self, shards: int, each: int, size: int = 100) -> None:
        self.size, self.gate, self.began = size, threading.Event(), threading.Semaphore(0)
        self.fetches: Counter[tuple[int, int, int]] = Counter()
        self.alone: list[int] = []
        self.errors: dict[int, list[BaseException]] = {}
        self.each = each
        super().__init__([f"shard {n}" for n in range(shards)], [each] * shards)

    def fetch(self, shard: int, first: int, last: int) -> bytes:
        self.fetches[shard, first, last] += 1
        self.began.release()
        self.gate.wait()
        if self.errors.get(shard):
            raise self.errors[shard].pop()
        return bytes([shard]) * self.size

    def fetch_size(self, shard: int, first: int, last: int) -> int:
        return self.size

    def read(self, shard: int, number: int) -> int:
        block = self.fetched(shard, number)
        if block is None:
            self.alone.append(shard * self.each + number)
        else:
            assert block.data[0] == shard
            assert block.first <= number < block.last
        return shard * self.each + number

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "gate": None, "began": None}


@pytest.fixture
def gated() -> Iterator[Callable[..., Gated]]:
    made: list[Gated] = []

    def make(*args: Any, limit: int | None = None) -> Gated:
        made.append(Gated(*args))
        if limit is not None:
            made[-1]._read_blocks(limit)
        return made[-1]

    yield make
    while made:  # each lets its cache go
        made[-1].gate.set()
        made.pop().close()


def test_what_is_in_flight_is_bounded_by_bytes(gated: Any) -> None:
    source = gated(12, 4, limit=350)
    indices = iter(BlockShuffleSampler(source, seed=0, window_blocks=2))
    found = [next(indices)]
    reader = threading.Thread(target=source.__getitem__, args=found)
    reader.start()
    for _ in range(3):
        source.began.acquire()
    assert not source.began.acquire(
        blocking=False
    )  # three blocks, as there is no room for a fourth
    source.gate.set()
    reader.join()
    assert found + [source[index] for index in indices] == [
        *BlockShuffleSampler(source.shard_sizes, seed=0, window_blocks=2)
    ]
    assert sorted(source.fetches.values()) == [1] * 12
    assert not source.alone


@pytest.mark.parametrize("draw", [iter, lambda sampler: sampler.batches(4, drop_last=False)])
def test_blocks_that_processes_read_make_room_for_others_as_samples_are_drawn(
    gated: Any, draw: Callable[[Any], Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridloader.sampling.shuffle._PLANNED", 4)
    source = gated(12, 4, limit=350)
    source.gate.set()
    sampler = BlockShuffleSampler(source, seed=0, window_blocks=1)
    pickle.dumps(source)  # as for workers
    for _ in draw(sampler):
        for thread in threading.enumerate():
            if thread.name == "hybridloader-blocks":
                thread.join(30)
    assert sorted(source.fetches.values()) == [1] * 12


def test_a_window_without_room_is_told_and_read_sample_by_sample(gated: Any) -> None:
    source = gated(6, 2, limit=150)
    with pytest.warns(UserWarning, match=r"2 blocks of a window have .* more than ahead_bytes=150"):
        assert sorted(
            map(source.__getitem__, BlockShuffleSampler(source, seed=0, window_blocks=2))
        ) == [*range(12)]
    assert not source.fetches
    assert len(source.alone) == 12


def test_a_block_that_failed_is_read_sample_by_sample(gated: Any) -> None:
    source = gated(4, 3)
    source.gate.set()
    source.errors = {2: [OSError("503")]}
    assert sorted(map(source.__getitem__, BlockShuffleSampler(source, seed=0))) == [*range(12)]
    assert sorted(source.alone) == [6, 7, 8]


class Across(Gated):
    block_sizes = np.array([6, 6])  # type: ignore[assignment]


def test_without_threads_or_with_blocks_across_shards_samples_are_read_alone(
    gated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    source, across = gated(4, 3), Across(4, 3)
    source.gate.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first, *rest = BlockShuffleSampler(source, seed=0)
        assert [source[first]] == source.alone == [first]
    assert [source[index] for index in rest] == rest  # threads may be started again
    assert sorted(map(across.__getitem__, BlockShuffleSampler(across, seed=0))) == [*range(12)]
    assert not across.fetches


def test_blocks_whose_other_samples_a_resumed_run_has_had_make_room(gated: Any) -> None:
    order = [*BlockShuffleSampler([4] * 12, seed=0, window_blocks=2)]
    for position in (3, 10, 25):
        source = gated(12, 4, limit=250)
        source.gate.set()
        sampler = BlockShuffleSampler(source, seed=0, window_blocks=2)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "position": position})
        assert [source[index] for index in sampler] == order[position:]
        assert {*source.fetches.values()} == {1}
        assert not source.alone


def test_a_shard_that_is_not_there_is_asked_for_once(gated: Any) -> None:
    source = gated(4, 3)
    source.gate.set()
    source.errors = {2: [FileNotFoundError(2, "no such file", "shard 2")]}
    sampler = BlockShuffleSampler(source, seed=0)
    loader: Any = DataLoader(
        source, 4, sampler=sampler, collate_fn=list, on_error=Skip(max_failures=3)
    )
    assert sorted(read(loader)) == [n for n in range(12) if n not in (6, 7, 8)]
    assert [type(one.error) for one in loader.skipped] == [FileNotFoundError] * 3
    assert source.fetches[2, 0, 3] == 1
    assert not source.alone


@pytest.mark.parametrize("backend", ["threads", "spawn"])
def test_a_shard_that_stays_missing_is_waited_for_once_and_its_samples_are_skipped(
    store: HttpStore, backend: str
) -> None:
    tar = tar_of(store, retry_seconds=0)
    store.requests.clear()
    store.broken["/2.tar"] = "503"
    sampler = BlockShuffleSampler(tar, seed=0)
    loader: Any = DataLoader(
        *(tar, 4),
        sampler=sampler,
        collate_fn=list,
        num_workers=1,
        backend=backend,
        on_error=Skip(max_failures=EACH),
    )
    lost = range(2 * EACH, 3 * EACH)
    assert sorted(read(loader)) == sorted(
        sample for number, sample in enumerate(samples()) if number not in lost
    )
    skipped = loader.skipped
    assert sorted(one.index for one in skipped) == [*lost]
    assert {type(one.error) for one in skipped} == {StoreError}
    assert all("2.tar" in str(one.error) for one in skipped)
    # The process of the sampler asks, and a worker that is another process asks for itself.
    assert sum(path == "/2.tar" for path, _ in store.requests) == (1 if backend == "threads" else 2)
    del store.broken["/2.tar"]
    assert sorted(read(loader)) == sorted(samples())
    tar.close()


def test_a_retry_asks_again_for_a_shard_that_was_not_served(store: HttpStore) -> None:
    tar = tar_of(store, retry_seconds=0)
    store.once = dict.fromkeys(store.files, "503")  # each block fails once, and no sample
    sampler = BlockShuffleSampler(tar, seed=0)
    loader: Any = DataLoader(
        *(tar, 4), sampler=sampler, collate_fn=list, on_error=Retry(max_retries=1, backoff=0)
    )
    assert sorted(read(loader)) == sorted(samples())
    tar.close()


def test_another_sampler_reads_sample_by_sample_and_is_told_which_would_not(
    gated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridloader.sources.shards._MANY", 9)
    source = gated(4, 3)
    with pytest.warns(UserWarning, match="sampler=BlockShuffleSampler"):
        assert sorted(map(source.__getitem__, ShuffleSampler(source, 0))) == [*range(12)]
    assert not source.fetches


def size_of(asked: tuple[str, str]) -> int:
    first, last = asked[1].removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


@pytest.mark.parametrize(("tensors", "backend"), [(False, "inline"), (True, "threads")])
def test_row_groups_are_fetched_once_ahead(store: HttpStore, tensors: bool, backend: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for file in range(2):
        packed, begin = io.BytesIO(), file * 40
        columns = {
            "x": range(begin, begin + 40),
            "other": [random.Random(n).randbytes(9000) for n in range(40)],
            "y.z": [f"{n}" for n in range(begin, begin + 40)],
            "deep": [{"a": [n]} for n in range(begin, begin + 40)],
        }
        pq.write_table(pa.table(columns), packed, row_group_size=8)
        store.files[f"/{file}.parquet"] = packed.getvalue()
    wanted = ["x", "y.z"] if tensors else ["x", "y.z", "deep"]
    rows = Parquet(
        f"{store.url}/{{0..1}}.parquet", columns=wanted, tensors=tensors, memory_cache_bytes=1 << 20
    )
    sampler = BlockShuffleSampler(rows, seed=0, window_blocks=3, block_size=5)
    order = [*sampler]
    sampler.set_epoch(0)
    store.requests.clear()
    collate = Parquet.collate_fn if tensors else list
    workers = 0 if backend == "inline" else 2
    loader: Any = DataLoader(
        rows, 8, sampler=sampler, collate_fn=collate, num_workers=workers, backend=backend
    )
    if tensors:
        batches = [*loader]
        assert [number for batch in batches for number in batch["x"].tolist()] == order
        assert [text for batch in batches for text in batch["y.z"]] == [*map(str, order)]
    else:
        found = read(loader)
        assert [row["x"] for row in found] == order
        assert [row["deep"]["a"][0] for row in found] == order
    made = [asked for asked in store.requests if asked[1] and size_of(asked) < 1000]  # no footers
    assert len(made) == len(set(made)) == 2 * 5 * 2  # what lies between is not asked for
    rows.close()
