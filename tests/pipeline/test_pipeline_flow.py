"""A pipeline reads ahead within its limits, and neither spins nor idles."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader import Pipeline, Threads, WorkerTimeout
from hybridloader._support.user_objects import no_answer, size_of
from hybridloader.engine.contract import Crew
from hybridloader.engine.feed import StageFlow, TaskBatching
from hybridloader.engine.messages import (
    ByReference,
    Done,
    Event,
    Payload,
    Ready,
    Task,
    TaskContext,
    WorkerSpec,
)
from hybridloader.engine.scheduler import TASKS
from hybridloader.engine.stage import Stage
from hybridloader.errors import NotReady
from hybridloader.running.flow import Skipping
from hybridloader.testing import Call, FakeClock, Gate, ScriptedBackend, ScriptedCrew


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


@pytest.mark.usefixtures("slow")
def test_prefetch_is_made_use_of_while_the_loop_is_busy() -> None:
    backend, made = Watched(), list[int]()

    def make(item: int) -> int:
        made.append(item)
        return item

    pipe = Pipeline.from_dataset(range(200)).map(make, backend=backend, num_workers=2, prefetch=40)
    with pipe.run() as run:
        assert next(run) == 0
        (running,) = run._executor.relays.values()
        relay = running.relay
        until(lambda: relay.queue.full and len(made) == sum(backend.sizes))
        assert len(made) >= 40


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


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 4), st.data())
def test_buffer_bytes_is_never_passed_by_more_than_the_first_results(
    sizes: list[int], workers: int, data: st.DataObject
) -> None:
    sizes.insert(0, max(sizes))  # so that what is under way is never underestimated
    limit = data.draw(st.integers(1, 6000))
    flow = StageFlow(workers, buffer_bytes=limit)
    todo, under_way, waiting = list(enumerate(sizes)), list[int](), list[int]()
    while todo or under_way or waiting:
        moves = []
        if todo and flow.room() != 0:
            moves.append("send")
        moves += ["come"] * bool(under_way) + ["leave"] * bool(waiting)
        assert moves, "one task is always let in"
        move = data.draw(st.sampled_from(moves))
        if move == "send":
            seq, _ = todo.pop(0)
            flow.sent(seq, ["item"])
            under_way.append(seq)
        elif move == "come":
            seq = data.draw(st.sampled_from(under_way)) if 0 not in under_way else 0
            under_way.remove(seq)
            flow.came(Done(0, seq, ByReference(Sized(sizes[seq]))))
            waiting.append(seq)
        else:
            seq = waiting.pop(0)
            flow.left(seq)
        assert flow.queued == len(under_way) + len(waiting)
        assert flow.queued_bytes == sum(sizes[seq] for seq in waiting)
        least = max(workers * sizes[0] if len(sizes) else 0, sizes[0])
        assert sum(sizes[seq] for seq in (*under_way, *waiting)) <= max(limit, least)


class Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_a_large_item_among_small_ones_counts_as_large() -> None:
    flow = StageFlow(1, buffer_bytes=4000)
    flow.sent(0, ["item"] * 4)
    flow.came(Done(0, 0, ByReference([Sized(1000), Sized(0), Sized(0), Sized(0)])))
    flow.left(0)
    room = flow.room()
    assert room is not None
    assert room * 1000 <= 4000


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


class Hand(Iterator[int]):
    """Items that a test puts there, as a relay has them."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.asked = 0

    def __next__(self) -> int:
        raise AssertionError("the stage waits for its source")

    def next_nowait(self) -> int:
        if not self.items:
            raise no_answer(NotReady())
        return self.items.pop(0)

    def when_ready(self, wake: Callable[[], None]) -> None:
        self.asked += 1
        if self.items:
            wake()


def fed(script: Sequence[Any], **more: Any) -> tuple[Stage, ScriptedBackend, Hand]:
    backend, hand = ScriptedBackend(script), Hand()
    spec = WorkerSpec("scripted", 2, Call(lambda index: index))
    stage = Stage(backend, spec, lookahead=4, **more)
    stage.begin(TaskBatching(hand))
    return stage, backend, hand


def test_a_hungry_stage_asks_to_be_woken_before_each_sleep_and_no_more() -> None:
    def bring(crew: ScriptedCrew) -> list[Event]:
        hand.items.append(5)
        return []

    nothing: list[Event] = []
    done = Done(0, 0, ByReference(["value"]))
    stage, backend, hand = fed([[Ready(0), Ready(1)], nothing, bring, [done]])
    assert next(stage) == ["value"]
    assert hand.asked == 4  # with an item under way it still wants more
    assert backend.crews[0].woken == 0
    stage.close()


def test_timeout_does_not_count_while_only_the_source_is_late() -> None:
    clock = FakeClock()

    def later(crew: ScriptedCrew) -> list[Event]:
        clock.now += 20
        return []

    stage, _, _ = fed([later, later, lambda crew: pytest.fail("enough")], timeout=10, clock=clock)
    with pytest.raises(pytest.fail.Exception, match="enough"):
        next(stage)
    stage.close()


def test_timeout_begins_when_the_work_does() -> None:
    clock = FakeClock()

    def bring(crew: ScriptedCrew) -> list[Event]:
        clock.now += 20
        hand.items.append(5)
        return []

    def answer(crew: ScriptedCrew) -> list[Event]:
        clock.now += 9
        return [Done(0, 0, ByReference(["value"]))]

    stage, _, hand = fed([bring, answer], timeout=10, clock=clock)
    try:
        assert next(stage) == ["value"]
    finally:
        stage.close()


def test_timeout_counts_while_there_is_work_under_way() -> None:
    clock = FakeClock()

    def later(crew: ScriptedCrew) -> list[Event]:
        clock.now += 6
        return []

    stage, _, hand = fed([later, later], timeout=10, clock=clock)
    hand.items.append(5)
    with pytest.raises(WorkerTimeout, match=r"after 10 seconds.*\[5\]"):
        next(stage)
    stage.close()


# -- what items weigh ------------------------------------------------------------------------------


@dataclass(slots=True)
class Record:
    data: bytes


class Unweighable:
    @property
    def nbytes(self) -> int:
        raise NotImplementedError


def test_the_fields_of_a_dataclass_with_slots_are_weighed() -> None:
    assert size_of(Record(bytes(10_000))) - size_of(Record(b"")) == 10_000


def test_an_item_that_can_not_be_weighed_holds_nothing_up() -> None:
    inside_itself: list[Any] = []
    inside_itself.append(inside_itself)
    for item in (Unweighable(), inside_itself):
        assert size_of(item) > 0
        pipe = Pipeline.from_iterable(range(9)).map(
            lambda _, item=item: item,
            backend="threads",
            num_workers=2,
            buffer_bytes=1000,
            timeout=30,
        )
        assert len(list(pipe)) == 9


class Several(Payload):
    """Three items that arrived as one, from number `first` on."""

    forwardable, count = True, 3

    def __init__(self, first: int, opened: list[int]) -> None:
        self.first, self.opened = first, opened

    def open(self) -> list[int]:
        self.opened.append(self.first)
        return [*range(self.first, self.first + 3)]

    def discard(self) -> None:
        pass


def test_dropped_results_are_not_opened() -> None:
    """A resumed run drops all results up to its position, which may be many."""
    opened: list[int] = []
    results = iter([Several(first, opened) for first in range(0, 15, 3)])
    items = Skipping(results, TaskContext(), "map", 7, lambda number: None, count=7)
    assert next(items) == 7
    assert opened == [6]
    assert next(items) == 8
    assert [result.first for result in items] == [9, 12]
