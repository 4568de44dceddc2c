"""Timing of a repetition, and the order of interleaved repetitions. No torch, no processes here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Clock = Callable[[], float]


class Meter(Protocol):
    """Counts CPU seconds."""

    def start(self) -> None: ...
    def stop(self) -> float: ...


class NoMeter:
    """Counts nothing."""

    def start(self) -> None:
        pass

    def stop(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Timing:
    """Time of a repetition, a batch."""

    seconds: float
    cpu: float
    batches: int


def steady(
    batches: Iterator[Any],
    seconds: float,
    *,
    warmup: int,
    least: int = 4,
    most: int = 1 << 60,
    clock: Clock = time.perf_counter,
    meter: Meter | None = None,
) -> Timing:
    """Time batches in the middle of an epoch: neither the start of the workers nor their end.

    Parameters
    ----------
    seconds
        Time to take batches for.
    warmup
        Batches to take before the clock starts; more than are prefetched.
    least, most
        Bounds on the batches to take, whatever the clock says.
    """
    for _ in range(warmup):
        next(batches)
    meter = meter or NoMeter()
    meter.start()
    start = now = clock()
    count = 0
    while count < least or (now - start < seconds and count < most):
        next(batches)
        count += 1
        now = clock()
    return Timing((now - start) / count, meter.stop() / count, count)


def turns(epoch: Callable[[], Iterator[Any]], count: int, clock: Clock) -> list[float]:
    """Seconds from an epoch's last batch to the first one of the next, `count` times."""
    found = []
    batches = epoch()
    for _ in range(count):
        last = None
        for _ in batches:
            last = clock()
        batches = epoch()
        next(batches)
        now = clock()
        assert last is not None
        # The clock was read after the last batch came: finding out that there are no more is
        # part of the turn.
        found.append(now - last)
    return found


def first_batches(
    batches: Iterator[Any], workers: int, start: float, clock: Clock
) -> tuple[float, float]:
    """Return the seconds from `start` to the first batch, and until each worker has delivered one."""
    next(batches)
    first = clock() - start
    for _ in itertools.islice(batches, workers - 1):
        pass
    return first, clock() - start


def fastest(function: Callable[[], Any], times: int = 9) -> float:
    """Seconds of a call that nothing disturbs: the least of `times` calls."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of `values` do not pass; 0 if there are none."""
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def interleaved(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Pairs (round, name): every name once a round, each round beginning with the next name.

    So a slow minute hits all of them, and none always comes after the same other.
    """
    for number in range(rounds):
        shift = number % len(names) if names else 0
        for name in (*names[shift:], *names[:shift]):
            yield number, name
