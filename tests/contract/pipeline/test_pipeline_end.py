"""However a pipeline ends, nothing is left: the fixture in conftest.py looks after every test."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.short_waits import shorten_waits

from hybridloader import Pipeline
from hybridloader.errors import IteratorClosed
from hybridloader.testing import Gate

WORKERS = ("threads", "fork")


def count() -> Iterator[int]:
    return itertools.count()


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Opened at the end, so that threads that wait at it can go; they are not waited for long."""
    shorten_waits(monkeypatch)
    found = Gate()
    yield found
    found.open()


class Stick:
    """Lets some items pass, and is stuck in the next."""

    def __init__(self, gate: Gate, after: int = 0) -> None:
        self.gate, self.after = gate, after

    def __call__(self, item: Any) -> Any:
        if item == self.after:
            self.gate.arrive()
        return item


def stick_at_the_end(gate: Gate, backend: str) -> Pipeline:
    """The last stage is stuck; your loop waits for it alone."""
    pipe = Pipeline.from_dataset(range(100)).map(abs, backend=backend, num_workers=2, fuse=False)
    return pipe.map(Stick(gate), backend=backend, num_workers=2)


def stick_in_the_middle(gate: Gate, backend: str) -> Pipeline:
    """A stage is stuck; your loop waits for a relay."""
    pipe = Pipeline.from_dataset(range(100)).map(Stick(gate), backend=backend, num_workers=2)
    pipe = pipe.batch(1, collate_fn=list).map(tuple, backend=backend, num_workers=2)
    return pipe.batch(2, collate_fn=list)


def stick_in_a_branch(gate: Gate, backend: str) -> Pipeline:
    a, b = (
        Pipeline.from_dataset(range(100)).map(function, backend=backend, num_workers=1)
        for function in (Stick(gate), str)
    )
    return a.zip(b)


def stick_in_a_reader(gate: Gate, backend: str) -> Pipeline:
    def read() -> Iterator[int]:
        return map(Stick(gate), itertools.count())

    return Pipeline.from_iterable(read, backend=backend, num_workers=2).map(str)


STICKING = (stick_at_the_end, stick_in_the_middle, stick_in_a_branch, stick_in_a_reader)
Sticking = Callable[[Gate, str], Pipeline]


def pull_on_a_thread(run: Iterator[Any]) -> tuple[threading.Thread, list[Any]]:
    """A consumer, and what it was given or what it got instead."""
    found: list[Any] = []

    def pull() -> None:
        try:
            found.append(next(run))
        except BaseException as error:
            found.append(type(error))

    thread = threading.Thread(target=pull)
    thread.start()
    return thread, found


# -- close -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sticking", "backend"),
    [*((sticking, "threads") for sticking in STICKING), (stick_in_a_branch, "fork")],
)
def test_close_ends_a_wait_in_another_thread(sticking: Sticking, backend: str, gate: Gate) -> None:
    run = iter(sticking(gate, backend))
    thread, found = pull_on_a_thread(run)
    gate.await_arrivals()
    run.close()
    thread.join()
    assert found == [IteratorClosed]
    assert run.closed
    with pytest.raises(IteratorClosed):
        next(run)
    with pytest.raises(IteratorClosed):
        run.next_nowait()


@pytest.mark.parametrize("backend", WORKERS)
def test_the_last_reference_ends_workers_that_are_stuck(backend: str, gate: Gate) -> None:
    run = iter(stick_in_the_middle(gate, backend))
    gate.await_arrivals()
    del run
    gate.open()


def from_a_stuck_source(gate: Gate) -> Iterator[int]:
    yield from range(3)
    gate.arrive()


@pytest.mark.parametrize("consuming", [True, False])
def test_close_while_the_source_is_stuck(consuming: bool, gate: Gate) -> None:
    pipe = Pipeline.from_iterable(lambda: from_a_stuck_source(gate))
    run = iter(pipe.map(abs, backend="threads", num_workers=2).batch(2, collate_fn=list))
    assert next(run) == [0, 1]
    gate.await_arrivals()
    thread, found = pull_on_a_thread(run) if consuming else (threading.Thread(), [IteratorClosed])
    run.close()
    if consuming:
        thread.join()
    assert found == [IteratorClosed]


@pytest.mark.parametrize("backend", [*WORKERS, "inline", "spawn"])
def test_close_before_anything_has_come(backend: str) -> None:
    pipe = Pipeline.from_iterable(count).map(abs, backend=backend, num_workers=2)
    pipe.map(str, backend=backend, num_workers=1, fuse=False).run().close()
    if backend != "spawn":
        pipe.batch(2).prefetch(1).run().close()
        pipe.repeat().epochs().close()


@needs_fork
def test_close_while_workers_start(gate: Gate) -> None:
    def start(worker: int) -> None:
        gate.arrive()

    where: dict[str, Any] = {"backend": "fork", "num_workers": 2, "worker_init_fn": start}
    pipe = Pipeline.from_dataset(range(9)).map(abs, **where)
    with pipe.batch(2).map(abs, **where).run():
        gate.await_arrivals(4)


# -- loops -----------------------------------------------------------------------------------------


def endless(backend: str) -> Pipeline:
    pipe = Pipeline.from_iterable(count).map(abs, backend=backend, num_workers=2)
    return pipe.batch(2, collate_fn=list).map(tuple, backend=backend, num_workers=1)


@pytest.mark.parametrize("backend", ["inline", *WORKERS])
def test_loops_that_are_left(backend: str) -> None:
    for item in endless(backend):
        if item == (6, 7):
            break
    with pytest.raises(ZeroDivisionError):
        sum(item[0] / 0 for item in endless(backend))
    with endless(backend).run() as run:
        assert next(run) == (0, 1)
    assert run.closed
    with pytest.raises(IteratorClosed):
        next(run)
    with endless(backend).take(3).run() as run:
        assert list(run) == [(0, 1), (2, 3), (4, 5)]
        for ask in (run.__next__, run.next_nowait):
            with pytest.raises(StopIteration):
                ask()


def none_of(item: Any) -> bool:
    return False


NOTHING_COMES: dict[str, Callable[[Pipeline], Pipeline]] = {
    "the loop": lambda pipe: pipe.filter(none_of),
    "a relay": lambda pipe: pipe.filter(none_of).map(abs, backend="threads", num_workers=1),
    "threads": lambda pipe: pipe.filter(none_of, backend="threads", num_workers=2),
    "processes": lambda pipe: pipe.filter(none_of, backend="fork", num_workers=2),
    "skipped": lambda pipe: pipe.skip(10**12).map(abs, backend="threads", num_workers=1),
}


class Endless:
    """A source that tells when it was begun, and when its pass ended."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self) -> Iterator[int]:
        try:
            for k in itertools.count():
                if k == 100:
                    self.begun.set()
                yield k
        finally:
            self.ended.set()


@pytest.mark.parametrize("name", NOTHING_COMES)
def test_a_pass_of_which_nothing_is_kept_ends_with_close_or_when_the_next_begins(name: str) -> None:
    source = Endless()
    pipe = NOTHING_COMES[name](Pipeline.from_iterable(source))
    run = iter(pipe)
    thread, found = pull_on_a_thread(run)
    assert source.begun.wait(60)
    run.close()
    thread.join()
    assert found == [IteratorClosed]
    if name == "the loop":  # which asks for nothing by itself
        return
    source.begun.clear()
    source.ended.clear()
    with pipe.epochs() as epochs:
        next(epochs)
        assert source.begun.wait(60)
        assert not source.ended.is_set()
        next(epochs)
        assert source.ended.wait(60)
