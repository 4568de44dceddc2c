"""Meter of one worker: where the time of its tasks goes. It exists only where somebody observes.

A worker adds up the seconds of its tasks, and reports its measurements once in 10 ms at most: beside a
value, under `MEASURES` of `Done.extras`. It does more than an addition only then, so a task of
microseconds costs three or four additions and comparisons more. The clock is one for all processes of a
machine.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter, sleep
from typing import Any, NamedTuple

from hybridloader._support import system
from hybridloader._support.store_use import StoreUse, start_counting, uses, uses_since

# -- Slices of a worker: the activities of its threads, with times, for a trace; none without a trace.
#
# A worker keeps them in a bounded ring, and sends them with its measures. Each task of `LONG` seconds
# or more has its own slices. A shorter task has them only if its measures are reported; the other short
# tasks are joined in one slice, so that they cost no more than a meter.


LONG = 1e-4  # seconds from which every task has separate slices

ALWAYS = float("-inf")  # time before any task

SEEN = 1e-5  # least seconds of a slice of waiting, of sending, or of a pipeline step

TASK, TASKS = "task", "tasks"
"""Names of the slice of one task, and of the slice of several short tasks."""


Slice = tuple[str, float, float, int, int]
"""Time that a thread spent on something: its name, its begin and end, and the identity of the thread.
At last the number of the task, for `TASK`; the number of tasks, for `TASKS`; else -1. Slices of a thread
are within one another, or apart."""


class SliceReport(NamedTuple):
    """Slices of a worker since its last report."""

    process: int
    thread: int  # identity of the worker's main thread
    worker: int
    slices: tuple[Slice, ...]  # inner slices come before outer ones
    dropped: int  # number of slices that the ring dropped

    def moved(self, seconds: float) -> SliceReport:
        """Return these with all times so many seconds later."""
        return self._replace(
            slices=tuple(
                (name, began + seconds, ended + seconds, thread, number)
                for name, began, ended, thread, number in self.slices
            )
        )


class Slices:
    """Ring of the slices of one worker: it keeps the last `limit` until they are reported."""

    def __init__(self, limit: int, *, alone: bool = True) -> None:
        self.worker = 0  # set by the worker
        self._alone = alone  # False: other work may run on its thread between two tasks
        # All the mutable state:
        self.on = True  # True if the current task, or the next one, is to have slices
        self.since = ALWAYS
        """Time from which a new task has slices: when measures are due, or `ALWAYS`."""
        self.short = 0  # number of tasks since the last one with slices
        self._ring: deque[Slice] = deque(maxlen=limit)
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

    def begin(self, now: float) -> None:
        """Note that a task begins."""
        self.on = now >= self.since

    def end(
        self, number: int, began: float, fetched: float, ended: float, spent: float = 0.0
    ) -> bool:
        """Note that a task was fetched and packed; return whether it has slices.

        For `spent` see `Meter.measure`.
        """
        has_slices, self.on = self.on, ended - began + spent >= LONG
        self.since = ALWAYS if self.on else self._due
        if not has_slices:
            self.short += 1
            return False
        self._idle(began)
        self.add("fetch", began, fetched)
        if fetched < ended:
            self.add("pack", fetched, ended)
        self.add(TASK, began, ended, number)
        self._free = ended
        return True

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


MEASURES = "measures"  # key of the `Measures` in `Done.extras`

EVERY = 0.01  # least seconds from one `Measures` of a worker to the next

_LOOKS = 0.25  # least seconds between two measurements of the wait for the GIL

_NAP = 5e-5
"""Seconds that a measurement of the GIL sleeps. In that time a waiting thread takes the GIL and
keeps it for the interpreter's switch interval. After a call of 10 us the caller would be back
before another thread takes it."""

_LONG, _PARTS = 1e-3, 64
"""Seconds from which a part of a task is a separate span, and the number of these that are kept."""

_SHORT = 1e-4
"""Seconds of a task below which its CPU time counts as its whole time: two system calls for its CPU
time, or another clock reading for its packing, would cost too much."""


@dataclass(frozen=True)
class Metering:
    """Specification of the meters of one stage's workers."""

    cpu_clock: Callable[[], float] | None
    """Clock of the CPU time of one worker, such as `time.process_time`. None if there is none,
    because other threads work for the worker's thread."""
    alone: bool = True
    """False if the worker's thread does other work between two tasks, which does not count."""
    gil: bool = False
    """True if the worker is one of several threads, so that it measures the wait for the GIL."""
    by_pass: bool = False
    """True if each epoch is measured alone: unreported measures of one do not count in the next."""
    slices: int = 0
    """Most slices of a trace that a worker keeps until it reports them; 0 if there is no trace."""
    stores: bool = False
    """True if the worker reports its use of object stores: it is a process, which has separate
    counts."""


