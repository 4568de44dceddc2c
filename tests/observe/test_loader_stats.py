"""Statistics of loaders whose bottleneck is known: the real thing, on all kinds of workers."""

from __future__ import annotations

import gc
import json
import pickle
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
from hybridloader import DataLoader, Skip, StatefulDataLoader
from hybridloader.observe import Stats
from hybridloader.sources import PerWorker

NAP = 0.004


pytestmark = pytest.mark.usefixtures("free_cores")


class Work:
    """Samples of which each takes a while, in one way or another."""

    def __init__(self, how: str, seconds: float = NAP, length: int = 60) -> None:
        self.how, self.seconds, self.length = how, seconds, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.how == "sleep":
            time.sleep(self.seconds)
        elif self.how == "spin":
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                pass
        elif self.how == "large":
            return list(numpy.arange(index, index + 20_000))  # see `dear` of the pipeline's tests
        return index


def as_it_is(samples: list[Any]) -> Any:
    return samples


def loaded(
    how: str, backend: str, workers: int, step: float = 0.0, **others: Any
) -> tuple[DataLoader, Stats]:
    loader = DataLoader(
        Work(how),  # type: ignore[arg-type]
        num_workers=workers,
        backend=backend,
        collate_fn=as_it_is,
        observe=True,
        persistent_workers=backend in ("fork", "spawn"),  # the first epoch has its start
        **others,
    )
    for _ in range(2 if loader.persistent_workers else 1):
        for _ in loader:
            if step:  # even a sleep of 0 seconds leaves the GIL, and waits for it
                time.sleep(step)
    stats = loader.stats()
    if loader.persistent_workers:
        loader._iterator.close()  # type: ignore[union-attr]
    return loader, stats


EVERYWHERE = pytest.mark.parametrize(
    ("backend", "workers"),
    [
        ("inline", 0),
        ("threads", 2),
        ("fork", 2),
        pytest.param("spawn", 1, marks=pytest.mark.full),
    ],
)


@EVERYWHERE
def test_a_dataset_that_waits_is_named(backend: str, workers: int) -> None:
    _, stats = loaded("sleep", backend, workers)
    verdict = stats.verdict
    assert (verdict.cause, verdict.stage, verdict.kind) == ("stage", "DataLoader", "waits"), str(
        stats
    )
    assert "num_workers" in verdict.advice
    (row,) = (stage for stage in stats.stages if stage.name == "DataLoader")
    assert row.items == stats.items == 60
    assert row.busy >= 0.9 * 60 * NAP, "but for the last 10 ms"
    assert row.cpu is not None
    assert row.cpu < row.busy / 2
    assert sum(stats.stall.by_stage.values()) == pytest.approx(stats.stall.seconds)


@pytest.mark.parametrize(("backend", "workers"), [("inline", 0), ("fork", 2)])
def test_a_dataset_that_computes_is_named(backend: str, workers: int) -> None:
    stats = loaded("spin", backend, workers)[1]
    assert (stats.verdict.cause, stats.verdict.stage) == ("stage", "DataLoader"), str(stats)
    assert stats.verdict.kind in ("computes", "waits"), (
        stats
    )  # on a busy machine it waits for a core
    (row,) = (stage for stage in stats.stages if stage.name == "DataLoader")
    assert row.cpu is not None
    assert row.cpu >= 60 * NAP * 0.8


def test_threads_that_hold_the_gil_are_named() -> None:
    for _ in range(5):
        stats = loaded("spin", "threads", 2)[1]
        if stats.verdict.kind != "waits":  # on a busy machine it waits for a core
            break
    if GIL:
        assert (stats.verdict.cause, stats.verdict.kind) == ("stage", "holds-gil"), str(stats)
        assert "processes" in stats.verdict.advice
    else:
        assert stats.verdict.kind != "holds-gil"


