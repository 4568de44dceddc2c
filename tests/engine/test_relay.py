"""A relay: an iterator on a thread."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from hybridloader._support.user_objects import Raised, no_answer
from hybridloader.engine.feed import Relay, RelayQueue, RelaySleeps
from hybridloader.errors import IteratorClosed, NotReady, StateError, WorkerDied, WorkerTimeout


def test_items_come_in_order_from_the_named_thread() -> None:
    names: list[str] = []

    def source() -> Iterator[int]:
        for k in range(100):
            names.append(threading.current_thread().name)
            yield k

    relay = Relay(source(), "pin-0", depth=3)
    assert list(relay) == list(range(100))
    assert set(names) == {"pin-0"}
    with pytest.raises(StopIteration):
        next(relay)
    relay.close()


def test_it_reads_no_further_than_its_depth() -> None:
    read: list[int] = []
    full = threading.Event()

    def source() -> Iterator[int]:
        for k in range(100):
            read.append(k)
            if len(read) == 3:  # two wait in the queue, the third waits for a place
                full.set()
            yield k

    relay = Relay(source(), "r", depth=2)
    assert full.wait(30)
    assert next(relay) == 0
    relay.close()
    assert len(read) <= 4


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


def test_an_error_comes_out_in_its_turn() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("broken", 2)

    relay = Relay(source(), "r")
    assert next(relay) == 1
    with pytest.raises(ValueError, match="broken") as caught:
        next(relay)
    assert caught.value.args == ("broken", 2)
    relay.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_the_thread_the_consumer_hears_of_it(error: BaseException) -> None:
    def source() -> Iterator[int]:
        raise error
        yield

    relay = Relay(source(), "r")
    with pytest.raises(type(error)):
        next(relay)
    relay.close()


def test_what_is_to_be_prepared_runs_first_and_on_the_thread() -> None:
    seen: list[str] = []
    relay = Relay(
        iter([1]), "device-7", prepare=lambda: seen.append(threading.current_thread().name)
    )
    assert list(relay) == [1]
    assert seen == ["device-7"]
    relay.close()


def test_an_error_in_preparing_is_the_consumers() -> None:
    def prepare() -> None:
        raise RuntimeError("no such device")

    relay = Relay(iter([1]), "r", prepare=prepare)
    with pytest.raises(RuntimeError, match="no such device"):
        next(relay)
    relay.close()


def test_close_ends_the_thread_and_closes_the_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    relay = Relay(source(), "r")
    next(relay)
    relay.close()
    relay.close()
    assert closed.is_set()
    with pytest.raises(IteratorClosed):
        next(relay)


def test_close_from_another_thread_ends_a_wait() -> None:
    never, asked = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        asked.set()
        never.wait(30)
        yield 0

    relay = Relay(source(), "r")
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
    relay = Relay(iter(range(100)), "let go")
    [thread] = [thread for thread in threading.enumerate() if thread.name == "let go"]
    del relay
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth"):
        Relay(iter([]), "r", depth=0)


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


def test_it_goes_on_behind_an_error() -> None:
    relay = Relay(Stumbling(KeyError("two")), "r", depth=9)
    assert [next(relay), next(relay)] == [0, 1]
    with pytest.raises(KeyError, match="two"):
        next(relay)
    assert list(relay) == [3, 4]
    relay.close()


@pytest.mark.parametrize(
    "error", [WorkerDied("gone"), IteratorClosed("shut"), StateError("another")], ids=repr
)
def test_an_error_that_would_be_raised_for_ever_ends_it(error: Exception) -> None:
    relay = Relay(Stumbling(error), "r", depth=9)
    assert [next(relay), next(relay)] == [0, 1]
    with pytest.raises(type(error)):  # of a user's code
        next(relay)
    assert list(relay) == [3, 4]
    relay = Relay(Stumbling(no_answer(error), 10**9), "r")
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

    relay = Relay(source(), "r")
    with pytest.raises(NotReady, match="'r'"):
        relay.next_nowait()
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


def test_whoever_asks_to_be_woken_when_something_is_there_is_woken_at_once_and_once() -> None:
    full = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        full.set()
        yield 1

    relay = Relay(source(), "r")
    assert full.wait(30)
    calls: list[int] = []
    relay.when_ready(lambda: calls.append(1))
    assert calls == [1]
    assert next(relay) == 0
    assert next(relay) == 1
    with pytest.raises(StopIteration):
        next(relay)
    assert calls == [1]
    relay.close()


def test_a_close_wakes_whoever_asked_to_be_woken() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        gate.wait(30)
        yield 1

    relay = Relay(source(), "r")
    woken = threading.Event()
    relay.when_ready(woken.set)
    relay.shut()
    assert woken.is_set()
    with pytest.raises(IteratorClosed):
        relay.next_nowait()
    gate.set()
    relay.close()


def test_its_depth_may_be_changed_while_it_runs() -> None:
    read: list[int] = []
    third, last = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        for k in range(9):
            read.append(k)
            if k == 2:
                third.set()
            if k == 8:
                last.set()
            yield k

    relay = Relay(source(), "r", depth=2)
    assert third.wait(30)
    relay.queue.depth = 8
    assert next(relay) == 0
    assert last.wait(30)  # with a depth of 2 it would stop at the fourth
    relay.close()


def test_a_relay_that_was_never_started_can_be_closed() -> None:
    relay = Relay(iter(range(3)), "r", start=False)
    relay.close()
    with pytest.raises(IteratorClosed):
        next(relay)


def test_it_tells_what_came_out_and_who_waited() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        gate.wait(30)
        yield from range(3)

    relay = Relay(source(), "r", depth=9, start=False)
    sleeps = relay.queue.sleeps = RelaySleeps(relay.queue.items)
    relay.start()
    threading.Timer(0.01, gate.set).start()
    assert list(relay) == [0, 1, 2]
    assert (relay.queue.count, len(relay.queue.items), sleeps.blocks.waited) == (3, 0, 0.0)
    assert sleeps.waits.waited > 0
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