class Measures(NamedTuple):
    """Measurements of a worker since its last report."""

    spans: tuple[tuple[float, float, float], ...]
    """Begin, end and seconds of work of: all short tasks before the last one, if there were any;
    each longer part of a shared task; and the last task."""
    busy: float  # total seconds of all tasks
    cpu: float | None  # CPU seconds
    wait_for_core: float | None
    """Seconds that the worker was runnable without a core; None if that is not known."""
    wait_for_gil: float | None
    """Seconds that a thread which had released the GIL waited for it, 0.1 ms if no other thread
    wants it; None if it was not measured."""
    packing: float
    """Fraction of the last task that was spent on packing its result; 0 if the tasks are too
    short."""
    reporting: float  # seconds that the previous report of a result with measures took
    retried: int  # number of retried calls of the user's functions
    slices: SliceReport | None = None  # activities of the worker with their times, for a trace
    others: tuple[Measures, ...] = ()
    """Measures of workers that only fetched samples of tasks which other workers answered."""
    collating: float = 0.0
    """Fraction of the last task that was spent in `collate_fn`; 0 if the tasks are too short."""
    idle: float = 0.0  # seconds that an event loop waited for events that coroutines await
    held: float = 0.0  # seconds that coroutines ran, so that the loop could not wait for events
    coroutines: int = 0  # number of coroutines that were begun
    stores: tuple[StoreUse, ...] = ()  # use of object stores by the worker's process
    tasks: int = 1  # number of tasks, including those that raised an error

    def moved(self, seconds: float) -> Measures:
        """Return these with all times so many seconds later."""
        slices = None if self.slices is None else self.slices.moved(seconds)
        return self._replace(
            spans=tuple((began + seconds, ended + seconds, n) for began, ended, n in self.spans),
            slices=slices,
            others=tuple(others.moved(seconds) for others in self.others),
        )

    def joined(self, others: deque[Measures]) -> Measures:
        """Return these with `others`, which are taken out of the deque."""
        taken = []
        try:
            while True:
                taken.append(others.popleft())
        except IndexError:  # another thread may take them, too
            return self._replace(others=tuple(taken))


class TaskParts:
    """Parts of tasks, as a fetcher sees them: its collation, and the turns of an event loop."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        # All the mutable state:
        self.looks = True  # tasks are long enough for `gathered`
        self.gathered = 0.0  # time at which the samples of the last task were ready to be collated
        self.idle = self.held = 0.0  # seconds
        self.coroutines = 0  # number of coroutines that were begun
        self._since = 0.0  # time at which the coroutines' turn began

    def turn(self) -> None:
        """Note that an event loop runs, and that the coroutines have their turn."""
        self._since = self._clock()

    def turned(self) -> None:
        """Note that the turn of the coroutines has ended."""
        self.held += self._clock() - self._since

    def select(self, select: Callable[[Any], Any], timeout: Any) -> Any:
        """Call `select`, by which an event loop waits."""
        began = self._clock()
        self.held += began - self._since
        try:
            return select(timeout)
        finally:
            self._since = self._clock()
            self.idle += self._since - began

    def pull(self, items: Iterator[Any]) -> Any:
        """Return the next of `items`; a coroutine's turn does not count meanwhile."""
        began = self._clock()
        try:
            return next(items)
        finally:
            self._since += self._clock() - began

    def take(self) -> tuple[float, float, int]:
        """Return seconds and number of coroutines, for `Measures`, and count from 0 again."""
        found = self.idle, self.held, self.coroutines
        self.idle, self.held, self.coroutines = 0.0, 0.0, 0
        return found


