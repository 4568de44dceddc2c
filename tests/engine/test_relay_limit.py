"""A relay holds no more than its limit allows."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hybridloader.engine.feed import Relay


def test_a_relay_lets_in_what_its_limit_allows_and_one_that_is_larger_alone() -> None:
    pulled: list[int] = []
    third = threading.Event()

    def source() -> Iterator[int]:
        for weight in (4, 5, 3, 20, 1, 1):
            pulled.append(weight)
            if len(pulled) == 3:
                third.set()
            yield weight

    relay = Relay(source(), "r", depth=100, weigh=int, limit=10)
    assert third.wait(30)
    assert next(relay) == 4  # makes room for 3, not for 20 behind it
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

    relay = Relay(source(), "r", depth=100, weigh=int, limit=10, start=False)
    relay.start()
    assert list(relay) == [3] * 200
    assert max(most) <= 9


def test_a_relay_that_is_waited_for_too_long_says_so_and_loses_nothing() -> None:
    from hybridloader.errors import NotReady

    gate = threading.Event()

    def source() -> Iterator[int]:
        gate.wait(30)
        yield 1

    relay = Relay(source(), "r")
    with pytest.raises(NotReady):
        relay.get(0.01)
    gate.set()
    assert relay.get(30) == 1
    relay.close()
