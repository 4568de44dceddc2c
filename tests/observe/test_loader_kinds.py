"""Figures of loaders of all kinds: what was counted is what was done.

The datasets note what they did themselves, by the clock that the meters read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data

from hybridloader import DataLoader, StatefulDataLoader
from hybridloader.backends import threads as thread_backend
from hybridloader.engine.meter import EVERY
from hybridloader.observe import Stats
from hybridloader.observe.stats import StageStats

NAP = 0.002
BATCHES, SIZE = 12, 4

pytestmark = [
    pytest.mark.usefixtures("free_cores"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Noting:
    """Samples that take a while; each tells by the clock how long, and which thread made it."""

    def __len__(self) -> int:
        return BATCHES * SIZE

    def __getitem__(self, index: int) -> Any:
        began = time.perf_counter()
        time.sleep(NAP)
        return index, time.perf_counter() - began, threading.get_ident()


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same samples, in a shard of each worker's own."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        samples = Noting()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (samples[index] for index in range(first, len(samples), step))


def as_it_is(samples: list[Any]) -> Any:
    return samples


def made(cls: Any = DataLoader, dataset: Any = None, **options: Any) -> Any:
    return cls(
        Noting() if dataset is None else dataset,
        SIZE,
        collate_fn=as_it_is,
        observe=True,
        **options,
    )


def row_of(stats: Stats) -> StageStats:
    (row,) = (stage for stage in stats.stages if stage.name == "DataLoader")
    return row


def check(stats: Stats, batches: list[Any], workers: int, threads: int = 1) -> None:
    """Hold statistics of a whole pass against what its samples say."""
    row = row_of(stats)
    assert stats.items == row.items == stats.stages[-1].items == len(batches), str(stats)
    assert row.queued == 0
    assert row.num_workers == max(1, workers)
    worked = sum(seconds for batch in batches for _, seconds, _ in batch) / threads
    # What comes after the last measures of a worker is not told: 10 ms, and a task, which takes longer
    # on a busy machine.
    longest = max(sum(seconds for _, seconds, _ in batch) for batch in batches)
    untold = row.num_workers * (EVERY + 2 * longest)
    assert row.busy >= worked - untold, str(stats)
    spans = stats.seconds * row.num_workers
    assert row.busy + row.starved + row.blocked + row.other == pytest.approx(spans, rel=0.02)
    assert row.busy <= spans
    assert sum(stats.stall.by_stage.values()) <= stats.stall.seconds * (1 + 1e-6)
    sampler = [stage.items for stage in stats.stages if stage.name == "sampler"]
    assert sampler in ([], [len(batches)])


KINDS: dict[str, dict[str, Any]] = {
    "inline": {"backend": "inline"},
    "threads": {"backend": "threads", "num_workers": 2},
    "fork": {"backend": "fork", "num_workers": 2},
    "threads in any order": {"backend": "threads", "num_workers": 2, "in_order": False},
    "fork in any order": {"backend": "fork", "num_workers": 2, "in_order": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("iterable", [False, True])
def test_what_is_counted_is_what_was_done(kind: str, iterable: bool) -> None:
    options = KINDS[kind]
    loader = made(dataset=Stream() if iterable else Noting(), **options)
    batches = list(loader)
    assert sorted(index for batch in batches for index, *_ in batch) == list(range(BATCHES * SIZE))
    check(loader.stats(), batches, options.get("num_workers", 0))
    first = loader.stats().stages[0].name
    assert first == ("DataLoader" if iterable else "sampler")


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_threads_of_a_worker_work_side_by_side(backend: str) -> None:
    """Busy seconds are those of workers: two threads at once count once."""
    loader = made(backend=backend, num_workers=2, threads_per_worker=2)
    batches = list(loader)
    check(loader.stats(), batches, 2, threads=2)
    row = row_of(loader.stats())
    assert (row.cpu is None) == (backend == "threads"), "of threads within a thread nobody knows"


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_workers_that_stay_are_measured_anew_in_each_pass(backend: str) -> None:
    loader = made(backend=backend, num_workers=2, persistent_workers=True)
    for _ in range(3):
        batches = list(loader)
        check(loader.stats(), batches, 2)
    loader._iterator.close()


@pytest.mark.parametrize("backend", ["inline", "threads", "fork"])
def test_a_pass_that_was_resumed_counts_from_there(backend: str) -> None:
    options: dict[str, Any] = {"backend": backend, "num_workers": 0 if backend == "inline" else 2}
    loader = made(StatefulDataLoader, **options)
    before = iter(loader)
    for _ in range(5):
        next(before)
    state = loader.state_dict()
    before.close()
    again = made(StatefulDataLoader, **options)
    again.load_state_dict(state)
    batches = list(again)
    assert len(batches) == BATCHES - 5
    check(again.stats(), batches, options["num_workers"])


def test_workers_that_share_batches_are_measured_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread counts the samples that it fetched, whichever of them answers."""
    monkeypatch.setattr(thread_backend, "_LEAST", 0.0)
    monkeypatch.setattr(thread_backend, "_EACH", 0.0)
    loader = made(backend="threads", num_workers=3)
    batches = list(loader)
    threads = [{thread for *_, thread in batch} for batch in batches]
    assert any(len(each) > 1 for each in threads), "they shared"
    assert [[index for index, *_ in batch] for batch in batches] == [
        list(range(at, at + SIZE)) for at in range(0, BATCHES * SIZE, SIZE)
    ]
    check(loader.stats(), batches, 3)
    row = row_of(loader.stats())
    assert row.cpu is not None
    assert row.cpu < row.busy / 2, "it sleeps"


def test_a_pass_that_is_left_counts_what_was_taken() -> None:
    loader = made(backend="threads", num_workers=2)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    stats = iterator.stats()
    assert row_of(stats).items == stats.items == 5
    assert 0 < row_of(stats).queued <= 4
    (sampler,) = (stage for stage in stats.stages if stage.name == "sampler")
    assert sampler.items == 5 + row_of(stats).queued
    iterator.close()
    assert row_of(loader.stats()).queued == 0
    assert loader.stats().items == 5
