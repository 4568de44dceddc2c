"""Calls of Python functions that a plain batch costs, ours alone, in the middle of an epoch.

No clock is read. What nobody has asked for (statistics, restarts, states, seeds by sample) costs no
call, and a call that comes to every batch is seen here and nowhere else.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import hybridloader
from hybridloader import DataLoader, Pipeline, Threads

OURS = str(Path(hybridloader.__file__).parent), str(Path(inspect.getfile(Threads)).parent)
SIZE, FIRST, BATCHES = 4, 100, 200
OBSERVERS = ("meter.", "measures.", "observation.")
"""Modules that only observe."""


class Calls(collections.Counter[str]):
    """Counts calls of our functions, by name, while it is the profiling function of this thread."""

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    def a_batch(self) -> float:
        return sum(self.values()) / BATCHES

    def __str__(self) -> str:
        return ", ".join(f"{count / BATCHES:.2f} {name}" for name, count in self.most_common())


def least(count: Callable[[], Calls]) -> Calls:
    """Return the smallest of three counts: a late batch, or a collection in between, only adds calls."""
    return min((count() for _ in range(3)), key=Calls.total)


def plainly(samples: Any) -> Any:
    return samples


class Numbers:
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        return index


class Counted(Numbers):
    """Has a worker count its calls; the sample after the last batch that counts is what it counted."""

    def __init__(self) -> None:
        self.calls = Calls()

    def __getitem__(self, index: int) -> Any:
        if index == SIZE * FIRST:
            sys.setprofile(self.calls)
        if index == SIZE * (FIRST + BATCHES):
            sys.setprofile(None)
            return dict(self.calls)
        return index


def calls_of_the_consumer(backend: Any, workers: int, **others: Any) -> tuple[DataLoader, Calls]:
    loader = DataLoader(
        Numbers(),  # type: ignore[arg-type]
        SIZE,
        num_workers=workers,
        backend=backend,
        collate_fn=plainly,
        **others,
    )
    iterator = iter(loader)
    for _ in range(FIRST):
        next(iterator)
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls)
    try:
        for _ in range(BATCHES):
            next(iterator)
    finally:
        sys.setprofile(before)
    iterator.close()  # type: ignore[attr-defined]
    return loader, calls


def calls_of_a_worker(backend: Any, **others: Any) -> Calls:
    loader = DataLoader(
        Counted(),  # type: ignore[arg-type]
        SIZE,
        num_workers=1,
        backend=backend,
        collate_fn=plainly,
        **others,
    )
    return Calls(next(batch[0] for batch in loader if type(batch[0]) is dict))


@pytest.mark.parametrize(
    ("backend", "workers", "most"),
    [("inline", 0, 25), ("threads", 2, 22), ("fork", 2, 35)],
)
def test_a_plain_batch_costs_the_consumer_few_calls(backend: Any, workers: int, most: int) -> None:
    calls = least(lambda: calls_of_the_consumer(backend, workers)[1])
    assert calls.a_batch() <= most, str(calls)
    assert not [name for name in calls if name.startswith("progress.")], "states were not asked for"


def test_a_plain_batch_costs_a_worker_few_calls() -> None:
    calls = least(lambda: calls_of_a_worker("fork"))
    assert calls.a_batch() <= 30, str(calls)


@pytest.mark.parametrize(("backend", "workers"), [("inline", 0), ("threads", 2), ("fork", 2)])
def test_observing_costs_a_batch_hardly_a_call(
    backend: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not sampled is an addition where it is."""
    # On a busy machine, and profiled, a few batches take the 10 ms after which measures are told.
    monkeypatch.setattr("hybridloader.engine.meter.EVERY", 1.0)
    plain = least(lambda: calls_of_the_consumer(backend, workers)[1]).a_batch()

    def observed() -> Calls:
        loader, calls = calls_of_the_consumer(backend, workers, observe=True)
        assert loader.stats().items == FIRST + BATCHES
        return calls

    calls = least(observed)
    # On a busy machine more of the batches are waited for, each by itself.
    assert calls.a_batch() <= plain + 8, str(calls)
    seldom = {name: count / BATCHES for name, count in calls.items() if name.startswith(OBSERVERS)}
    assert sum(seldom.values()) <= 1.05, str(calls)  # one call, and what is sampled
    if workers:
        calls = least(lambda: calls_of_a_worker(backend, observe=True))
        assert calls["meter.measure"] <= BATCHES / 2, str(calls)


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("where", [{}, {"backend": "threads", "num_workers": 2}])
def test_a_batch_of_a_pipeline_costs_the_loop_no_call_for_being_observed(
    where: dict[str, Any], observe: bool
) -> None:
    pipe = Pipeline.from_dataset(range(10_000)).map(plainly, **where).batch(SIZE)
    with pipe.run(observe=observe) as run:
        for _ in range(FIRST):
            next(run)
        if run._loop is not None:
            run._loop.brief = float("inf")  # on a busy machine some of the calls take long
        calls, before = Calls(), sys.getprofile()
        sys.setprofile(calls)
        try:
            for _ in range(BATCHES):
                next(run)
        finally:
            sys.setprofile(before)
    assert not [name for name in calls if name.startswith(OBSERVERS)], str(calls)
    if not where:  # all is done on this thread
        assert calls.a_batch() <= 6 * SIZE + 8, str(calls)


