"""Threads inside one worker that share the items of one call, such as the samples of a batch.

In `map` the calling thread does its part of the work, so a `Fanout` of n threads starts n - 1, when it
is first used. `begin` leaves all of it to n. They hold neither the `Fanout` nor, between two calls, any
object of the user, and they end when the `Fanout` is collected. They are daemons, unlike those of
`concurrent.futures`, which Python joins at exit, so an item that is stuck would hold up the exit.

An item finds the thread-local state of the calling thread: `get_worker_info`, the slots that collation
writes into, context variables, torch's modes (`Modes`) and its number of native threads. With
``seeding="shared"`` random generators are shared, and the number that an item draws depends on timing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any

from hybridloader._support.text import warn
from hybridloader._support.torch_env import (
    TakenModes,
    modes_here,
    one_thread_on_this_thread,
    renew_autograd_engine,
)
from hybridloader.engine.messages import Abandoned, TaskContext
from hybridloader.engine.worker import SharedItems, get_worker_info, set_worker_info
from hybridloader.memory.slots import on_this_thread, set_slots

_SLICE = 0.05
"""Seconds between two checks of the context while the caller waits for helpers; no worker is woken."""

_PATIENCE = 1.5
"""Seconds that a cancelled call waits for running items. Shorter than the 1.9 s that a crew of threads
waits for its workers, longer than the second after which a worker process is terminated: an item ends
undisturbed where it would with one thread, and a stuck item delays no exit."""


class Fanout:
    """Calls a function for each of several items on `threads` threads, the caller's among them.

    Several threads may use it at once, and the items themselves may. In a forked process it starts new
    threads.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._start_afresh()

    def map(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        context: TaskContext | None = None,  # checked after every item
        what: str = "item",  # name of an item, for the note that its exception gets
    ) -> list[Any]:
        """``[function(item) for item in items]``.

        Items are begun in their order. After an error no other item is begun, and running ones are
        waited for; so the error raised here is the one that a loop would have raised. Raises
        `Abandoned` if the context was cancelled, when running items have ended, or after `_PATIENCE`.
        """
        job = _Job(function, items, context, what)
        helpers = min(self.threads, job.count) - 1
        try:
            if helpers > 0:
                self._call(helpers, job)
            job.take_part(helping=False)
            job.wait()
            return job.result()
        finally:
            job.forget()

    def begin(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        context: TaskContext | None,
        what: str,
        ring: Callable[[], None],  # called once all items have ended, by the thread of the last one
    ) -> _Job:
        """Have `threads` helpers work as `map` does, after the jobs that were begun before; don't
        wait."""
        job = _Job(function, items, context, what, ring)
        # Start all threads at the first call: those that it uses may be busy at the next one.
        self._call(min(self.threads, job.count), job, start=self.threads)
        if not self._started:
            job.take_part(helping=True)
        return job

    def _start_afresh(self) -> None:
        renew_autograd_engine()
        self._owner = os.getpid()
        self._starting = threading.Lock()
        # All the mutable state: number of threads that run, largest number, and their jobs.
        self._started, self._most = 0, self.threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None ends all threads
        self._finalizer = weakref.finalize(self, self._jobs.put, None)
        self._finalizer.atexit = False

    def _call(self, helpers: int, job: _Job, *, start: int = 0) -> None:
        """Have `helpers` threads work at `job` too, of at least `start`."""
        if self._owner != os.getpid():
            self._finalizer.detach()  # the fork may have copied its queue in any state
            self._start_afresh()
        job.surroundings = _Surroundings()
        start = max(start, helpers)
        if self._started < min(start, self._most):
            with self._starting:
                self._start(start, job.surroundings.alone)
        for _ in range(min(helpers, self._started)):
            self._jobs.put(job)

    def _start(self, threads: int, alone: bool) -> None:
        while self._started < min(threads, self._most):
            name = f"hybridloader-fanout-{self._started + 1}"
            thread = threading.Thread(
                target=_help, args=(self._jobs, alone), name=name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads is reached, or Python is ending
                self._most = self._started
                warn(
                    f"a worker could start only {self._started + 1} of its {self.threads} threads "
                    f"({error}), so these do the work of all; set fewer threads, or raise the "
                    "limit of threads of this process",
                    "few-threads",
                )
                return
            self._started += 1


def helpers_of(context: TaskContext, threads: int) -> Fanout:
    """Return the `Fanout` of a worker.

    The worker keeps its threads from one epoch to the next, so a dataset finds again the files and
    connections that it keeps in a `threading.local`.
    """
    if context.helpers is None:
        context.helpers = Fanout(threads)
    helpers: Fanout = context.helpers
    return helpers


class _Job(SharedItems):
    """Items of one call; threads hold this and never the `Fanout`."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        context: TaskContext | None,
        what: str,
        ring: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(items, what)
        self.function: Callable[[Any], Any] | None = function
        self.count = len(self.items)
        self.context = context
        # All the other mutable state:
        self.surroundings: _Surroundings | None = None
        self.ended = not self.count
        self.bell: SimpleQueue[None] = SimpleQueue()  # rung when all have ended
        self.ring = ring  # called when all have ended

    def take_part(self, *, helping: bool) -> None:
        """Work at items until none is left. The caller's interrupts come through at once."""
        function = self.function
        if function is None:
            return
        if self.work(function, self.context, BaseException if helping else Exception):
            self._end()

    def stop(self) -> bool:
        last = super().stop()
        if last:  # no thread has begun an item of it, so none would end it
            self._end()
        return last

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.bell.put(None)
        ring = self.ring
        if ring is not None:
            ring()

    def result(self) -> list[Any]:
        if self.context is not None and self.context.cancelled:
            self.forget()
            raise Abandoned
        return super().result()

    def wait_here(self) -> bool:
        return False

    def leave(self) -> bool:
        try:
            self.wait(leaving=True)
        except Abandoned:
            pass
        ended = self.ended
        self.forget()
        return ended

    def wait(self, *, leaving: bool = False) -> None:
        """Wait until the items that helpers have begun are done."""
        context, deadline = self.context, None
        while not self.ended:
            try:
                self.bell.get(timeout=_SLICE)  # in slices, so that Ctrl-C works on Windows
            except Empty:
                pass
            if leaving or (context is not None and context.cancelled):
                self.stop()
                if deadline is None:
                    deadline = time.monotonic() + _PATIENCE
                elif time.monotonic() > deadline:
                    raise Abandoned

    def forget(self) -> None:
        super().forget()
        self.function = self.surroundings = self.context = self.ring = None


def _help(jobs: SimpleQueue[_Job | None], alone: bool) -> None:
    """Work at jobs, as a thread of a `Fanout`, until there is a None."""
    if alone:
        one_thread_on_this_thread()
    taken = TakenModes()
    while (job := jobs.get()) is not None:
        surroundings = job.surroundings
        if surroundings is not None and job.todo:
            taken.take(surroundings.modes)
            surroundings.around(job)
        del job, surroundings
    jobs.put(None)  # for the next thread


class _Surroundings:
    """Thread-local state of the caller, which its helpers take over for one job."""

    def __init__(self) -> None:
        self._slots = on_this_thread.slots
        self._info = get_worker_info()
        self._context = copy_context()
        self.modes = modes_here()
        torch: Any = sys.modules.get("torch")
        self.alone = torch is not None and torch.get_num_threads() == 1

    def around(self, job: _Job) -> None:
        # In a worker process, every thread knows the worker; in a thread worker, only its thread.
        strange = self._info is not None and get_worker_info() is None
        if strange:
            set_worker_info(self._info)
        set_slots(self._slots)
        try:
            self._context.copy().run(job.take_part, helping=True)
        finally:
            set_slots(None)
            if strange:
                set_worker_info(None)
