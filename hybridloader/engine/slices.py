"""Slices of a worker: the activities of its threads, with times, for a trace; none without a trace.

A worker keeps them in a bounded ring, and sends them with its measures. Each task of `LONG` seconds or
more has its own slices. A shorter task has them only if its measures are reported; the other short tasks
are joined in one slice, so that they cost no more than a meter.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

LONG = 1e-4
"""Seconds from which every task has separate slices."""

ALWAYS = float("-inf")
"""Time before any task."""

SEEN = 1e-5
"""Least seconds of a slice of waiting, of sending, or of a pipeline step."""

TASK, TASKS = "task", "tasks"
"""Names of the slice of one task, and of the slice of several short tasks."""


class Slice(NamedTuple):
    """Time that a thread spent on something; slices of a thread are within one another, or apart."""

    name: str
    began: float
    ended: float
    thread: int
    """Identity of the thread, as `threading.get_ident` returns it."""
    number: int = -1
    """Number of the task, for `TASK`; number of tasks, for `TASKS`."""


class SliceReport(NamedTuple):
    """Slices of a worker since its last report."""

    process: int
    thread: int
    """Identity of the worker's main thread."""
    worker: int
    slices: tuple[tuple[Any, ...], ...]
    """Fields of each `Slice`; inner slices come before outer ones."""
    dropped: int
    """Number of slices that the ring dropped."""

    def moved(self, seconds: float) -> SliceReport:
        """Return these with all times so many seconds later."""
        slices = (Slice(*fields) for fields in self.slices)
        return self._replace(
            slices=tuple(
                one._replace(began=one.began + seconds, ended=one.ended + seconds) for one in slices
            )
        )


class Slices:
    """Ring of the slices of one worker: it keeps the last `limit` until they are reported."""

    def __init__(self, limit: int, *, alone: bool = True) -> None:
        self.worker = 0  # set by the worker
        self._alone = alone  # False: other work may run on its thread between two tasks
        # All the mutable state:
        self.on = True
        """True if the current task, or the next one, is to have slices."""
        self.since = ALWAYS
        """Time from which a new task has slices: when measures are due, or `ALWAYS`."""
        self.began = 0.0
        """Start of the current task, if it is to have slices."""
        self.short = 0
        """Number of tasks since the last one with slices."""
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=limit)
        self._dropped = 0
        self._due = ALWAYS
        self._free: float | None = None  # end of the last slice of the worker's main thread
        self._parts = False  # short parts of shared tasks have ended since then

    def add(self, name: str, began: float, ended: float, number: int = -1) -> None:
        """Note a slice of the calling thread."""
        if len(self._ring) == self._ring.maxlen:
            self._dropped += 1
        self._ring.append((name, began, ended, get_ident(), number))

    def timed(
        self, name: str, function: Callable[[Any], Any], least: float = 0.0
    ) -> Callable[[Any], Any]:
        """Return `function`, each call of which is a slice if it takes `least` seconds."""

        def call(argument: Any) -> Any:
            if not self.on:
                return function(argument)
            began = perf_counter()
            try:
                return function(argument)
            finally:
                ended = perf_counter()
                if ended - began >= least:
                    self.add(name, began, ended)

        return call

    # -- called by the worker, on its own thread ---------------------------------------------------

    def task(self, number: int, fetched: float, ended: float, spent: float = 0.0) -> None:
        """Note the current task, which was fetched and packed; for `spent` see `Meter.measure`."""
        began = self.began
        self.on = ended - began + spent >= LONG
        self.since = ALWAYS if self.on else self._due
        self._idle(began)
        self.add("fetch", began, fetched)
        if fetched < ended:
            self.add("pack", fetched, ended)
        self.add(TASK, began, ended, number)
        self._free = ended

    def failed(self, number: int) -> None:
        """Record that the current task has raised an error."""
        if self.on:
            ended = perf_counter()
            self.task(number, ended, ended)

    def part(self, began: float, ended: float) -> None:
        """Note samples of a task that several workers share."""
        if ended - began < LONG:
            self._parts = True
            return
        self.on, self.since = True, ALWAYS
        self._idle(began)
        self.add("samples", began, ended)
        self._free = ended

    def span(self, name: str, began: float, ended: float) -> None:
        """Record an activity of the worker between two tasks."""
        if ended - began >= SEEN:
            self.add(name, began, ended)
            self._free = ended

    def _idle(self, until: float) -> None:
        """Record the time from the last slice until now."""
        free, short, parts = self._free, self.short, self._parts
        self.short, self._parts = 0, False
        if free is None or not self._alone or until - free < SEEN:
            return
        if short or parts:
            self.add(TASKS, free, until, short)
        else:
            self.add("wait", free, until)

    def report(self, due: float) -> SliceReport:
        """Return the slices since the last report; the next measures are `due` then."""
        self._due = due
        if not self.on:
            self.since = due
        ring = self._ring
        slices = tuple(ring.popleft() for _ in range(len(ring)))
        dropped, self._dropped = self._dropped, 0
        return SliceReport(os.getpid(), get_ident(), self.worker, slices, dropped)
