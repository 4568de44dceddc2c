"""Times of a sampler: how long its indices take, on the thread that asks for them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from hybridloader._support.snapshots import snapshot
from hybridloader.engine.relay import REMEMBERED
from hybridloader.observe.loop_waits import BRIEF
from hybridloader.observe.recording import LoopRecord, Span, StageRecord

SAMPLED = 16
"""Of so many indices that take microseconds, one is timed: the others are passed on by C code."""


class SourceTimes:
    """Seconds that a source took."""

    def __init__(self) -> None:
        # All the mutable state:
        self.seconds = 0.0
        self.longer: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        """Begin and end of the calls that took longest."""

    def timed(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return the items of `source`. An error of it ends them."""
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
        """Return what was measured; the source has given `items`."""
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
