"""Reading ahead: a relay, sizes of tasks, the room of a stage, and a stage that waits for its source."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from support.scripted import FakeClock, ScriptedBackend, ScriptedCrew

from hybridloader._support.user_objects import Raised, no_answer, size_of
from hybridloader.engine import ByReference, Done, Event, Ready, WorkerSpec
from hybridloader.engine.feed import (
    Relay,
    RelayQueue,
    TaskBatching,
)
from hybridloader.engine.stage import Stage
from hybridloader.errors import IteratorClosed, NotReady, StateError, WorkerDied, WorkerTimeout
from hybridloader.testing import Call


def started(*args: Any, **options: Any) -> Relay:
    relay = Relay(*args, **options)
    relay.start()
    return relay


def test_a_timeout_that_nobody_was_told_of_is_over_once_something_has_come() -> None:
    queue = RelayQueue("r", 5, None, 0)
    for late in range(3):
        queue.put(Raised(no_answer(WorkerTimeout(f"late {late}"))))
    assert [item.error.args for item, _ in queue.items] == [("late 2",)]
    queue.put(Raised(ValueError("broken")))
    queue.put("item")
    queue.put(Raised(WorkerTimeout("a user's own")))
    queue.put(Raised(no_answer(WorkerTimeout("late again"))))
    queue.end(None)
    with pytest.raises(ValueError, match="broken"):
        queue.get()
    assert queue.get() == "item"
    with pytest.raises(WorkerTimeout, match="a user's own"):
        queue.get()
    with pytest.raises(WorkerTimeout, match="late again"):
        queue.get()


class Stumbling(Iterator[int]):
    """Raises at 2, and goes on behind it."""

    def __init__(self, error: Exception, length: int = 5) -> None:
        self.error, self.length, self.k = error, length, -1

    def __next__(self) -> int:
        self.k += 1
        if self.k == 2:
            raise self.error
        if self.k >= self.length:
            raise StopIteration
        return self.k


@pytest.mark.parametrize(
    "error", [WorkerDied("gone"), IteratorClosed("shut"), StateError("another")], ids=repr
)
def test_an_error_that_would_be_raised_for_ever_ends_it(error: Exception) -> None:
    relay = started(Stumbling(error), "r", depth=9)
    assert [next(relay), next(relay)] == [0, 1]
    with pytest.raises(type(error)):  # of a user's code
        next(relay)
    assert list(relay) == [3, 4]
    relay = started(Stumbling(no_answer(error), 10**9), "r")
    assert [next(relay), next(relay)] == [0, 1]
    with pytest.raises(type(error)):
        next(relay)
    with pytest.raises(IteratorClosed):
        next(relay)
    relay.close()


def test_a_close_by_a_signals_handler_in_the_middle_of_get_is_no_missing_item() -> None:
    class Signalled(deque[Any]):
        """Items of which the first is asked for when the signal comes."""

        def popleft(self) -> Any:
            queue.close()
            return super().popleft()

    queue = RelayQueue("signalled", 2, None, 0)
    queue.put(1)
    queue.items = Signalled(queue.items)
    with pytest.raises(IteratorClosed):
        queue.get()


def test_a_relay_lets_in_what_its_limit_allows_and_one_that_is_larger_alone() -> None:
    pulled: list[int] = []
    third = threading.Event()

    def source() -> Iterator[int]:
        for weight in (4, 5, 3, 20, 1, 1):
            pulled.append(weight)
            if len(pulled) == 3:
                third.set()
            yield weight

    relay = started(source(), "r", depth=100, weigh=int, limit=10)
    assert third.wait(30)
    assert next(relay) == 4  # makes room for 3, not for 20 after it
    relay_left = [next(relay) for _ in range(5)]
    assert relay_left == [5, 3, 20, 1, 1]
    with pytest.raises(StopIteration):
        next(relay)
    assert relay.queue.weight == 0


# -- a stage that waits for its source -------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ([20.0, 20.0, None], "enough"),  # only the source is late
        ([20.0, "item", 9.0, "answer"], ["value"]),  # it begins when the work does
        (["item", 6.0, 6.0], r"after 10 seconds.*\[5\]"),
    ],
)
def test_timeout_counts_only_while_there_is_work_under_way(script: list[Any], outcome: Any) -> None:
    clock = FakeClock()

    def step(crew: ScriptedCrew) -> list[Event]:
        made = script.pop(0)
        if made is None:
            pytest.fail("enough")
        if made == "item":
            hand.items.append(5)
        elif made == "answer":
            return [Done(0, 0, ByReference(["value"]))]
        else:
            clock.now += made
        return []

    stage, _, hand = fed([step] * len(script), timeout=10, clock=clock)
    try:
        if isinstance(outcome, list):
            assert next(stage) == outcome
        else:
            with pytest.raises((pytest.fail.Exception, WorkerTimeout), match=outcome):
                next(stage)
    finally:
        stage.close()


# -- sizes of items --------------------------------------------------------------------------------


@dataclass(slots=True)
class Record:
    data: bytes


def test_the_fields_of_a_dataclass_with_slots_are_weighed() -> None:
    assert size_of(Record(bytes(10_000))) - size_of(Record(b"")) == 10_000
