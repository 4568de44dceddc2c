"""Waits of one thread: their sum, and the times of the latest ones."""

from __future__ import annotations

from collections import deque

from hybridloader._support.snapshots import snapshot

REMEMBERED = 4096
"""Number of waits, or of spans, that a ring keeps."""

Pause = tuple[float, float]
"""Begin and end of a wait."""


class Waits:
    """Waits of one thread, by `time.perf_counter`. One thread notes them, any thread may read.

    Waits of fewer than `brief` seconds are only summed.
    """

    def __init__(self, brief: float = 0.0) -> None:
        # All the mutable state:
        self.brief = brief
        self.longer = 0  # number of the others
        self.brief_seconds = self.longer_seconds = 0.0
        self.ring: deque[Pause] = deque(maxlen=REMEMBERED)  # a trace puts another in its place

    def note(self, began: float, ended: float) -> None:
        """Note a wait."""
        seconds = ended - began
        if seconds < self.brief:
            self.brief_seconds += seconds
        else:
            self.longer += 1
            self.longer_seconds += seconds
            self.ring.append((began, ended))

    @property
    def waited(self) -> float:
        """Seconds of all waits."""
        return self.brief_seconds + self.longer_seconds

    @property
    def latest(self) -> tuple[Pause, ...]:
        """Begin and end of the latest longer waits, in order."""
        return snapshot(self.ring)
