"""Statistics of loaders: what is counted is what was done, and known bottlenecks are named.

The datasets note what they did themselves, by the clock that the meters read. The exact rules of
verdicts are held by `test_verdict`: here each has one real run.
"""

from __future__ import annotations

import gc
import json
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.utils.data
from support.platforms import GIL

import hybridloader
from hybridloader import DataLoader, StatefulDataLoader
from hybridloader.backends import threads as thread_backend
from hybridloader.engine.meter import EVERY
from hybridloader.observe import Stats
from hybridloader.observe.stats import StageStats
from hybridloader.sources import PerWorker

NAP, MOMENT = 0.004, 0.002
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
        time.sleep(MOMENT)
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


# -- verdicts --------------------------------------------------------------------------------------


class Work:
    """Samples of which each takes a while, in one way or another."""

    def __init__(self, how: str = "", length: int = 60) -> None:
        self.how, self.length = how, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.how == "sleep":
            time.sleep(NAP)
        elif self.how == "spin":
            until = time.thread_time() + NAP
            while time.thread_time() < until:
                pass
        elif self.how == "large":
            return list(numpy.arange(index, index + 20_000))  # see `dear` of the pipeline's tests
        return index


class SlowSampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for index in range(60):
            time.sleep(NAP)
            yield index

    def __len__(self) -> int:
        return 60


class OneReader(torch.utils.data.IterableDataset[int]):
    """Samples all of which the first worker reads."""

    def __iter__(self) -> Iterator[int]:
        info: Any = torch.utils.data.get_worker_info()
        for index in range(0 if info.id else 60):
            time.sleep(NAP)
            yield index


class Kept:
    """A large tensor, which takes no time to make."""

    def __init__(self) -> None:
        self.tensor = torch.ones(32 << 20, dtype=torch.uint8)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.tensor


def sleeping_collate(samples: list[Any]) -> Any:
    time.sleep(2 * NAP)
    return samples


def loaded(dataset: Any, batch_size: int | None = 1, step: float = 0.0, **options: Any) -> Stats:
    """Statistics of the second epoch of workers that stay: the first has their start."""
    options = {"collate_fn": as_it_is, "num_workers": 2, **options}
    loader = DataLoader(dataset, batch_size, persistent_workers=True, observe=True, **options)
    for _ in range(2):
        for _ in loader:
            if step:  # even a sleep of 0 seconds leaves the GIL, and waits for it
                time.sleep(step)
    stats = loader.stats()
    loader._iterator.close()  # type: ignore[union-attr]
    return stats