@pytest.mark.parametrize("backend", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_results_that_are_dear_to_send_are_named(backend: str) -> None:
    stats = loaded("large", backend, 1)[1]
    assert (stats.verdict.cause, stats.verdict.kind) == ("stage", "transport"), str(stats)
    assert stats.stages[1].bytes


@EVERYWHERE
def test_a_loop_that_takes_its_time_is_named(backend: str, workers: int) -> None:
    if not workers:
        pytest.skip("it does all itself")
    stats = loaded("", backend, workers, step=2 * NAP)[1]
    assert stats.verdict.cause == "loop", str(stats)
    assert stats.stages[-1].name == "your loop"
    assert stats.stages[-1].load > 0.8


class SlowSampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for index in range(60):
            time.sleep(NAP)
            yield index

    def __len__(self) -> int:
        return 60


@EVERYWHERE
def test_a_slow_sampler_is_named(backend: str, workers: int) -> None:
    stats = loaded("", backend, workers, sampler=SlowSampler())[1]
    assert (stats.verdict.cause, stats.verdict.stage) == ("source", "sampler"), str(stats)


class Opening(Work):
    """Samples before the first of which each worker opens a file for a long time, and then keeps it."""

    def __init__(self) -> None:
        super().__init__("sleep", NAP / 4)
        self.open = PerWorker(Opened)

    def __getitem__(self, index: int) -> Any:
        self.open()
        return super().__getitem__(index)


class Opened:
    def __init__(self) -> None:
        time.sleep(100 * NAP)


@EVERYWHERE
def test_a_file_that_workers_open_with_their_first_sample_is_their_start(
    backend: str, workers: int
) -> None:
    """Once the prefetch is full loading keeps up, yet most of the time was waited for."""
    loader = DataLoader(
        Opening(),  # type: ignore[arg-type]
        num_workers=workers,
        backend=backend,
        observe=True,
        persistent_workers=backend == "threads",
    )
    for _ in loader:
        time.sleep(NAP)
    stats = loader.stats()
    verdict = stats.verdict
    assert verdict.cause == "start", str(stats)
    slow_start = backend == "spawn" and "until the first worker began" in verdict.evidence
    assert slow_start or "for their first tasks" in verdict.evidence
    if workers:
        kept = loader.persistent_workers
        assert ("Keep it open" if kept else "persistent_workers=True") in verdict.advice
    if loader.persistent_workers:
        for _ in loader:
            time.sleep(NAP)
        assert loader.stats().verdict.cause != "start", str(loader.stats())
        loader._iterator.close()  # type: ignore[union-attr]


def twice(dataset: Any, batch_size: int | None, **options: Any) -> Stats:
    """Statistics of the second epoch of workers that stay: the first has their start."""
    loader = DataLoader(dataset, batch_size, persistent_workers=True, observe=True, **options)
    for _ in range(2):
        for _ in loader:
            pass
    stats = loader.stats()
    loader._iterator.close()  # type: ignore[union-attr]
    return stats


class Parts(torch.utils.data.IterableDataset[int]):
    """Samples of which each worker reads a part; or the first worker all of them."""

    def __init__(self, count: int | None) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        count = info.num_workers if self.count is None else self.count
        for index in range(info.id, 60 if info.id < count else 0, count):
            time.sleep(NAP)
            yield index


@pytest.mark.parametrize("backend", ["threads", "fork"])
@pytest.mark.parametrize("count", [None, 1])
def test_workers_without_a_part_of_the_data_are_named(backend: str, count: int | None) -> None:
    stats = twice(Parts(count), 2, num_workers=2, backend=backend)
    verdict = stats.verdict
    assert (verdict.cause, verdict.kind) == ("stage", "waits"), str(stats)
    assert ("1 of its 2 workers had next to nothing" in verdict.evidence) == (count == 1)
    assert ("more workers will not help" in verdict.advice) == (count == 1)
    assert ("num_workers=" in verdict.advice) == (count != 1)
    assert "threads_per_worker" not in verdict.advice


def sleeping_collate(samples: list[Any]) -> Any:
    time.sleep(2 * NAP)
    return samples


@pytest.mark.parametrize("backend", ["threads", "fork"])
@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"threads_per_worker": 2}])
def test_a_collation_that_waits_is_named(backend: str, options: dict[str, Any]) -> None:
    how = {"backend": backend, "num_workers": 2, **options}
    stats = twice(range(60), 2, collate_fn=sleeping_collate, **how)
    verdict = stats.verdict
    assert verdict.stage == "DataLoader", str(stats)
    assert "collate_fn" in verdict.evidence
    assert "threads_per_worker" not in verdict.advice


class Kept:
    """A large tensor, which takes no time to make."""

    def __init__(self) -> None:
        self.tensor = torch.ones(32 << 20, dtype=torch.uint8)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.tensor


@pytest.mark.parametrize("context", [None, "fork"])
def test_tensors_that_are_dear_to_send_are_known_as_tensors(context: str | None) -> None:
    how = {"multiprocessing_context": context} if context else {"backend": "fork"}
    stats = twice(Kept(), None, num_workers=1, **how)
    verdict = stats.verdict
    assert (verdict.cause, verdict.kind) == ("stage", "transport"), str(stats)
    assert "tensors or arrays already" in verdict.advice
    assert ("threads" in verdict.advice) == (context is None), "the context is for processes"


def test_workers_that_share_a_batch_are_measured() -> None:
    """Threads that take samples of each other's batches: only one of them answers."""
    loader = DataLoader(
        Work("sleep"),  # type: ignore[arg-type]
        12,
        num_workers=4,
        backend="threads",
        observe=True,
    )
    list(loader)
    (row,) = (stage for stage in loader.stats().stages if stage.name == "DataLoader")
    assert row.busy >= 0.7 * 60 * NAP, str(loader.stats())
    assert loader.stats().stall.by_stage["DataLoader"] <= loader.stats().stall.seconds


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


class Bad:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ValueError(index)
        return index


def test_faults_are_counted() -> None:
    loader = DataLoader(
        Bad(),  # type: ignore[arg-type]
        2,
        num_workers=1,
        backend="threads",
        on_error=hybridloader.Retry(2, backoff=0.0, then=Skip()),
        observe=True,
    )
    list(loader)
    faults = loader.stats().faults
    assert (faults.skipped, faults.retried, faults.replaced, faults.restarted) == (1, 2, 0, 0)
    assert "skipped" in str(loader.stats())
    assert "restarted" not in str(loader.stats())


@pytest.mark.usefixtures("_fonts_open")
def test_all_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader, stats = loaded("sleep", "threads", 2)
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert json.loads(json.dumps(stats.to_dict()))["verdict"]["kind"] == "waits"
    stats.print()
    assert "bottleneck is DataLoader" in capsys.readouterr().out
    assert stats._repr_html_().startswith("<table>")
    for name in ("a.png", "a.svg"):
        stats.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    other = loaded("sleep", "threads", 4)[1]
    comparison = hybridloader.observe.compare(stats, other)
    assert comparison.speedup is not None
    assert "samples a second" in str(comparison)
    assert json.loads(json.dumps(comparison.to_dict()))["changes"]
    assert comparison._repr_html_().startswith("<table>")
    comparison.print()
    assert "DataLoader: busy a sample" in capsys.readouterr().out
    with pytest.raises(TypeError, match="results of stats"):
        hybridloader.observe.compare(stats, loader)  # type: ignore[arg-type]
    empty = small(observe=True).stats()
    assert hybridloader.observe.compare(empty, stats).speedup is None
    assert str(hybridloader.observe.compare(empty, stats))
