"""Trace of a program: the events of its loaders and pipelines, in a bounded buffer, then in a file.

An iterator or a run looks for a trace once, by `Trace.running`, when it is made. The file is Chrome's
JSON, plain or compressed, as Perfetto and ``chrome://tracing`` read it. Times in it are microseconds
since `baseTimeNanoseconds`, as in the files of torch.profiler.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hybridloader._support import system
from hybridloader._support.text import brief, warn, whole
from hybridloader._support.threads import Pause, Waits
from hybridloader._support.user_objects import described, repr_of
from hybridloader.engine.messages import Done, Result
from hybridloader.engine.meter import LONG, MEASURES, SEEN, TASK, TASKS, SliceReport, Slices
from hybridloader.fetching.on_error import Skipped
from hybridloader.observe.measures import BRIEF, LoopWaits, StageMeasures

if TYPE_CHECKING:
    from typing_extensions import Self

# -- blocks around a whole program, such as a trace, which an iterator looks up once, when it is made


class ProgramBlock(ABC):
    """Context manager, for one use. In a process that is forked inside it, it neither runs nor ends.

    It gives each loader and each pipeline a name.
    """

    running: ClassVar[Any] = None
    """Latest block that runs in this process, or None; each subclass sets this attribute on itself."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.RLock()  # reentrant: a finalizer may end an iterator
        self._names: dict[tuple[str, Hashable], str] = {}  # all the mutable state, under that lock

    def name_of(self, name: str, key: Hashable) -> str:
        """Return a name that no other `key` has: ``"DataLoader"``, then ``"DataLoader 2"``."""
        with self._lock:
            if (name, key) not in self._names:
                number = 1 + sum(name == other for other, _ in self._names)
                self._names[name, key] = name if number == 1 else f"{name} {number}"
            return self._names[name, key]

    def __enter__(self) -> Self:
        type(self).running = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._owner:  # a forked child that left the block
            return
        if type(self).running is self:
            type(self).running = None
        self._end(error)

    @abstractmethod
    def _end(self, error: BaseException | None) -> None:
        """Finish the block; `error` is the exception that ended it, or None."""


def _forget_blocks() -> None:
    for kind in ProgramBlock.__subclasses__():
        kind.running = None


system.at_fork(after_in_child=_forget_blocks)


EVENTS = 250_000
"""Events that a trace keeps. They take 60 to 100 MB of memory and a few MB of a compressed file, which
takes two seconds to write."""

SLICES = 4096
"""Slices that a worker keeps until it reports them, within 10 ms unless a task takes longer."""

Track = tuple[int, str]  # process id, and a name for the thread that no other has in the trace

LOOP = ("iter()", "next()")
"""Names of the slices in which a loop waits for an iterator and for an item."""


class Event(NamedTuple):
    """Event of a trace; times are seconds of `time.perf_counter`."""

    kind: str  # ``"X"``: a slice, ``"i"``: an instant
    track: Track
    name: str
    began: float
    ended: float
    details: dict[str, Any]


