"""Times of threads without a meter: the loop's thread, its sampler, and relays."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from hybridloader._support.threads import REMEMBERED, Waits
from hybridloader.engine.relay import RelayQueue
from hybridloader.observe.cores import CoreUsage
from hybridloader.observe.figures import between
from hybridloader.observe.recording import LoopRecord, Span, StageRecord, Wait

BRIEF = 1e-4
"""Calls of `next()` shorter than this many seconds are only summed, unless a trace runs."""


class LoopWaits(Waits):
    """Waits of one loop: its calls of `next()`."""

    def __init__(self) -> None:
        super().__init__(BRIEF)
        self.cores = CoreUsage()
        # All the mutable state:
        self.began = perf_counter()
        self.ended: float | None = None
        self.items = 0  # counted by the caller of `note`
        self.due = math.inf  # time of the next report

    def end(self) -> None:
        """Note that the loop has ended."""
        if self.ended is None:
            self.ended = perf_counter()
            self.cores.end()

    @property
    def seconds(self) -> float:
        """Seconds since it began, until the end."""
        return (perf_counter() if self.ended is None else self.ended) - self.began

    def record(self) -> LoopRecord:
        """Return the measurements until now."""
        waits = tuple(Wait(*wait) for wait in self.latest)
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


class SourceTimes(Waits):
    """Waits for the items of a source."""

    def __init__(self) -> None:
        super().__init__(BRIEF)

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
            self.note(began, ended)
            yield iter((item,))
            del item
            if ended - began < BRIEF:
                self.brief_seconds += (SAMPLED - 1) * (ended - began)
                yield itertools.islice(source, SAMPLED - 1)

    def record(self, name: str, items: int, loop: LoopRecord) -> StageRecord:
        """Return the measurements; `items` is the number that the source has returned."""
        spans = tuple(Span(*pair) for pair in self.latest)
        return StageRecord(
            name=name,
            backend="caller",
            items=items,
            busy=self.waited,
            other=max(0.0, loop.ended - loop.began - self.waited),
            spans=spans,
            since=spans[0].began if len(spans) == REMEMBERED else None,
            source=True,
        )


class TimedPulls(Waits):
    """Waits of a thread for its input."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(BRIEF)
        self._clock = clock
        self.began = clock()

    def timed(self, pull: Callable[..., Any]) -> Callable[..., Any]:
        """Return `pull` with its calls measured."""
        clock = self._clock

        def measured(*arguments: Any, **keywords: Any) -> Any:
            began = clock()
            try:
                return pull(*arguments, **keywords)
            finally:
                self.note(began, clock())

        return measured


def record_of_relay(
    name: str,
    queue: RelayQueue,  # it notes its sleeps
    began: float,
    ended: float,
    waits: Sequence[Waits],  # those of its thread for input
    **others: Any,  # fields of the record
) -> StageRecord:
    """Return the record of a relay's thread, which is busy when it does not sleep."""
    sleeps = queue.sleeps
    assert sleeps is not None
    waited, blocked = sum(one.waited for one in waits), sleeps.blocks.waited
    pauses = [one.latest for one in (sleeps.blocks, *waits)]
    if sleeps.ended is not None:
        ended = min(ended, sleeps.ended)
    since = max((ring[0][0] for ring in pauses if len(ring) >= REMEMBERED), default=began)
    return StageRecord(
        name=name,
        backend="thread",
        items=queue.count,
        busy=max(0.0, ended - began - blocked - waited),
        starved=waited,
        blocked=blocked,
        queued=len(queue.items),
        spans=tuple(between(since, ended, itertools.chain(*pauses))),
        since=None if since == began else since,
        **others,
    )


def record_of_caller(
    name: str,
    loop: LoopWaits,
    waits: Sequence[Waits],  # those for input
    **others: Any,  # fields of the record
) -> StageRecord:
    """Return the record of the work that the loop's thread does inside `next()`."""
    made, waited = loop.record(), sum(one.waited for one in waits)
    pauses = [span[:2] for span in between(made.began, made.ended, made.waits)]
    for one in waits:
        pauses += one.latest
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
