"""Waits of the loop that takes the items: how long each `next()` took."""

from __future__ import annotations

from collections import deque
from time import perf_counter

from hybridloader._support.snapshots import snapshot
from hybridloader.engine.relay import REMEMBERED
from hybridloader.observe.cores import CoreUsage
from hybridloader.observe.recording import LoopRecord, Wait

BRIEF = 1e-4
"""Seconds of a `next()` below which it is only added up, unless a trace wants to know."""


class LoopWaits:
    """Waits of one loop. One thread writes them, another may read."""

    def __init__(self) -> None:
        self.cores = CoreUsage()
        # All the mutable state:
        self.began = perf_counter()
        self.ended: float | None = None
        self.items = 0  # counted by whoever calls `note`
        self.longer = 0  # calls of `next()`
        self.brief_seconds = self.longer_seconds = 0.0
        self.waits: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self.brief = BRIEF  # seconds below which a call is only added up

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
        """Return what was measured until now."""
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