class Trace(ProgramBlock):
    """Trace of all loaders and pipelines whose iterators are made while it runs.

    A context manager, for one use. Any thread may add to it.
    """

    def __init__(self, path: str | os.PathLike[str], max_events: int = EVENTS) -> None:
        super().__init__()
        text = os.fspath(path)
        if not isinstance(text, str) or not text.endswith((".json", ".json.gz")):
            raise ValueError(f"the path of a trace must end in .json or .json.gz, not be {path!r}")
        self.path = text
        # All the mutable state:
        self._events: deque[Event] = deque(maxlen=whole("max_events", max_events, 1))
        self._added, self._threads = itertools.count(), itertools.count()
        self._tracks: dict[Track, str] = {}
        self._mine = threading.local()  # the track of each thread
        self._processes: dict[int, str] = {}
        self._dropped = 0  # by workers
        self._base: int | None = None  # once it has begun
        self._over = False

    # -- begin and end -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._base is not None:
            raise RuntimeError("this trace has begun before; make a new one")
        if (other := Trace.running) is not None:
            raise RuntimeError(
                f"a trace to {other.path!r} runs already and records all loaders; end it first"
            )
        # Absolute, as the program may change its folder.
        self.path = os.path.abspath(self.path)
        _check_writable(self.path)
        self._processes[self._owner] = "your program"
        self._base = _unix_of_zero()
        return super().__enter__()

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self.instant(type(error).__name__, message=brief(error))
        self._over = True
        try:
            _write(self.path, self._as_json())
        except Exception as failed:
            if error is None:
                raise
            # The program's error is the one to raise.
            warn(f"the trace was lost: {failed}", "trace-lost")

    def _as_json(self) -> dict[str, Any]:
        """Return the contents of the trace as JSON values, and empty it."""
        # One by one, as another thread may still add an event.
        events = [self._events.popleft() for _ in range(len(self._events))]
        dropped = max(0, next(self._added) - len(events))
        tracks, processes = self._tracks.copy(), self._processes.copy()
        return {
            "traceEvents": chrome_events(events, tracks, processes),
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base,
            "otherData": {
                "made_by": "hybridloader",
                "dropped_events": dropped,
                "dropped_by_workers": self._dropped,
            },
        }

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


def _unix_of_zero() -> int:
    """Return the nanoseconds from 1970 until the zero of `time.perf_counter`."""
    tries = []
    for _ in range(5):  # keep the reading with the least time between its two clock reads
        before, unix, after = time.perf_counter(), time.time_ns(), time.perf_counter()
        tries.append((after - before, unix - round((before + after) / 2 * 1e9)))
    return min(tries)[1]


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


class StageTrace(StageMeasures):
    """Measures of one stage that also go into a trace. `key` distinguishes stages of one name."""

    def __init__(
        self, trace: Trace, name: str, key: Hashable, *of_the_stage: Any, each: bool
    ) -> None:
        self._trace, self._name = trace, trace.name_of(name, key)
        # All the other mutable state:
        self._loop: LoopWaits | None = None  # the loop that takes the results
        self._long = True  # each task has separate slices
        super().__init__(*of_the_stage, each=each)
        self.metering = replace(self.metering, slices=SLICES)

    def begin_again(self) -> None:
        super().begin_again()
        traced(self._trace, "wait", self.waits)

    def of_loop(self, loop: LoopWaits) -> None:
        self._loop = loop

    def came(self, event: Result, since: float) -> None:
        measures = None if event.extras is None else event.extras.get(MEASURES)
        super().came(event, since)
        if measures is None or not isinstance(event, Done):
            return
        for each in (measures, *measures.others):
            if each.slices is None:
                continue
            track = self._take_in(each.slices)
            if each.retried:
                self._trace.instant("retried", track, stage=self._name, calls=each.retried)
        self._long = self.opens_slowly = event.seconds >= LONG
        if self._loop is not None:  # if tasks are long, it notes each of its waits
            self._loop.brief = 0.0 if self._long else BRIEF

    def opened(self, seq: int, began: float, ended: float) -> None:
        super().opened(seq, began, ended)
        self.opens_slowly |= self._long
        if not self.backend.in_caller:
            self._trace.slice("open", began, ended, task=seq)

    def replaced(self, worker: int, cause: str | None) -> None:
        super().replaced(worker, cause)
        self._trace.instant("worker restarted", stage=self._name, worker=worker, cause=cause)

    def raised(self, worker: int, seq: int, error: BaseException) -> None:
        self._trace.instant(
            "error", stage=self._name, worker=worker, task=seq, message=described(error)
        )

    def _take_in(self, report: SliceReport) -> Track:
        """Add the slices that a worker reported; return its track."""
        trace, name = self._trace, self._name
        worker = f"{name} worker {report.worker}"
        own = report.process, f"{worker}/{report.thread}"
        if self.backend.in_caller:
            own = trace.here()
        trace.name_track(own, worker, f"{worker} ({self.backend.name})")
        trace.drop(report.dropped)
        for kind, began, ended, thread, number in report.slices:
            track = own
            if thread != report.thread:
                track = report.process, f"{worker}/{thread}"
                trace.name_track(track, f"{worker}, more threads", worker)
            details = {kind: number} if kind in (TASK, TASKS) else {}
            trace.slice(kind, began, ended, track, **details)
        return own


