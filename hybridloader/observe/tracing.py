"""Trace of a program: the events of its loaders and pipelines, in a bounded buffer.

An iterator or a run looks for a trace once, by `running_trace`, when it is made.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

from hybridloader._support.arguments import whole
from hybridloader._support.text import brief, warn
from hybridloader._support.threads import Pause, Waits
from hybridloader.observe.program_block import ProgramBlock, numbered
from hybridloader.observe.trace_files import Event, Recorded, Track, check_path, chrome_trace, write

EVENTS = 250_000
"""Events that a trace keeps. They take 60 to 100 MB of memory and a few MB of a compressed file, which
takes two seconds to write."""

SLICES = 4096
"""Slices that a worker keeps until it reports them, within 10 ms unless a task takes longer."""


class Clocks(NamedTuple):
    """One moment as seconds of `time.perf_counter`, and as nanoseconds since 1970."""

    counter: float
    unix: int

    @classmethod
    def now(cls) -> Clocks:
        tries = []
        for _ in range(5):  # keep the reading with the least time between its two clock reads
            before, unix, after = time.perf_counter(), time.time_ns(), time.perf_counter()
            tries.append((after - before, cls((before + after) / 2, unix)))
        return min(tries)[1]


class Trace(ProgramBlock):
    """Trace of all loaders and pipelines whose iterators are made while it runs.

    A context manager, for one use. Any thread may add to it.
    """

    def __init__(self, path: str | os.PathLike[str], max_events: int = EVENTS) -> None:
        super().__init__()
        self.path = check_path(path)
        # All the mutable state:
        self._events: deque[Event] = deque(maxlen=whole("max_events", max_events, 1))
        self._added, self._threads = itertools.count(), itertools.count()
        self._tracks: dict[Track, str] = {}
        self._mine = threading.local()  # the track of each thread
        self._processes: dict[int, str] = {}
        self._naming = threading.Lock()
        self._names: dict[tuple[str, Hashable], str] = {}
        self._dropped = 0  # by workers
        self._clocks: Clocks | None = None
        self._over = False

    # -- begin and end -------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._clocks is not None:
            raise RuntimeError("this trace has begun before; make a new one")
        if (other := Trace.running()) is not None:
            raise RuntimeError(
                f"a trace to {other.path!r} runs already and records all loaders; end it first"
            )
        self.path = os.path.abspath(
            check_path(self.path, writable=True)
        )  # absolute: the program may change its folder
        self._processes[self._owner] = "your program"
        self._clocks = Clocks.now()

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self.instant(type(error).__name__, message=brief(error))
        self._over = True
        try:
            write(self.path, chrome_trace(self._recorded()))
        except Exception as failed:
            if error is None:
                raise
            # The program's error is the one to raise.
            warn(f"the trace was lost: {failed}", "trace-lost")

    def _recorded(self) -> Recorded:
        """Return the contents of the trace, and empty it."""
        assert self._clocks is not None
        # One by one, as another thread may still add an event.
        events = tuple(self._events.popleft() for _ in range(len(self._events)))
        dropped = next(self._added) - len(events)
        base = self._clocks.unix - round(self._clocks.counter * 1e9)
        tracks, processes = self._tracks.copy(), self._processes.copy()
        return Recorded(events, tracks, processes, max(0, dropped), self._dropped, base)

    # -- events --------------------------------------------------------------------------------------

    def slice(
        self, name: str, began: float, ended: float, track: Track | None = None, **details: Any
    ) -> None:
        """Add a slice of a thread's time; None for `track` is the calling thread."""
        self._add(Event("X", track or self.here(), name, began, ended, details))

    def instant(self, name: str, track: Track | None = None, **details: Any) -> None:
        """Add an event that happens now."""
        now = time.perf_counter()
        self._add(Event("i", track or self.here(), name, now, now, details))

    def _add(self, event: Event) -> None:
        if not self._over:
            next(self._added)
            self._events.append(event)

    def drop(self, count: int) -> None:
        """Count slices that a worker dropped for lack of room."""
        self._dropped += count

    def here(self) -> Track:
        """Return the track of the calling thread. A later thread with the same id gets a new track."""
        try:
            track: Track = self._mine.track
        except AttributeError:
            thread = threading.current_thread()
            track = self._mine.track = self._owner, f"{thread.name}/{next(self._threads)}"
            self._tracks[track] = thread.name
        return track

    # -- names ---------------------------------------------------------------------------------------

    def name_track(self, track: Track, name: str, process: str) -> None:
        """Name the track of a worker and its process, unless they have names."""
        self._tracks.setdefault(track, name)
        self._processes.setdefault(track[0], process)

    def name_of(self, stage: str, key: Hashable) -> str:
        """Return a unique name for a stage: ``"DataLoader"``, then ``"DataLoader 2"``."""
        with self._naming:
            if (stage, key) not in self._names:
                number = 1 + sum(name == stage for name, _ in self._names)
                self._names[stage, key] = numbered(stage, number)
            return self._names[stage, key]


def running_trace() -> Trace | None:
    """Return the trace that runs in this process, or None."""
    return Trace.running()


def trace(path: str | os.PathLike[str], *, max_events: int = EVENTS) -> Trace:
    """Record all loaders and pipelines in a file for Perfetto or ``chrome://tracing``.

    The trace records iterators that are made inside the block; docs/traces.md lists its contents. The
    file is written when the block ends, also by an error.

    Parameters
    ----------
    path
        File to write, ``.json`` or ``.json.gz``. An existing file is replaced.
    max_events
        Number of events to keep; older events are dropped, and the trace contains their number.

    Returns
    -------
    Trace
        A context manager, to be used once.

    Raises
    ------
    ValueError
        The path has another extension.
    OSError
        The file can't be written; raised when the block begins.
    RuntimeError
        Another trace is active; raised when the block begins.

    Examples
    --------
    >>> import hybridloader
    >>> with hybridloader.observe.trace("run.json.gz"):  # doctest: +SKIP
    ...     for batch in loader:
    ...         train(batch)
    """
    return Trace(path, max_events)


class _TracedRing(deque[Pause]):
    """Ring of waits; each entry also becomes a slice of the thread that adds it."""

    def __init__(
        self,
        before: deque[Pause],  # the ring that this one replaces
        trace: Trace,
        name: str,
        first: str | None,
    ) -> None:
        super().__init__(before, before.maxlen)
        self._trace, self._name, self._first = trace, name, first

    def append(self, span: Pause) -> None:
        super().append(span)
        name, self._first = self._first or self._name, None
        self._trace.slice(name, *span)


def traced(
    trace: Trace | None,  # None: do nothing
    name: str,
    waits: Waits,
    first: str | None = None,  # name of the first slice, if it differs
) -> None:
    """Have each of `waits` that is not brief also become a slice of the thread that notes it."""
    if trace is not None:
        waits.ring = _TracedRing(waits.ring, trace, name, first)
