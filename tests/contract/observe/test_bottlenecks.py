"""Bottlenecks that are known: statistics of real workers name them.

Whoever sleeps is the bottleneck however busy a machine is. What computes, or sends much, is marked
`full`: it needs a quiet machine. The exact rules are held by `test_verdict`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from support.failing_datasets import Samples
from support.fake_accelerator import FakeAccelerator

from hybridloader import DataLoader, Pipeline, get_worker_info
from hybridloader.observe import Stats
from hybridloader.sources import PerWorker

NAP = 0.004
FORK: dict[str, Any] = {"backend": "fork", "num_workers": 2}
THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}
FEW = Pipeline.from_dataset(range(100))
MORE = Pipeline.from_dataset(range(300))  # next to which the start of processes is short

pytestmark = [
    pytest.mark.usefixtures("free_cores"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def sleeping(item: Any) -> Any:
    time.sleep(NAP)
    return item


def spinning(item: int) -> int:
    until = time.thread_time() + NAP
    while time.thread_time() < until:
        pass
    return item


def quick(item: Any) -> Any:
    return item


async def awaiting(item: int) -> int:
    await asyncio.sleep(NAP)
    return item


async def blocking(item: int) -> Any:
    await asyncio.sleep(0)
    return sleeping(item)


async def computing(item: int) -> int:
    await asyncio.sleep(0)
    return spinning(item)


def slowly() -> Iterator[tuple[Any, int]]:
    info = get_worker_info()
    for item in range(60):
        time.sleep(NAP)
        yield info and info.id, item


class SlowSampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return map(sleeping, range(60))

    def __len__(self) -> int:
        return 60


class OneReader(torch.utils.data.IterableDataset[int]):
    """Samples all of which the first worker reads."""

    def __iter__(self) -> Iterator[int]:
        info: Any = torch.utils.data.get_worker_info()
        return map(sleeping, range(0 if info.id else 60))


class SlowDevice(FakeAccelerator):
    """A device to which a copy takes a while."""

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return super().move(tensor)


def run_of(pipe: Pipeline) -> Stats:
    with pipe.run(observe=True) as run:
        list(run)
        return run.stats()


def loaded(dataset: Any, batch_size: int | None = 1, step: float = 0.0, **options: Any) -> Stats:
    """Statistics of the second epoch of workers that stay: the first has their start."""
    options = {"collate_fn": list if batch_size else quick, "num_workers": 2, **options}
    loader = DataLoader(dataset, batch_size, persistent_workers=True, observe=True, **options)
    for _ in range(2):
        for _ in loader:
            if step:  # even a sleep of 0 seconds leaves the GIL, and waits for it
                time.sleep(step)
    stats = loader.stats()
    loader._iterator.close()  # type: ignore[union-attr]
    return stats


def joined(pipe: Pipeline, other: Pipeline) -> Stats:
    """Of one thread each at the ends of two branches."""
    place: Any = {"backend": "threads", "num_workers": 1}
    return run_of(Pipeline.zip(pipe.map(quick, **place), other.map(sleeping, **place)))


WAITS = ("stage", "waits")
ROWS: dict[str, tuple[Callable[[], Stats], tuple[str, str | None], str, str]] = {
    "the first of two steps": (
        lambda: run_of(MORE.map(sleeping, **THREADS).map(quick, **FORK)),
        *(WAITS, "map(sleeping)", "num_workers="),
    ),
    "a slow source": (
        lambda: run_of(Pipeline.from_iterable(slowly).map(quick, **THREADS)),
        *(("source", None), "from_iterable(slow", ""),
    ),
    "readers that wait": (
        lambda: run_of(Pipeline.from_iterable(slowly, **THREADS)),
        *(("source", "waits"), "read(slowly)", "num_workers="),
    ),
    "a step without workers": (
        lambda: run_of(FEW.map(sleeping)),
        *(("stage", None), "map(sleeping)", "backend"),
    ),
    "a branch": (lambda: joined(FEW, FEW), WAITS, "map(sleeping)", ""),
    "coroutines": (
        lambda: run_of(MORE.map(awaiting, concurrency=4)),
        *(WAITS, "map(awaiting)", "(4 now) of map(awaiting)"),
    ),
    "coroutines that block": (
        lambda: run_of(FEW.map(blocking, concurrency=1, **THREADS)),
        *(("stage", "blocks-loop"), "map(blocking)", "await that"),
    ),
    "a dataset that waits": (
        lambda: loaded(Samples(sleeping, 60), **FORK),
        *(WAITS, "DataLoader", "num_workers="),
    ),
    "a slow sampler": (
        lambda: loaded(Samples(quick, 60), sampler=SlowSampler(), **THREADS),
        *(("source", None), "sampler", ""),
    ),
    "a worker without data": (
        lambda: loaded(OneReader(), 2, **FORK),
        *(WAITS, "DataLoader", "will not help"),
    ),
}


def check(row: Any) -> None:
    make, expected, name, advice = row
    stats = make()
    verdict = stats.verdict
    assert (verdict.cause, verdict.kind) == expected, str(stats)
    assert name in (verdict.stage or ""), str(stats)
    assert advice in verdict.advice, str(stats)
    assert sum(stats.stall.by_stage.values()) == pytest.approx(stats.stall.seconds)


@pytest.mark.parametrize("name", ROWS)
def test_whoever_sleeps_is_named(name: str) -> None:
    check(ROWS[name])


def test_a_step_on_the_thread_of_your_loop_is_not_busy_while_it_waits_for_another_step() -> None:
    pipe = FEW.map(sleeping, backend="threads", num_workers=1).to(FakeAccelerator()).map(quick)
    stats = run_of(pipe)
    assert stats.stages[-2].backend == "caller"
    assert stats.stall.by_stage["map(sleeping)"] > 2 * stats.stall.by_stage["map(quick)"], stats


def test_turns_of_an_event_loop_are_those_of_its_coroutines() -> None:
    """What computes between two of them is named; a source that sleeps there is not."""
    stats = run_of(FEW.map(computing, concurrency=4, backend="fork", num_workers=1))
    assert "coroutine of map(computing) kept the event loop for" in stats.verdict.evidence, stats

    async def quickly(item: Any) -> Any:
        return item

    stats = run_of(Pipeline.from_iterable(slowly).map(quickly, concurrency=4))
    assert stats.verdict.kind != "blocks-loop", stats


@pytest.mark.parametrize("options", [FORK, {**THREADS, "persistent_workers": True}])
def test_a_file_that_workers_open_with_their_first_sample_is_their_start(
    options: dict[str, Any],
) -> None:
    """Once the prefetch is full loading keeps up, yet most of the time was waited for."""
    opened = PerWorker(lambda: time.sleep(200 * NAP))
    data: Any = Samples(lambda index: (opened(), sleeping(index))[1], 60)
    loader = DataLoader(data, observe=True, **options)
    for _ in loader:
        time.sleep(NAP)
    verdict = loader.stats().verdict
    assert verdict.cause == "start", str(loader.stats())
    kept = "persistent_workers" in options
    assert ("Keep what it opens" if kept else "persistent_workers=True") in verdict.advice
    if kept:
        for _ in loader:
            time.sleep(NAP)
        assert loader.stats().verdict.cause != "start", str(loader.stats())
        loader._iterator.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_a_slow_copy_to_a_device_is_named(backend: str) -> None:
    """The thread that pins has a row, the last before the loop, in each epoch its own."""
    data: Any = Samples(lambda index: torch.ones(2), 60)
    loader = DataLoader(
        data,
        2,
        num_workers=0 if backend == "inline" else 1,
        backend=backend,
        device=SlowDevice(),
        observe=True,
        persistent_workers=backend == "threads",
    )
    for _ in range(2):
        assert len(list(loader)) == 30
        stats = loader.stats()
        rows = [stage for stage in stats.stages if stage.backend == "thread"]
        if backend == "inline":
            assert rows == [], "it has no such thread"
            continue
        (row,) = rows
        assert stats.stages[-2] is row
        assert row.items == 30
        assert row.busy >= 30 * NAP
        assert stats.verdict.stage == row.name, str(stats)
    if loader._iterator is not None:
        loader._iterator.close()
        assert [stage.items for stage in loader.stats().stages if stage.backend == "thread"] == [30]
