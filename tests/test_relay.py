"""A relay: an iterator on a thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from hybridloader.errors import IteratorClosed
from hybridloader.relay import Relay


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
    relay._belt.close()
    puller.join(30)
    assert isinstance(caught[0], IteratorClosed)
    never.set()
    relay.close()


def test_a_relay_that_is_let_go_ends_its_thread() -> None:
    relay = Relay(iter(range(100)), "r")
    thread = relay._thread
    del relay
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth"):
        Relay(iter([]), "r", depth=0)