class LocalSlices(Slices):
    """Slices of functions that a thread of this process calls, added to the trace directly."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(1)
        self._trace = trace

    def add(self, name: str, began: float, ended: float, number: int = -1) -> None:
        if ended - began >= SEEN:
            self._trace.slice(name, began, ended)


def skipped_in(trace: Trace, record: Skipped) -> None:
    """Note in the trace that a sample was skipped or replaced."""
    place = {"stage": record.stage, "worker": record.worker, "index": record.index}
    trace.instant(
        "replaced" if record.replaced else "skipped", **place, error=repr_of(record.error)
    )


def chrome_events(
    events: Sequence[Event], tracks: Mapping[Track, str], processes: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the events as JSON values, after the names of processes and of threads with events.

    Threads with loops come first. Slices are sorted by begin, outer ones before inner ones: of those
    with the same times, the outer one was added last.
    """
    present = {event.track for event in events}
    loops = {event.track for event in events if event.name in LOOP}
    numbers: dict[int, dict[str, int]] = {pid: {} for pid in processes}
    for pid, thread in sorted(present, key=lambda one: (one not in loops, tracks.get(one, ""))):
        threads = numbers.setdefault(pid, {})
        threads[thread] = len(threads) + 1
    found = [_meta("process_name", pid, 0, name=name) for pid, name in processes.items()]
    found += [_meta("process_sort_index", pid, 0, sort_index=at) for at, pid in enumerate(numbers)]
    for (pid, thread), name in tracks.items():
        if (number := numbers[pid].get(thread)) is not None:
            found.append(_meta("thread_name", pid, number, name=name))
            found.append(_meta("thread_sort_index", pid, number, sort_index=number))
    in_order = [*reversed(events)]
    in_order.sort(key=lambda event: (event.began, -event.ended))
    return found + [_event(event, numbers) for event in in_order]


def _microseconds(nanoseconds: int, more: float = 0.25) -> float:
    """Return microseconds from which a reader that truncates gets exactly these nanoseconds.

    Perfetto truncates (`CoerceToTs`), and ``69321924167.078 * 1000`` is less than the whole number. With
    a nanosecond lost, an inner slice could end after its outer one. So `more`, a fraction of a
    nanosecond, is added.
    """
    return round((nanoseconds + more) / 1000, 5)


def _event(event: Event, numbers: dict[int, dict[str, int]]) -> dict[str, Any]:
    pid, thread = event.track
    began, ended = round(event.began * 1e9), round(event.ended * 1e9)  # nanoseconds
    made: dict[str, Any] = {"ph": event.kind, "name": event.name, "cat": "hybridloader"}
    made |= {"pid": pid, "tid": numbers[pid][thread], "ts": _microseconds(began)}
    if event.kind == "X":
        # The difference of rounded times, so that slices stay nested.
        made["dur"] = _microseconds(ended - began, 0.01)
    elif event.kind == "i":
        made["s"] = "t"
    if event.details:
        made["args"] = {name: _plain(value) for name, value in event.details.items()}
    return made


def _plain(value: Any) -> Any:
    """Return a detail as a JSON value; an index or an error may be any object of the user."""
    if isinstance(value, (str, int, type(None))) or (
        isinstance(value, float) and math.isfinite(value)
    ):
        return value
    return brief(value)


def _meta(kind: str, pid: int, tid: int, **details: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": details}


def _check_writable(path: str) -> None:
    there = os.path.exists(path)
    try:
        open(path, "ab").close()
    except OSError as error:
        message = f"the trace can't be written: {error.strerror}"
        raise type(error)(error.errno, message, path) from None
    if not there:
        os.remove(path)


def _write(path: str, trace: dict[str, Any]) -> None:
    data = json.dumps(trace, separators=(",", ":"), default=str).encode()
    Path(path).write_bytes(gzip.compress(data, 6) if path.endswith(".gz") else data)
