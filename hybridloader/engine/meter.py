"""Meter of one worker: where the time of its tasks goes. It exists only where somebody observes.

A worker adds up the seconds of its tasks, and tells what it has measured once in 10 ms at most: beside
a value, under `MEASURES` of `Done.extras`. What costs more than an addition is done only then, so a task
of microseconds costs three or four additions and comparisons more. The clock is one for all processes of
a machine.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any, NamedTuple

from hybridloader.engine.slices import Slices, Told

MEASURES = "measures"
"""Key of the `Measures` in `Done.extras`."""

EVERY = 0.01
"""Least seconds from one `Measures` of a worker to the next."""

_LOOKS = 0.25
"""Least seconds between two looks at the run queue, and at the GIL."""

_NAP = 5e-5
"""Seconds that a look at the GIL sleeps. Whoever waits for it takes it meanwhile, and keeps it for the
interpreter's switch interval; after a call that lasts 10 us the caller would be back before that."""

_LONG, _PARTS = 1e-3, 64
"""Seconds from which a part of a task is a span of its own, and how many of these are remembered."""

_SHORT = 1e-4
"""Seconds of a task below which it is not looked at closely: its CPU time is not worth two system calls,
nor its packing another look at the clock. It counts as CPU time."""


@dataclass(frozen=True)
class Metering:
    """Specification of the meters of one stage's workers."""

    cpu_clock: Callable[[], float] | None
    """Clock of the CPU time of one worker, such as `time.process_time`; None if there is none, because
    a thread has other threads working for it."""
    alone: bool = True
    """False if the thread of the worker has other work between two tasks, which does not count."""
    gil: bool = False
    """True if the worker is one of several threads, so that it looks at the GIL."""
    by_pass: bool = False
    """True if each pass is measured by itself: what was not told of one does not count in the next."""
    slices: int = 0
    """Slices of a trace that a worker keeps until it tells them; 0 if there is no trace."""


class Measures(NamedTuple):
    """Measurements of a worker since it told the last ones."""

    spans: tuple[tuple[float, float, float], ...]
    """Begin and end of the tasks before the last one, where there were any, of longer parts of shared
    tasks, and of the last task; and the seconds of these."""
    busy: float
    """Seconds of all tasks."""
    cpu: float | None
    """CPU seconds."""
    wait_for_core: float | None
    """Seconds that the worker could have run and had no core; None where it was not looked at."""
    wait_for_gil: float | None
    """Seconds that a thread which had let go of the GIL waited for it, 0.1 ms if nobody else wants it;
    None where that was not looked at."""
    packing: float
    """Share of the last task that went into packing its result; 0 if the tasks are too short."""
    reporting: float
    """Seconds that reporting the last result with measures took."""
    retried: int
    """Calls of the user's functions that were made again."""
    slices: Told | None = None
    """What the worker did and when, for a trace."""
    others: tuple[Measures, ...] = ()
    """Measures of workers that only fetched samples of tasks which others answered."""

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