@pytest.mark.parametrize(
    ("backend", "side", "each", "waiting"),
    [
        ("threads", "consumer", 10, 7),
        ("threads", "worker", 12, 0),
        ("fork", "consumer", 19, 12),
        ("fork", "worker", 21, 3),
    ],
)
def test_a_plain_batch_calls_few_functions(
    backend: str, side: str, each: int, waiting: int
) -> None:
    """Functions of each batch, and those that are called only while no result, or no task, is ready."""

    def count() -> Calls:
        return (
            calls_of_a_worker(backend) if side == "worker" else calls_of_the_consumer(backend, 2)[1]
        )

    calls = least(count)
    usual = {name: calls[name] / BATCHES for name in calls if calls[name] > BATCHES / 20}
    # Workers that run at once overtake each other, which leaves the loop room for a task for the next.
    overtaken = 2 if side == "consumer" else 0
    assert len(usual) <= each + waiting + overtaken, str(calls)
    assert all(often < 2.2 for often in usual.values()), str(calls)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("asked", [False, True])
def test_torchs_profiler_range_is_entered_where_something_is_to_be_seen_by_it(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's `__next__`, which enters it, is for who profiles or has asked for the length."""
    entered: list[str] = []

    class Range(contextlib.nullcontext[None]):
        def __init__(self, name: str) -> None:
            super().__init__()
            entered.append(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Range)
    loader = DataLoader(Stream(), 4, backend="threads", num_workers=1)
    if asked:
        assert len(loader) == 1
        with pytest.warns(UserWarning, match="was reported to be 1"):
            list(loader)
    else:
        list(loader)
    assert bool(entered) == asked


@pytest.mark.parametrize(
    ("make", "modules", "calls"),
    [
        (lambda: DataLoader(Numbers(), SIZE, num_workers=2, backend="threads"), 29, 173),  # type: ignore[arg-type]
        (
            lambda: (
                Pipeline.from_dataset(range(10_000))
                .map(plainly, backend="fork", num_workers=2)
                .batch(SIZE)
            ),
            36,
            450,
        ),
    ],
    ids=["loader-threads", "pipeline-fork"],
)
def test_an_epoch_begins_through_so_many_modules_and_calls(
    make: Callable[[], Any], modules: int, calls: int
) -> None:
    """The numbers only fall: they are what a reader who follows `iter` has to hold in the head."""
    loader = make()
    next(iter(loader))  # imports, and what a process does once

    def counted() -> Calls:
        found, before = Calls(), sys.getprofile()
        sys.setprofile(found)
        try:
            iterator = iter(loader)
        finally:
            sys.setprofile(before)
        iterator.close()
        return found

    counts = least(counted)
    assert counts.total() <= calls, counts
    assert len({name.partition(".")[0] for name in counts}) <= modules
