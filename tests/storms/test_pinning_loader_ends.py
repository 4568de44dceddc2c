"""Errors and ends of a loader that pins, or moves to a device, by a thread."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from support.failing_datasets import Samples, at_gate, outcomes
from support.fake_accelerator import FakeAccelerator
from support.pinning_datasets import Counting, Pinnable, Rows, runs, start

from hybridloader import DataLoader, WorkerDied, WorkerTimeout
from hybridloader.errors import IteratorClosed
from hybridloader.testing import Gate

TO_THREAD = "hybridloader-to"


# -- errors ----------------------------------------------------------------------------------------


def pinnable(samples: list[int]) -> Pinnable:
    return Pinnable(samples[0], LookupError("not this one", 3) if samples[0] == 2 else None)


@pytest.mark.parametrize("backend", ["fork", None])
def test_what_fails_on_the_way_comes_in_its_place_and_says_where(backend: str | None) -> None:
    workers = 0 if backend is None else 2
    loader = DataLoader(
        Samples(int, 5),
        collate_fn=pinnable,
        num_workers=workers,
        backend=backend,
        device=Counting(),
    )
    found = outcomes(iter(loader))
    assert [getattr(item, "number", None) for item in found] == [0, 1, None, 3, 4]
    error = found[2]
    assert type(error) is LookupError
    assert error.args == ("not this one", 3)
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["In stage 'to' of the loader, at batch 2 of this epoch."]


def exit_at_two(index: int) -> int:
    if index == 2:
        os._exit(3)
    return index


def test_a_worker_that_dies_is_told_of_behind_what_was_there_and_again() -> None:
    loader = DataLoader(
        Samples(exit_at_two, 5), num_workers=1, backend="fork", device=FakeAccelerator()
    )
    iterator = start(loader)
    assert len([next(iterator), next(iterator)]) == 2
    for _ in range(2):
        with pytest.raises(WorkerDied, match="3"):
            next(iterator)


def test_a_timeout_counts_while_the_caller_waits_and_loses_nothing(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    loader = DataLoader(
        Samples(at_gate(gate, 1), 3),
        num_workers=1,
        backend="threads",
        timeout=60,
        collate_fn=list,
        device=FakeAccelerator(),
    )
    iterator = start(loader)
    results: Any = iterator._next_batch.__self__  # type: ignore[attr-defined]
    assert next(iterator) == [0]
    gate.await_arrivals()
    results._timeout = 0.01  # only now: the first batch may take its time
    for _ in range(2):
        with pytest.raises(WorkerTimeout, match=r"worker 0.*which was to fetch"):
            next(iterator)
    gate.open()
    results._timeout = 60
    assert list(iterator) == [[1], [2]]


@pytest.mark.parametrize("failure", [SystemExit(4), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_the_death_of_the_thread_is_noticed_at_once(failure: BaseException) -> None:
    def collate(samples: list[int]) -> Pinnable:
        return Pinnable(samples[0], failure if samples[0] == 1 else None)

    loader = DataLoader(
        Samples(int, 9), collate_fn=collate, num_workers=1, backend="threads", device=Counting()
    )
    iterator = start(loader)
    assert next(iterator).number == 0
    with pytest.raises(type(failure)):
        next(iterator)
    for _ in range(2):
        with pytest.raises(IteratorClosed):
            next(iterator)


@pytest.mark.parametrize("workers", [0, 2])
def test_refused_pinning_is_an_error_in_the_place_of_each_batch(workers: int) -> None:
    fake = FakeAccelerator(pinnable=0)
    batches = iter(
        DataLoader(
            Rows(), 4, num_workers=workers, backend="threads" if workers else None, device=fake
        )
    )
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the fake device pins at most 0 bytes"):
            next(batches)
    assert list(batches) == []


def test_an_interrupt_while_the_caller_waits_ends_all(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    loader = DataLoader(
        Samples(at_gate(gate, 0)), num_workers=1, backend="fork", device=FakeAccelerator()
    )
    iterator = start(loader)
    gate.await_arrivals()
    relay: Any = iterator._pin_thread.running_relays[0]  # type: ignore[union-attr]
    sleep = relay.queue._sleep

    def interrupted(timeout: float | None) -> None:
        raise KeyboardInterrupt

    relay.queue._sleep = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    relay.queue._sleep = sleep
    assert not runs(TO_THREAD)
    assert not any(worker.is_alive() for worker in iterator._workers)
    with pytest.raises(IteratorClosed):
        next(iterator)


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "persistent"), [("threads", True), ("fork", False)])
def test_an_iterator_that_is_let_go_ends_workers_and_thread(backend: str, persistent: bool) -> None:
    loader = DataLoader(
        Rows(),
        num_workers=1,
        backend=backend,
        persistent_workers=persistent,
        device=FakeAccelerator(),
    )
    iterator = start(loader)
    next(iterator)
    workers = list(iterator._workers)
    known, stage = weakref.ref(iterator), weakref.ref(iterator._stage)
    assert runs(TO_THREAD)
    gc.disable()
    try:
        del iterator, loader
        assert known() is None
        assert not runs(TO_THREAD)
        assert not any(worker.is_alive() for worker in workers)
        assert stage() is None
    finally:
        gc.enable()


def test_a_thread_that_is_stuck_in_foreign_code_holds_up_nobody_for_long() -> None:
    arrived, free = threading.Event(), threading.Event()

    class Stuck:
        def pin_memory(self) -> Stuck:
            arrived.set()
            assert free.wait(60)
            return self

    loader = DataLoader(
        Samples(int),
        collate_fn=lambda _: Stuck(),
        num_workers=1,
        backend="threads",
        device=Counting(),
    )
    iterator = start(loader)
    assert arrived.wait(60)
    iterator.close()
    assert runs(TO_THREAD)
    assert not any(worker.is_alive() for worker in iterator._workers)
    free.set()