class Meter:
    """Adds up what a worker measures.

    The worker adds the seconds of each task to `busy`. Once a task ends behind `due`, it tells.
    """

    def __init__(self, metering: Metering, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._alone = clock, metering.alone
        self._cpu_clock, self._by_pass = metering.cpu_clock, metering.by_pass
        self._gil = metering.gil
        self._run_queue: RunQueue | None = None
        self.slices = Slices(metering.slices, alone=self._alone) if metering.slices else None
        # All the mutable state:
        self.busy = 0.0
        self.due = self._told = float("-inf")
        self.looks = True
        """True if `begin` is to be called before a task, and the time is wanted at which its result is
        made, and yet to be packed."""
        self.reports = False
        """True if the report of the next event is to be made by `report`."""
        self._parts: deque[tuple[float, float, float]] = deque(maxlen=_PARTS)
        self._look = float("-inf")  # time of the next look at the run queue
        self._cpu = 0.0  # clock when it told, or when the task began
        self._reporting = 0.0

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
        self.busy = self._reporting = 0.0
        self._parts.clear()
        self.due = float("-inf")
        if self._cpu_clock is not None and self._alone:
            self._cpu = self._cpu_clock()

    def begin(self) -> None:
        """Note that a task begins."""
        if self._cpu_clock is not None and not self._alone:
            self._cpu = self._cpu_clock()

    def part(self, began: float, ended: float, *, here: bool = True) -> None:
        """Note samples of a task that several workers share; it may be another that answers it.

        `here` is False if they were fetched on other threads than the worker's own.
        """
        self.busy += ended - began
        if self.slices is not None and here:
            self.slices.part(began, ended)
        if ended - began >= _LONG:
            self._parts.append((began, ended, ended - began))

    def tell(
        self, began: float, fetched: float, ended: float, retried: int, spent: float = 0.0
    ) -> Measures:
        """Return the measures since the last ones, after a task that began and ended then.

        Its samples took the seconds `spent` before, on other threads.
        """
        last, told, busy = ended - began, self._told, self.busy
        spans = [*self._parts, (began, ended, last)]
        before = busy - sum(seconds for _, _, seconds in spans)
        if before > 1e-9 and told < began:
            # They had not to be told yet, so they ended within that time.
            spans.insert(0, (told, max(told + before, min(began, told + EVERY)), before))
        found = Measures(
            tuple(spans),
            busy,
            self._cpu_spent(busy, last),
            *self._waits(ended),
            (ended - fetched) / (last + spent) if self.looks and last > 0 else 0.0,
            self._reporting,
            retried,
            None if self.slices is None else self.slices.tell(ended + EVERY),
        )
        self._told, self.due = ended, ended + EVERY
        self.looks = last >= _SHORT
        if self.slices is not None and last >= _LONG:
            self.due = float("-inf")  # what the next one does is to be known soon
        self.busy = self._reporting = 0.0
        self._parts.clear()
        self.reports = True
        return found

    def tell_parts(self, now: float, retried: int) -> Measures:
        """Return the measures since the last ones, of parts of tasks that others answer."""
        looks, reports = self.looks, self.reports
        found = self.tell(now, now, now, retried)
        self.looks, self.reports = looks, reports
        return found

    def report(self, report: Callable[[Any], None], event: Any) -> None:
        """Report an event that carries measures; the time counts with the next ones."""
        self.reports = False
        began = self._clock()
        report(event)
        ended = self._clock()
        self._reporting = ended - began
        if self.slices is not None:
            self.slices.span("send", began, ended)

    def close(self) -> None:
        if self._run_queue is not None:
            self._run_queue.close()
            self._run_queue = None

    def _waits(self, now: float) -> tuple[float | None, float | None]:
        """Return the seconds without a core since the last look, and those of a wait for the GIL."""
        if now < self._look:
            return None, None
        self._look = now + _LOOKS
        queue = self._run_queue
        for_core = None if queue is None else queue.since()
        if not self._gil:
            return for_core, None
        began = self._clock()
        sleep(_NAP)
        waited = self._clock() - began - _NAP
        if queue is not None and for_core is not None:
            # Who wakes up waits for a core first, where others use them all.
            woken = queue.since()
            waited, for_core = waited - woken, for_core + woken
        return for_core, max(0.0, waited)

    def _cpu_spent(self, busy: float, last: float) -> float | None:
        if self._cpu_clock is None:
            return None
        if self._alone:
            before, self._cpu = self._cpu, self._cpu_clock()
            return self._cpu - before
        spent = busy
        if self.looks and last > 0:  # the other tasks are taken to be like this one
            spent *= min(1.0, (self._cpu_clock() - self._cpu) / last)
        return spent


class RunQueue:
    """Time that a thread of this process could have run and had no core, as Linux counts it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before = 0.0
        self.since()

    @classmethod
    def here(cls) -> RunQueue | None:
        """Return that of the calling thread; None where the kernel counts nothing."""
        if sys.platform != "linux":
            return None
        try:
            descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return cls(descriptor)
        except (OSError, ValueError, IndexError):
            os.close(descriptor)
            return None

    def since(self) -> float:
        """Return the seconds since the last call."""
        now = int(os.pread(self._descriptor, 128, 0).split()[1]) * 1e-9
        before, self._before = self._before, now
        return now - before

    def close(self) -> None:
        os.close(self._descriptor)
