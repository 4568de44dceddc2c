"""A relay: an iterator on a thread."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from hybridloader._support.user_objects import Raised, no_answer
from hybridloader.engine.feed import Relay, RelayQueue
from hybridloader.errors import IteratorClosed, NotReady, StateError, WorkerDied, WorkerTimeout


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


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_the_thread_the_consumer_hears_of_it(error: BaseException) -> None:
    def source() -> Iterator[int]:
        raise error
        yield

    relay = started(source(), "r")
    with pytest.raises(type(error)):
        next(relay)
    relay.close()


def test_close_from_another_thread_ends_a_wait() -> None:
    never, asked = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        asked.set()
        never.wait(30)
        yield 0

    relay = started(source(), "r")
    assert asked.wait(30)
    caught: list[BaseException] = []

    def pull() -> None:
        try:
            next(relay)
        except BaseException as error:
            caught.append(error)

    puller = threading.Thread(target=pull)
    puller.start()
    relay.queue.close()
    puller.join(30)
    assert isinstance(caught[0], IteratorClosed)
    never.set()
    relay.close()


def test_a_relay_that_is_let_go_ends_its_thread() -> None:
    relay = started(iter(range(100)), "let go")
    [thread] = [thread for thread in threading.enumerate() if thread.name == "let go"]
    del relay
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


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


def test_whoever_will_not_wait_is_told_that_nothing_is_there() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        gate.wait(30)
        yield 1

    relay = started(source(), "r")
    with pytest.raises(NotReady, match="'r'"):
        relay.next_nowait()
    with pytest.raises(NotReady):
        relay.get(0.01)
    woken = threading.Event()
    relay.when_ready(woken.set)
    assert not woken.is_set()
    gate.set()
    assert woken.wait(30)
    assert relay.next_nowait() == 1
    woken.clear()
    relay.when_ready(woken.set)
    assert woken.wait(30)  # the end wakes as an item does
    with pytest.raises(StopIteration):
        relay.next_nowait()
    relay.close()


def test_a_close_wakes_whoever_asked_to_be_woken() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        gate.wait(30)
        yield 1

    relay = started(source(), "r")
    woken = threading.Event()
    relay.when_ready(woken.set)
    relay.shut()
    assert woken.is_set()
    with pytest.raises(IteratorClosed):
        relay.next_nowait()
    gate.set()
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


def test_a_relay_never_holds_more_than_its_limit() -> None:
    most: list[int] = []

    def source() -> Iterator[int]:
        for _ in range(200):
            most.append(relay.queue.weight)
            yield 3

    relay = Relay(source(), "r", depth=100, weigh=int, limit=10)
    relay.start()
    assert list(relay) == [3] * 200
    assert max(most) <= 9