FORK, THREADS = {"backend": "fork"}, {"backend": "threads"}
VERDICTS: dict[str, Any] = {
    "a dataset that waits": ((Work("sleep"),), FORK, ("stage", "waits"), "num_workers="),
    "results that are dear to send": ((Work("large", 20),), FORK, ("stage", "transport"), "Return"),
    "a loop that takes its time": ((Work(), 1, 2 * NAP), FORK, ("loop", None), "training step"),
    "a slow sampler": ((Work(),), {"sampler": SlowSampler(), **THREADS}, ("source", None), ""),
    "a worker without data": ((OneReader(), 2), FORK, ("stage", "waits"), "will not help"),
    "tensors": ((Kept(), None), FORK, ("stage", "transport"), "tensors or arrays already"),
    "a collation that waits": (
        (Work(), 2),
        {"collate_fn": sleeping_collate, "threads_per_worker": 2, **FORK},
        ("stage", "waits"),
        "num_workers=",
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_known_bottleneck_is_named(name: str) -> None:
    arguments, options, expected, advice = VERDICTS[name]
    stats = loaded(*arguments, **options)
    assert (stats.verdict.cause, stats.verdict.kind) == expected, str(stats)
    assert advice in stats.verdict.advice
    assert sum(stats.stall.by_stage.values()) == pytest.approx(stats.stall.seconds)


def test_threads_that_compute_are_known_from_their_cpu_time() -> None:
    for _ in range(5):
        stats = loaded(Work("spin"), **THREADS)
        if stats.verdict.kind != "waits":  # on a busy machine it waits for a core
            break
    (row,) = (stage for stage in stats.stages if stage.name == "DataLoader")
    assert row.cpu is not None
    assert row.cpu >= 60 * NAP * 0.8
    if GIL:
        assert (stats.verdict.cause, stats.verdict.kind) == ("stage", "holds-gil"), str(stats)
    else:
        assert stats.verdict.kind != "holds-gil"


class Opening(Work):
    """Samples before the first of which each worker opens a file for a long time, and then keeps it."""

    def __init__(self) -> None:
        super().__init__("sleep")
        self.open = PerWorker(lambda: time.sleep(100 * NAP))

    def __getitem__(self, index: int) -> Any:
        self.open()
        return super().__getitem__(index)


@pytest.mark.parametrize(("backend", "workers"), [("inline", 0), ("threads", 2), ("fork", 2)])
def test_a_file_that_workers_open_with_their_first_sample_is_their_start(
    backend: str, workers: int
) -> None:
    """Once the prefetch is full loading keeps up, yet most of the time was waited for."""
    kept = backend == "threads"
    loader = DataLoader(
        Opening(),  # type: ignore[arg-type]
        num_workers=workers,
        backend=backend,
        observe=True,
        persistent_workers=kept,
    )
    for _ in loader:
        time.sleep(NAP)
    verdict = loader.stats().verdict
    assert verdict.cause == "start", str(loader.stats())
    assert "for their first tasks" in verdict.evidence
    if workers:
        assert ("Keep it open" if kept else "persistent_workers=True") in verdict.advice
    if kept:
        for _ in loader:
            time.sleep(NAP)
        assert loader.stats().verdict.cause != "start", str(loader.stats())
        loader._iterator.close()  # type: ignore[union-attr]


# -- the object ------------------------------------------------------------------------------------


def small(**others: Any) -> DataLoader:
    return DataLoader(range(8), 2, backend="threads", num_workers=1, **others)  # type: ignore[arg-type]


def test_a_loader_that_was_not_asked_says_how_to() -> None:
    for loader in (small(), StatefulDataLoader(range(8), 2)):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="observe=True"):
            loader.stats()
        iterator: Any = iter(loader)
        with pytest.raises(RuntimeError, match="observe=True"):
            iterator.stats()
        loader.observe = True
        with pytest.raises(RuntimeError, match="observe=True"):
            loader.stats()
        list(loader)
        assert loader.stats().items == 4
    with pytest.raises(TypeError, match="observe"):
        small(observe="yes")


def test_before_the_first_epoch_there_is_nothing() -> None:
    stats = small(observe=True).stats()
    assert stats.verdict.cause == "unknown"
    assert "No batch has come" in str(stats)
    assert stats.items == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_statistics_are_of_the_latest_epoch(persistent: bool) -> None:
    loader = small(observe=True, persistent_workers=persistent)
    for _ in range(3):
        assert len(list(loader)) == 4
        stats = loader.stats()
        assert [stage.items for stage in stats.stages] == [4, 4, 4]
    if persistent:
        loader._iterator.close()
    assert loader.stats().items == 4


def test_they_outlive_the_iterator_and_hold_nothing() -> None:
    loader = small(observe=True)
    iterator: Any = iter(loader)
    next(iterator)
    stage = weakref.ref(iterator._stage)
    iterator.close()
    seconds = loader.stats().seconds
    assert loader.stats().seconds == seconds, "the clock has stopped"
    del iterator
    gc.collect()
    assert stage() is None
    assert loader.stats().items == 1
    for _ in loader:
        break
    gc.collect()
    assert loader.stats().seconds == loader.stats().seconds


@pytest.mark.usefixtures("_fonts_open")
def test_all_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = loaded(Work("sleep"), **THREADS)
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert json.loads(json.dumps(stats.to_dict()))["verdict"]["kind"] == "waits"
    stats.print()
    assert "bottleneck is DataLoader" in capsys.readouterr().out
    assert stats._repr_html_().startswith("<table>")
    for name in ("a.png", "a.svg"):
        stats.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    other = loaded(Work("sleep"), num_workers=4, **THREADS)
    comparison = hybridloader.observe.compare(stats, other)
    assert comparison.speedup is not None
    assert "samples a second" in str(comparison)
    assert json.loads(json.dumps(comparison.to_dict()))["changes"]
    assert comparison._repr_html_().startswith("<table>")
    comparison.print()
    assert "DataLoader: busy a sample" in capsys.readouterr().out
    with pytest.raises(TypeError, match="results of stats"):
        hybridloader.observe.compare(stats, 3)  # type: ignore[arg-type]
    empty = small(observe=True).stats()
    assert hybridloader.observe.compare(empty, stats).speedup is None
    assert str(hybridloader.observe.compare(empty, stats))
