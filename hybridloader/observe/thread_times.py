"""Times of threads without a meter: the loop's thread, its sampler, and relays."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any

from hybridloader._support.snapshots import snapshot
from hybridloader.engine.relay import REMEMBERED, RelayQueue
from hybridloader.observe.cores import CoreUsage
from hybridloader.observe.figures import between
from hybridloader.observe.recording import LoopRecord, Span, StageRecord, Wait

BRIEF = 1e-4
"""Calls of `next()` shorter than this many seconds are only summed, unless a trace runs."""


class LoopWaits:
    """Waits of one loop. One thread writes them, another may read."""

    def __init__(self) -> None:
        self.cores = CoreUsage()
        # All the mutable state:
        self.began = perf_counter()
        self.ended: float | None = None
        self.items = 0  # counted by the caller of `note`
        self.longer = 0  # calls of `next()`
        self.brief_seconds = self.longer_seconds = 0.0
        self.waits: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self.brief = BRIEF  # calls of fewer seconds are only summed
        self.due = math.inf  # time of the next report

    def note(self, began: float, ended: float) -> None:
        """Note a call of `next()`."""
        seconds = ended - began
        if seconds < self.brief:
            self.brief_seconds += seconds
        else:
            self.longer += 1
            self.longer_seconds += seconds
            self.waits.append((began, ended))

    def end(self) -> None:
        """Note that the loop has ended."""
        if self.ended is None:
            self.ended = perf_counter()
            self.cores.end()

    @property
    def waited(self) -> float:
        """Seconds spent in `next()`."""
        return self.brief_seconds + self.longer_seconds

    @property
    def seconds(self) -> float:
        """Seconds since it began, until the end."""
        return (perf_counter() if self.ended is None else self.ended) - self.began

    def record(self) -> LoopRecord:
        """Return the measurements until now."""
        waits = tuple(Wait(*wait) for wait in snapshot(self.waits))
        return LoopRecord(
            began=self.began,
            ended=self.began + self.seconds,
            items=self.items,
            waited=self.waited,
            waits=waits,
            brief=max(0, self.items - self.longer),
            brief_seconds=self.brief_seconds,
            dropped=max(0, self.longer - len(waits)),
        )


SAMPLED = 64
"""One of so many quick indices is timed: C code passes the others on."""


class SourceTimes:
    """Time that a source takes to return its items."""

    def __init__(self) -> None:
        # All the mutable state:
        self.seconds = 0.0
        self.longer: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        """Begin and end of the longer calls."""

    def timed(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return the items of `source`, timed. An error that it raises passes through."""
        return itertools.chain.from_iterable(self._parts(source))

    def _parts(self, source: Iterator[Any]) -> Iterator[Iterator[Any]]:
        while True:
            began = perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            ended = perf_counter()
            long = ended - began >= BRIEF
            self.seconds += (1 if long else SAMPLED) * (ended - began)
            if long:
                self.longer.append((began, ended))
            yield iter((item,))
            del item
            if not long:
                yield itertools.islice(source, SAMPLED - 1)

    def record(self, name: str, items: int, loop: LoopRecord) -> StageRecord:
        """Return the measurements; `items` is the number that the source has returned."""
        spans = tuple(Span(*pair) for pair in snapshot(self.longer))
        return StageRecord(
            name=name,
            backend="caller",
            items=items,
            busy=self.seconds,
            other=max(0.0, loop.ended - loop.began - self.seconds),
            spans=spans,
            since=spans[0].began if len(spans) == REMEMBERED else None,
            source=True,
        )


Pause = tuple[float, float]
"""Begin and end of a thread's sleep."""


class TimedPulls:
    """Time that a thread waits for its input. That thread writes, another may read."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.began = clock()
        # All the mutable state:
        self.waited = 0.0  # seconds
        self.waits: deque[Pause] = deque(maxlen=REMEMBERED)  # the longer ones

    def timed(self, pull: Callable[..., Any]) -> Callable[..., Any]:
        """Return `pull` with its calls measured."""
        clock = self._clock

        def measured(*arguments: Any, **keywords: Any) -> Any:
            began = clock()
            try:
                return pull(*arguments, **keywords)
            finally:
                ended = clock()
                self.waited += ended - began
                if ended - began >= BRIEF:
                    self.waits.append((began, ended))

        return measured


def record_of_relay(
    name: str,
    queue: RelayQueue,  # it notes its sleeps
    began: float,
    ended: float,
    *,
    waited: float,  # seconds that its thread waited for input
    waits: Sequence[Pause] = (),  # begins and ends of these waits
    **others: Any,  # fields of the record
) -> StageRecord:
    """Return the record of a relay's thread, which is busy when it does not sleep."""
    sleeps = queue.sleeps
    assert sleeps is not None
    blocks: tuple[Pause, ...] = snapshot(sleeps.blocks)
    if sleeps.ended is not None:
        ended = min(ended, sleeps.ended)
    since = max((ring[0][0] for ring in (blocks, waits) if len(ring) >= REMEMBERED), default=began)
    return StageRecord(
        name=name,
        backend="thread",
        items=queue.count,
        busy=max(0.0, ended - began - sleeps.blocked - waited),
        starved=waited,
        blocked=sleeps.blocked,
        queued=len(queue.items),
        spans=tuple(between(since, ended, [*blocks, *waits])),
        since=None if since == began else since,
        **others,
    )


def record_of_caller(
    name: str,
    loop: LoopWaits,
    *,
    waited: float,  # seconds that it waited for input
    waits: Iterable[Pause] = (),  # begins and ends of these waits
    **others: Any,  # fields of the record
) -> StageRecord:
    """Return the record of the work that the loop's thread does inside `next()`."""
    made = loop.record()
    away = between(made.began, made.ended, made.waits)
    pauses = [*((span.began, span.ended) for span in away), *waits]
    return StageRecord(
        name=name,
        backend="caller",
        items=made.items,
        busy=max(0.0, made.waited - waited),
        starved=waited,
        other=max(0.0, made.ended - made.began - made.waited),
        spans=tuple(between(made.began, made.ended, pauses)),
        **others,
    )
