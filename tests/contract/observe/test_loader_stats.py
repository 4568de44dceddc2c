"""Statistics of loaders and of runs: what is counted is what was done, in all forms.

The datasets note what they did themselves, by the clock that the meters read.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data
from support.platforms import DEADLINE

from hybridloader import DataLoader, Pipeline, StatefulDataLoader
from hybridloader.observe import StageStats, Stats

MOMENT = 0.002
BATCHES, SIZE = 12, 4
REPORTED = 0.01
"""Seconds of short tasks after which a worker reports its measures."""

pytestmark = [
    pytest.mark.usefixtures("free_cores"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Noting:
    """Samples that take a while; each has its seconds by the clock, and the thread that made it."""

    def __len__(self) -> int:
        return BATCHES * SIZE

    def __getitem__(self, index: int) -> Any:
        began = time.perf_counter()
        time.sleep(MOMENT)
        return index, time.perf_counter() - began, threading.get_ident()


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same samples, in a shard of each worker's own."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (Noting()[index] for index in range(first, len(Noting()), step))


def made(cls: Any = DataLoader, dataset: Any = None, **options: Any) -> Any:
    return cls(dataset or Noting(), SIZE, collate_fn=list, observe=True, **options)


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
    # What comes after the last measures of a worker is not reported.
    longest = max(sum(seconds for _, seconds, _ in batch) for batch in batches)
    assert row.busy >= worked - row.num_workers * (REPORTED + 2 * longest), str(stats)
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
    "threads that stay": {"backend": "threads", "num_workers": 2, "persistent_workers": True},
    "fork that stays": {"backend": "fork", "num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_counted_is_what_was_done(kind: str) -> None:
    """Of workers that stay, in each pass anew."""
    options = KINDS[kind]
    for dataset in (Noting(), Stream()):
        loader = made(dataset=dataset, **options)
        for _ in range(1 + ("persistent_workers" in options)):
            batches = list(loader)
            indices = sorted(index for batch in batches for index, *_ in batch)
            assert indices == list(range(BATCHES * SIZE))
            check(loader.stats(), batches, options.get("num_workers", 0))
        first = loader.stats().stages[0].name
        assert first == ("DataLoader" if isinstance(dataset, Stream) else "sampler")
        if "persistent_workers" in options:
            loader._iterator.close()


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_threads_of_a_worker_work_side_by_side(backend: str) -> None:
    """Busy seconds are those of workers: two threads at once count once."""
    loader = made(backend=backend, num_workers=2, threads_per_worker=2)
    batches = list(loader)
    check(loader.stats(), batches, 2, threads=2)
    row = row_of(loader.stats())
    assert (row.cpu is None) == (backend == "threads"), "of threads within a thread nobody knows"


def test_a_pass_that_is_left_counts_what_was_taken() -> None:
    loader = made(backend="threads", num_workers=2)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    stats = iterator.stats()
    assert row_of(stats).items == stats.items == 5
    assert 0 < row_of(stats).queued <= 4
    assert stats.stages[0].name == "sampler"
    assert stats.stages[0].items == 5 + row_of(stats).queued
    iterator.close()
    assert row_of(loader.stats()).queued == 0
    assert loader.stats().items == 5
    assert loader.stats().seconds == loader.stats().seconds, "the clock has stopped"


def test_threads_that_pull_a_loader_in_turn_leave_no_file_of_theirs() -> None:
    """The kernel counts waits for a core in a file of each thread; the fixture in conftest.py counts."""
    loader = made(backend="inline")
    iterator = iter(loader)
    together = threading.Barrier(BATCHES)

    def pull(_: int) -> Any:
        batch = next(iterator)
        together.wait(DEADLINE)  # so that no thread gets the identity of another
        return batch

    with ThreadPoolExecutor(BATCHES) as pool:
        batches = list(pool.map(pull, range(BATCHES)))
    assert list(iterator) == []
    assert len({thread for batch in batches for *_, thread in batch}) == BATCHES
    check(loader.stats(), batches, 0)


# -- the object ------------------------------------------------------------------------------------


def small(**others: Any) -> DataLoader:
    return DataLoader(range(8), 2, backend="threads", num_workers=1, **others)  # type: ignore[arg-type]


def test_who_was_not_asked_to_observe_says_how_to() -> None:
    for loader in (small(), StatefulDataLoader(range(8), 2)):  # type: ignore[arg-type]
        iterator: Any = iter(loader)
        for asked in (loader, iterator):
            with pytest.raises(RuntimeError, match="observe=True"):
                asked.stats()
        loader.observe = True
        with pytest.raises(RuntimeError, match="observe=True"):
            loader.stats()
        list(loader)
        assert loader.stats().items == 4
    pipe = Pipeline.from_dataset(range(8)).map(abs, backend="threads", num_workers=1)
    with pipe.run() as run, pytest.raises(RuntimeError, match=r"pipe\.run\(observe=True\)"):
        run.stats()
    with pipe.epochs(1) as epochs, pytest.raises(RuntimeError, match=r"epochs\(n, observe=True\)"):
        next(epochs).stats()
    with pytest.raises(TypeError, match="observe"):
        small(observe="yes")


def test_statistics_of_a_run_go_on_over_epochs_and_begin_at_a_state() -> None:
    pipe = Pipeline.from_dataset(range(100)).map(abs, backend="threads", num_workers=2)
    with pipe.batch(10).epochs(3, observe=True) as epochs:
        for number, run in enumerate(epochs, 1):
            assert len(list(run)) == 10
            assert run.stats().items == 10 * number
    assert run.stats().seconds == run.stats().seconds, "the clock has stopped"
    with pipe.run(observe=True) as run:
        next(run)
        state = run.state_dict()
    assert run.stats().items == 1
    with pipe.run(state=state, observe=True) as run:
        assert next(run) == 1
        assert run.stats().items == 1


def test_all_forms() -> None:
    loader = made(backend="threads", num_workers=2)
    list(loader)
    stats = loader.stats()
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert json.loads(json.dumps(stats.to_dict()))["verdict"]["cause"] == stats.verdict.cause
    shown: list[str] = []
    stats._repr_pretty_(SimpleNamespace(text=shown.append), cycle=False)
    assert shown == [str(stats)]


def without_a_batch() -> Iterator[Stats]:
    options: dict[str, Any] = {"backend": "threads", "num_workers": 2}
    loader = small(observe=True)
    yield loader.stats()
    iterator: Any = iter(loader)
    iterator.close()
    yield loader.stats()
    yield iterator.stats()
    run = Pipeline.from_iterable(range(40)).map(abs, **options).run(observe=True)
    yield run.stats()
    run.close()
    yield run.stats()


def test_without_a_batch_all_forms_say_so() -> None:
    for stats in without_a_batch():
        assert stats.items == 0
        assert stats.verdict.cause == "unknown"
        assert "No batch has come" in stats.verdict.evidence
        assert stats.verdict.advice
        assert json.loads(json.dumps(stats.to_dict()))["items"] == 0
        assert "0 items" in str(stats)
