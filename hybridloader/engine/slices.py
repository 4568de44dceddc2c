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
"""Seconds from which every task has slices of its own."""

ALWAYS = float("-inf")
"""Time that was before any task."""

SEEN = 1e-5
"""Seconds of waiting, sending, or of a step of a pipeline, below which it is no slice."""

TASK, TASKS = "task", "tasks"
"""Names of the slice of a task, and of the one for several short ones."""


class Slice(NamedTuple):
    """Time that a thread spent on something; slices of a thread are within one another, or apart."""

    name: str
    began: float
    ended: float
    thread: int
    """Identity of the thread, as Python counts."""
    number: int = -1
    """Number of the task, for `TASK`; number of tasks, for `TASKS`."""


class Told(NamedTuple):
    """Slices of a worker since its last report."""

    process: int
    thread: int
    """Identity of the worker's own thread."""
    worker: int
    slices: tuple[tuple[Any, ...], ...]
    """Fields of `Slice`, each; inner ones come before the outer."""
    dropped: int
    """Number of slices for which the ring had no room."""

    def moved(self, seconds: float) -> Told:
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
        self.worker = 0  # set by its worker
        self._alone = alone  # False: its thread has other work between two tasks
        # All the mutable state:
        self.on = True
        """True if the task in hand is to have slices, or the next one."""
        self.since = ALWAYS
        """Time from which a task that begins is to have slices: when measures are due, or `ALWAYS`."""
        self.began = 0.0
        """Time at which the task in hand began, if it is to have slices."""
        self.short = 0
        """Number of tasks since the last one that has slices."""
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=limit)
        self._dropped = 0
        self._due = ALWAYS
        self._free: float | None = None  # end of the last slice of the worker's own thread
        self._parts = False  # since then there were short parts of shared tasks

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
        """Note the current task, which was fetched, and packed; `spent` is that of `Meter.tell`."""
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

    def tell(self, due: float) -> Told:
        """Return the slices since the last report; the next measures are `due` then."""
        self._due = due
        if not self.on:
            self.since = due
        ring = self._ring
        slices = tuple(ring.popleft() for _ in range(len(ring)))
        dropped, self._dropped = self._dropped, 0
        return Told(os.getpid(), get_ident(), self.worker, slices, dropped)