class Meter:
    """Adds up the measurements of a worker.

    The worker counts its `tasks`, and adds their seconds to `busy`. Once a task ends after `due`, it
    reports.
    """

    def __init__(self, metering: Metering, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._alone = clock, metering.alone
        self._cpu_clock, self._by_pass = metering.cpu_clock, metering.by_pass
        self._gil = metering.gil
        self.parts = TaskParts(clock)
        self.slices = Slices(metering.slices, alone=self._alone) if metering.slices else None
        # All the mutable state:
        self.busy, self.tasks = 0.0, 0
        self.due = self._reported = float("-inf")
        self.looks = True
        """True if `begin` is to be called before a task, and the clock is to be read before its
        result is packed."""
        self.reports = False  # True if `report` is to report the next event
        self._parts: deque[tuple[float, float, float]] = deque(maxlen=_PARTS)
        self._run_queue: RunQueue | None = None
        self._thread = 0  # thread of this run queue
        self._look = float("-inf")  # time of the next measurement of the GIL
        self._cpu = 0.0  # clock at the last report, or when the task began
        self._reporting = 0.0
        self._stores: dict[str, StoreUse] | None = None  # as in the last report
        if metering.stores:
            start_counting()
            self._stores = uses()

    def open(self) -> None:
        """Begin, on the thread of the worker."""
        if self._cpu_clock is not None and self._alone:
            self._cpu = self._cpu_clock()
            self._run_queue = RunQueue.here()

    def opened(self, began: float) -> None:
        """Note that the worker is ready for tasks, after it had begun to be then."""
        if self.slices is not None:
            self.slices.span("start", began, self._clock())

    def begin_pass(self) -> None:
        """Note that another pass begins, on the thread of the worker."""
        if not self._by_pass:
            return
        self.busy, self.tasks, self._reporting = 0.0, 0, 0.0
        self._parts.clear()
        self.parts.take()
        self._stores_used()
        self.due = self._reported = float("-inf")
        if self._cpu_clock is not None and self._alone:
            self._cpu = self._cpu_clock()
            if self._run_queue is not None:
                self._run_queue.since()

    def begin(self) -> None:
        """Note that a task begins."""
        self.parts.gathered = 0.0
        if self.busy < _SHORT * self.tasks:  # the last one was long for lack of a core
            self.looks = self.parts.looks = False
        if self._cpu_clock is None or self._alone:
            return
        self._cpu = self._cpu_clock()
        if self._thread != get_ident():  # a loader may be pulled by another thread each time
            self.close()
            self._thread, self._run_queue = get_ident(), RunQueue.here()
        elif self._run_queue is not None:
            self._run_queue.since()

    def part(self, began: float, ended: float, *, here: bool = True) -> None:
        """Note samples of a task that several workers share; it may be another that answers it.

        `here` is False if they were fetched on other threads than the worker's own.
        """
        self.busy += ended - began
        if self.slices is not None and here:
            self.slices.part(began, ended)
        if ended - began >= _LONG:
            self._parts.append((began, ended, ended - began))

    def measure(
        self, began: float, fetched: float, ended: float, retried: int, spent: float = 0.0
    ) -> Measures:
        """Return the measures since the last ones, after a task that began and ended then.

        Its samples took the seconds `spent` before, on other threads.
        """
        last, reported, busy = ended - began, self._reported, self.busy
        spans = [*self._parts, (began, ended, last)]
        before = busy - sum(seconds for _, _, seconds in spans)
        if before > 1e-9 and reported == float("-inf"):
            spans.insert(0, (began - before, began, before))
        elif before > 1e-9 and reported < began:
            # They were not due before, so they ended within `EVERY` seconds of the last report.
            spans.insert(
                0, (reported, max(reported + before, min(began, reported + EVERY)), before)
            )
        found = Measures(
            tuple(spans),
            busy,
            self._cpu_spent(busy, last),
            self._core_waited(busy, last),
            self._gil_waited(ended),
            (ended - fetched) / (last + spent) if self.looks and last > 0 else 0.0,
            self._reporting,
            retried,
            None if self.slices is None else self.slices.report(ended + EVERY),
            (),
            (fetched - self.parts.gathered) / (last + spent)
            if self.looks and self.parts.gathered and last > 0
            else 0.0,
            *self.parts.take(),
            self._stores_used(),
            self.tasks,
        )
        self._reported, self.due = ended, ended + EVERY
        self.looks = self.parts.looks = last >= _SHORT
        if self.slices is not None and last >= _LONG:
            self.due = float("-inf")  # so that the next task is measured soon
        self.busy, self.tasks, self._reporting = 0.0, 0, 0.0
        self._parts.clear()
        self.reports = True
        return found

    def measure_parts(self, now: float, retried: int) -> Measures:
        """Return the measures since the last ones, of parts of tasks that others answer."""
        looks, reports = self.looks, self.reports
        found = self.measure(now, now, now, retried)
        self.looks, self.reports = looks, reports
        return found

    def report(self, report: Callable[[Any], None], event: Any) -> None:
        """Report an event that carries measures; the time counts with the next ones."""
        self.reports = False
        began = self._clock()
        report(event)
        ended = self._clock()
        self._reporting = ended - began
        if ended - began >= _LONG:
            self.due = float("-inf")  # the report may be as long as the whole next task
        if self.slices is not None:
            self.slices.span("send", began, ended)

    def close(self) -> None:
        if self._run_queue is not None:
            self._run_queue.close()
            self._run_queue, self._thread = None, 0

    def _core_waited(self, busy: float, last: float) -> float | None:
        """Return the seconds without a core since the last measures."""
        queue = self._run_queue
        if queue is None or not (self._alone or (self.looks and last > 0)):
            return None
        waited = queue.since()
        return waited if self._alone else busy * min(1.0, waited / last)  # scaled as the CPU time

    def _gil_waited(self, now: float) -> float | None:
        """Return the seconds that a look at the GIL waited for it, if it was time for one."""
        if not self._gil or now < self._look:
            return None
        self._look = now + _LOOKS
        queue, began = self._run_queue, self._clock()
        sleep(_NAP)
        waited = self._clock() - began - _NAP
        # With all cores busy, a thread that wakes up waits for a core first.
        return max(0.0, waited if queue is None else waited - queue.since())

    def _stores_used(self) -> tuple[StoreUse, ...]:
        before = self._stores
        if before is None:
            return ()
        self._stores = uses()
        return uses_since(before)

    def _cpu_spent(self, busy: float, last: float) -> float | None:
        if self._cpu_clock is None:
            return None
        if self._alone:
            before, self._cpu = self._cpu, self._cpu_clock()
            return self._cpu - before
        spent = busy
        if self.looks and last > 0:  # the other tasks count as like this one
            spent *= min(1.0, (self._cpu_clock() - self._cpu) / last)
        return spent


class RunQueue:
    """Time that a thread of this process could have run and had no core, as Linux counts it."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(f"{system.PROC}/thread-self/schedstat", os.O_RDONLY)
        try:
            self._before = self._now()
        except BaseException:
            self.close()
            raise

    @classmethod
    def here(cls) -> RunQueue | None:
        """Return that of the calling thread; None where the kernel counts nothing."""
        try:
            return cls()
        except (OSError, ValueError, IndexError):
            return None

    def _now(self) -> float:
        return int(os.pread(self._descriptor, 128, 0).split()[1]) * 1e-9

    def since(self) -> float:
        """Return the seconds since the last call."""
        try:
            now = self._now()
        except ProcessLookupError:  # that thread has ended, and this one has its identity
            self.close()
            self._open()
            return 0.0
        before, self._before = self._before, now
        return now - before

    def close(self) -> None:
        os.close(self._descriptor)
