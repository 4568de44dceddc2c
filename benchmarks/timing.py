"""Timing of a repetition, and the order of interleaved repetitions. No torch, no processes here."""

from __future__ import annotations

import itertools
import math
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


@dataclass(frozen=True)
class Epoch:
    """One whole epoch, from the moment when its first batch came to the moment when its last one came.

    Attributes
    ----------
    start
        Seconds from the request to the first batch: opening the loader, starting its workers.
    seconds, cpu
        Seconds and CPU seconds from the first batch to the last.
    batches
        All batches, the first included.
    """

    start: float
    seconds: float
    cpu: float
    batches: int


@dataclass
class Lengths:
    """Numbers of batches in the short and the long epoch that are compared."""

    short: int
    long: int


ATTEMPTS = 9
"""Pairs of epochs that are timed at most until their lengths are right: some double the one before."""


def epoch_of(
    request: Callable[[], Iterator[Any]], batches: int, clock: Clock, meter: Meter | None = None
) -> Epoch:
    """Time a whole epoch of so many batches.

    Parameters
    ----------
    request
        Opens the loader and begins the epoch.

    Raises
    ------
    RuntimeError
        The epoch has another number of batches.
    """
    meter = meter or NoMeter()
    asked = clock()
    taking = request()
    next(taking)
    start = clock() - asked
    meter.start()
    began = clock()
    count = 1 + sum(1 for _ in itertools.islice(taking, batches - 1))
    seconds, cpu = clock() - began, meter.stop()
    if count < batches or next(taking, taking) is not taking:
        had = "fewer" if count < batches else "more"
        raise RuntimeError(f"an epoch of {batches} batches had {had}")
    return Epoch(start, seconds, cpu, batches)


def between(short: Epoch, long: Epoch) -> Timing:
    """Time of the batches that the long epoch has more than the short one.

    A batch that was made or begun before the clock started costs nothing in either epoch. There are
    as many of them in both, because a loader prefetches a fixed number; so they cancel, and so do the
    first batches, which meet cold memory, and the last ones, which meet idle workers.
    """
    more = long.batches - short.batches
    return Timing((long.seconds - short.seconds) / more, (long.cpu - short.cpu) / more, more)


def whole_epochs(
    epoch: Callable[[int], Epoch], seconds: float, lengths: Lengths
) -> tuple[Timing, Epoch]:
    """Time a batch as the difference between a short whole epoch and a long one.

    Parameters
    ----------
    epoch
        Times a whole epoch of so many batches.
    seconds
        Time by which the long epoch should be longer; half of it will do.
    lengths
        Lengths to begin with. They are raised, for the next repetition too, until the long epoch is
        long enough, and until at most half of the short one was prefetched when its first batch
        came: else the two would not have as many prefetched batches.

    Returns
    -------
    timing, long
        Time of a batch, and the long epoch.

    Raises
    ------
    RuntimeError
        The pace is never the same for long enough.
    """
    for _ in range(ATTEMPTS):
        short, long = epoch(lengths.short), epoch(lengths.long)
        found = between(short, long)
        wanted = Lengths(lengths.short, lengths.long)
        if short.seconds < found.seconds * short.batches / 2:
            wanted.short *= 2
        if long.seconds - short.seconds < seconds / 2:
            more = seconds / found.seconds if found.seconds > 0 else math.inf
            wanted.long = lengths.short + math.ceil(min(more, 16.0 * found.batches))
        wanted.long = max(wanted.long, 4 * wanted.short)
        if wanted == lengths:
            return found, long
        lengths.short, lengths.long = wanted.short, wanted.long
    raise RuntimeError(f"no steady pace in {ATTEMPTS} pairs of epochs, at last of {lengths}")


LONG = 50
"""Batches of a window for each batch that a loader may have ahead: what it had then is at most 2 %."""


def window(
    batches: Iterator[Any],
    seconds: float,
    *,
    warmup: int,
    ahead: int,
    most: int = 1 << 60,
    clock: Clock = time.perf_counter,
    meter: Meter | None = None,
) -> Timing:
    """Time batches in the middle of an epoch, in a window that is long beside what is prefetched.

    Only for batches that cost next to nothing; else `whole_epochs` is much sooner done.

    Parameters
    ----------
    seconds
        Time to take batches for.
    warmup
        Batches to take before the clock starts.
    ahead
        Bound on the batches that the loader makes ahead. At least `LONG` times as many are taken.
    most
        Bound on the batches to take where `seconds` would allow more.
    """
    for _ in range(warmup):
        next(batches)
    meter = meter or NoMeter()
    meter.start()
    start = now = clock()
    count, least = 0, max(4, LONG * ahead)
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
