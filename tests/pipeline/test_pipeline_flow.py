"""A pipeline reads ahead within its limits, and neither spins nor idles."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader import Pipeline, Threads
from hybridloader.engine import Crew, Event, Task
from hybridloader.errors import NotReady
from hybridloader.testing import Gate

TASKS = 64
"""Results of each worker that may wait behind a late one."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task takes some seconds, for the engine."""
    monkeypatch.setattr("hybridloader.engine.worker.perf_counter", itertools.count().__next__)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task takes no time, for the engine."""
    monkeypatch.setattr("hybridloader.engine.worker.perf_counter", lambda: 0.0)


def until(condition: Callable[[], bool]) -> None:
    Gate._until(condition, "it never came to that")


class Watched(Threads):
    """Threads that count calls, remember how large tasks were, and tell when the stage sleeps."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "waits", [])
        object.__setattr__(self, "sizes", [])
        object.__setattr__(self, "asleep", threading.Event())

    def open(self) -> Crew:
        crew: Any = super().open()
        wait, send = crew.wait, crew.send

        def watched_wait(timeout: float | None) -> Sequence[Event]:
            self.waits.append(timeout)  # type: ignore[attr-defined]
            if timeout is None and crew._Crew__events.empty():
                self.asleep.set()  # type: ignore[attr-defined]
            try:
                return wait(timeout)  # type: ignore[no-any-return]
            finally:
                self.asleep.clear()  # type: ignore[attr-defined]

        def watched_send(worker: int, message: Any) -> None:
            if isinstance(message, Task):
                self.sizes.append(len(message.index))  # type: ignore[attr-defined]
            send(worker, message)

        crew.wait, crew.send = watched_wait, watched_send
        return crew  # type: ignore[no-any-return]


class Reading:
    """Counts what is read, and how far that is ahead of what was taken."""

    def __init__(self, count: int) -> None:
        self.count, self.read, self.taken, self.furthest = count, 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        for k in range(self.count):
            self.read += 1
            self.furthest = max(self.furthest, self.read - self.taken)
            yield k

    def take_all(self, run: Iterator[int]) -> list[int]:
        found = []
        for item in run:
            self.taken += 1
            found.append(item)
        return found


# -- how far it reads ------------------------------------------------------------------------------

RELAY = 3
"""Items that a relay of the usual depth has: two that wait and one in the thread's hand."""


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("prefetch", [None, 1, 3, 20])
@pytest.mark.usefixtures("slow")
def test_it_reads_no_further_than_window_and_relay(workers: int, prefetch: int | None) -> None:
    gate, source = Gate(), Reading(200)

    def work(item: int) -> int:
        if item < workers:
            gate.arrive()
        return item

    pipe = Pipeline.from_iterable(source)
    pipe = pipe.map(work, backend="threads", num_workers=workers, prefetch=prefetch)
    most = min(2 * workers, prefetch or 2 * workers) + RELAY
    with pipe.run() as run:
        until(lambda: source.read >= most)
        for _ in range(50):
            with pytest.raises(NotReady):
                run.next_nowait()
            assert source.read == most
        gate.open()
        assert source.take_all(run) == list(range(200))
    # Behind the stage there may be another relay.
    waiting = 0 if prefetch else TASKS * workers  # behind a late one; by chance, few
    assert source.furthest <= (prefetch or 2 * workers) + waiting + RELAY + RELAY


@pytest.mark.usefixtures("slow")
def test_prefetch_keeps_as_many_items_at_hand_as_it_says_and_no_more() -> None:
    source = Reading(100)
    with Pipeline.from_iterable(source).prefetch(7).run() as run:
        until(lambda: source.read == 8)
        assert source.take_all(run) == list(range(100))
    assert source.furthest <= 9  # one that was taken may be counted late


@pytest.mark.usefixtures("quick")
def test_prefetch_bounds_what_is_read_of_quick_work_too() -> None:
    source = Reading(2000)
    pipe = Pipeline.from_iterable(source).map(abs, backend="threads", num_workers=1, prefetch=2)
    with pipe.run() as run:
        relays = [running.relay for running in run._executor.relays.values()]
        for item in run:
            source.taken += 1
            if item % 100 == 50:  # let the threads run ahead
                until(lambda: all(relay.queue.full or relay.queue.ended for relay in relays))
    # In the stage, handed out, and twice a task and one more in each of two relays.
    assert source.furthest <= 2 + 2 + 5 + 5 + 1


@pytest.mark.usefixtures("quick")
def test_prefetch_bounds_what_readers_read() -> None:
    source = Reading(2000)
    pipe = Pipeline.from_iterable(lambda: source, backend="threads", num_workers=1, prefetch=2)
    with pipe.run() as run:
        assert source.take_all(run) == list(range(2000))
    assert source.furthest <= 2 + 2 + RELAY + 1


class Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(100, 2000))
def test_buffer_bytes_holds_for_a_pipeline(workers: int, fitting: int, size: int) -> None:
    alive, peak, lock = 0, 0, threading.Lock()

    def make(item: int) -> Sized:
        nonlocal alive, peak
        with lock:
            alive += 1
            peak = max(peak, alive)
        return Sized(size)

    pipe = Pipeline.from_dataset(range(100))
    where: dict[str, Any] = {"backend": "threads", "num_workers": workers, "prefetch": 100}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridloader.engine.worker.perf_counter", itertools.count().__next__)
        with pipe.map(make, buffer_bytes=fitting * (size + 100), **where).run() as run:
            for _ in run:
                with lock:
                    alive -= 1
    # A list of one item counts some bytes more than the item. Behind comes a relay.
    assert peak <= max(fitting + 1, workers) + RELAY + 1


# -- who waits for whom ----------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.usefixtures("slow")
def test_one_slow_item_does_not_idle_the_other_workers(ordered: bool) -> None:
    gate, done = Gate(), set[int]()

    def work(item: int) -> int:
        if item == 0:
            gate.arrive()
        done.add(item)
        return item

    where: dict[str, Any] = {"backend": "threads", "num_workers": 3, "prefetch": 15}
    pipe = Pipeline.from_dataset(range(15)).map(work, in_order=ordered, **where)
    with pipe.run() as run:
        gate.await_arrivals()
        # All but the slow one, and the one that was handed to the same worker behind it.
        early = [] if ordered else [next(run) for _ in range(13)]
        until(lambda: len(done) == 13)
        gate.open()
        assert sorted(early + list(run)) == list(range(15))


@pytest.mark.usefixtures("slow")
def test_without_limits_a_slow_item_holds_up_no_other_worker_for_long() -> None:
    gate, made, workers = Gate(), list[int](), 2
    most = 2 * workers + TASKS * workers - 2  # but for the slow one, and that at hand behind it

    def work(item: int) -> int:
        if item == 0:
            gate.arrive()
        made.append(item)
        return item

    pipe = Pipeline.from_dataset(range(400)).map(work, backend="threads", num_workers=workers)
    with pipe.run() as run:

        def come() -> bool:
            with pytest.raises(NotReady):
                run.next_nowait()
            return len(made) >= most

        until(come)
        for _ in range(50):
            come()
        assert len(made) == most
        gate.open()
        assert list(run) == list(range(400))


@pytest.mark.parametrize("stages", [1, 2])
def test_results_that_are_there_are_not_held_up_by_a_source_that_has_stopped(stages: int) -> None:
    gate = Gate()

    def source() -> Iterator[int]:
        yield from range(9)
        gate.arrive()
        yield from range(9, 20)

    pipe = Pipeline.from_iterable(source)
    for _ in range(stages):
        pipe = pipe.map(abs, backend="threads", num_workers=2, fuse=False)
    with pipe.run() as run:
        assert [next(run) for _ in range(9)] == list(range(9))
        gate.open()
        assert list(run) == list(range(9, 20))


def test_a_stage_does_not_spin_while_its_source_has_nothing() -> None:
    backend, most = Watched(), 500

    def source() -> Iterator[int]:
        for k in range(20):
            until(lambda: backend.asleep.is_set() or len(backend.waits) > most)
            yield k

    with Pipeline.from_iterable(source).map(abs, backend=backend, num_workers=1).run() as run:
        assert list(run) == list(range(20))
    # For each item: one sleep until it came, one until it was done, and one that came to nothing.
    assert len(backend.waits) <= 3 * 21


# -- what items weigh ------------------------------------------------------------------------------


class Unweighable:
    @property
    def nbytes(self) -> int:
        raise NotImplementedError


def test_an_item_that_can_not_be_weighed_holds_nothing_up() -> None:
    inside_itself: list[Any] = []
    inside_itself.append(inside_itself)
    for item in (Unweighable(), inside_itself):
        pipe = Pipeline.from_iterable(range(9)).map(
            lambda _, item=item: item,
            backend="threads",
            num_workers=2,
            buffer_bytes=1000,
            timeout=30,
        )
        assert len(list(pipe)) == 9
