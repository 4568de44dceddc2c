"""Worker that is driven by calls: for transports that call a method far away, and return its value.

A worker's loop asks for messages and reports events, as suits a stream. Here it runs in one call that
lasts, on a thread of its own, and each message is another call, which returns the events that came of
it. So the last word of a worker is the return of the long call, whatever way it ends.
"""

from __future__ import annotations

import os
import pickle
import platform
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pickle import PickleBuffer
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from hybridloader.engine.contract import WorkerHandle
from hybridloader.engine.far_clock import FarClock
from hybridloader.engine.messages import Done, Event, Exited, Message, Stop, Task, WorkerSpec
from hybridloader.engine.serving import PackedSpec, dumps, loads, own, process_worker, serve
from hybridloader.engine.worker import Worker
from hybridloader.memory.slots import PrivateSlots

Parts = list[Any]
"""Pickle of an object, then the large buffers left out of it, as `bytes` and `PickleBuffer`."""

_ENDED = "the loop has ended"


class _Here(threading.local):
    """Calls that a thread makes, and whether it is told of their ends."""

    making = 0
    """Calls that it makes now."""
    is_told = False
    """True for a thread of the transport, which is told of ends: to wait for one could last for ever."""


_here = _Here()


def _when_done(call: Future[Any], then: Callable[[Future[Any]], None]) -> None:
    """Call `then` as a call ends, on the thread that is told of it; here and now if it has ended."""
    _here.making += 1
    try:
        call.add_done_callback(partial(_tell, then))
    finally:
        _here.making -= 1


def _tell(then: Callable[[Future[Any]], None], call: Future[Any]) -> None:
    if not _here.making and threading.get_ident() != threading.main_thread().ident:
        _here.is_told = True  # for good: a finalizer may come between two ends, too
    then(call)


def parts_of(thing: Message | Event, *, other_main: bool = False) -> Parts:
    """Pickle a message or an event as `dumps` does, with its large buffers apart."""
    buffers: list[Any] = []
    return [dumps(thing, buffers, other_main=other_main), *map(PickleBuffer, buffers)]


def work_of(spec: WorkerSpec) -> Parts:
    """Pickle the work of workers, as `CalledWorker` takes it. Raises `ShippingError`."""
    buffers: list[PickleBuffer] = []
    return [pickle.dumps(PackedSpec(spec), 5, buffer_callback=buffers.append), *buffers]


class CalledWorker:
    """Worker in a process of its own, each method of which another process may call.

    `run` is called once. `step` is called for one message after the other, the others at any time; so
    three threads must be there for calls. Large batches are collated into recycled memory, so what a
    call of `step` returns must have been copied before the next one is made.

    Parameters
    ----------
    number
        Number of the worker.
    work
        By `work_of`.
    memory
        Bytes that the recycled memory may take.
    """

    def __init__(self, number: int, work: Parts, memory: int) -> None:
        self._number = number
        self._work: PackedSpec | None = loads(work[0], buffers=work[1:])
        self._slots = PrivateSlots(memory)
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._thread = 0
        self._worker: Worker | None = None
        self._exit = b""

    def where(self) -> tuple[int, str]:
        """Return the process id and the name of the machine."""
        return os.getpid(), platform.node()

    def clock(self) -> float:
        """Return the time here, in seconds of `time.perf_counter`."""
        return perf_counter()

    def run(self) -> bytes:
        """Run the worker until it has been told to stop; return its `Exited`, by `dumps`."""
        try:
            self._thread = threading.get_ident()
            work, self._work = self._work, None
            assert work is not None, "it runs once"
            self._worker = process_worker(self._number, work, slots=self._slots)
            del work
            serve(self._worker, self._get, self._report)
            return self._exit
        finally:
            self._outbox.put(_ENDED)

    def step(self, message: Parts | None, forwarded: list[Parts] | None = None) -> list[Parts]:
        """Hand a message over; return the events up to where the loop asks for another.

        Parameters
        ----------
        message
            A message, by `parts_of`; None for the events up to the first message.
        forwarded
            Return of the call that had the result which is this task, if it was sent on unopened.
        """
        if message is not None:
            found = loads(message[0], buffers=[*map(own, message[1:])])
            if forwarded is not None:
                events = (loads(head, buffers=buffers) for head, *buffers in forwarded)
                (value,) = (event.payload.open() for event in events if isinstance(event, Done))
                found = Task(found.seq, value)
                del value
            self._inbox.put(found)
            del found
        made: list[Parts] = []
        while (event := self._outbox.get()) is not None:
            if event is _ENDED:
                self._outbox.put(_ENDED)  # for the next call
                break
            made.append(event)
        return made

    def leave(self) -> None:
        """Leave out the rest of a batch, and end."""
        if self._worker is not None:
            self._worker.context.cancelled = True
        self._inbox.put(Stop())

    def stack(self) -> str:
        """Return the stack of the worker's thread."""
        frame = sys._current_frames().get(self._thread)
        return "".join(["Its stack (most recent call last):\n", *traceback.format_stack(frame)])

    def _get(self) -> Any:
        self._outbox.put(None)  # done with the message before
        return self._inbox.get()

    def _report(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._exit = dumps(event)
        else:
            self._outbox.put(parts_of(event))


class CallingHandle(WorkerHandle):
    """Handle of a `CalledWorker`: makes its calls, and reports what they return in their order.

    Calls may end in any order, on any thread. A thread that tells of an end, the main one apart, is
    taken for the transport's own, and can't `join`. What the worker has sent before it died is reported
    before its `Exited`. A subclass writes `call` and `end`, and calls `begin`.

    Parameters
    ----------
    number
        Number of the worker.
    report
        `Crew.report`.
    """

    _life: Future[Any]  # of `run`: it ends as the worker ends

    def __init__(self, number: int, report: Callable[[Event], None]) -> None:
        self._number, self._report = number, report
        # All the mutable state:
        self.placed: tuple[int, str] | None = None  # process id and machine, once it runs
        self.ready = False
        self._clock: FarClock | None = None  # of a worker on another machine
        self._steps: deque[Future[Any]] = deque()  # in the order in which they were made
        self._over = threading.Event()
        self._lock = threading.RLock()  # a finalizer may come here on a thread that has it
        self._cause: str | None = None
        self._killed = False  # it may answer meanwhile what it was sent before
        self._doomed = ""  # reason why it is killed

    # -- to be written ---------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the worker; calls of `step` are made in order, the others beside them."""
        raise NotImplementedError

    def started(self) -> None:  # most hold nothing for it
        """Let go of what the worker needed to start: it has."""

    def end(self) -> None:
        """Kill the worker, if it is there; the call of `run` ends with an error."""
        raise NotImplementedError

    def received(self, done: Done, step: Future[Any]) -> Done:
        """Return what to report of a result that a call has brought."""
        return done

    def died(self, error: Exception) -> Exited:
        """Describe the end of a worker whose `run` has ended with an error."""
        return Exited(self._number, f"is gone: {error}")

    def over(self) -> None:  # most hold nothing else
        """Let go of the worker, which has ended."""

    # -- for the crew ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the worker."""
        _when_done(self.call("where"), self._place)
        self._life = self.call("run")
        self.step(None)
        _when_done(self._life, self._deliver)

    def step(self, *arguments: Any) -> None:
        """Call `step`; nothing if the worker is gone, or was killed."""
        if not self.is_alive() or self._killed:
            return
        try:
            step = self.call("step", *arguments)
        except Exception as error:  # it may have ended meanwhile
            self._give_up(f"could not be called: {error!r}")
            return
        self._steps.append(step)
        _when_done(step, self._deliver)

    def leave(self) -> None:
        """Have the worker leave out the rest of its batch, and end."""
        with suppress(Exception):  # it is gone
            if self.is_alive():
                self.call("leave")

    def stack(self, timeout: float = 1.0) -> str:
        """Return the worker's stack; one in native code that holds the GIL can't tell it."""
        try:
            return str(self.call("stack").result(timeout))
        except Exception as error:
            return f"Its stack could not be had: {error!r}"

    def terminate(self) -> None:
        self._killed = True
        if _here.is_told:  # to end a worker may take an answer, which would come here
            threading.Thread(target=self._end, daemon=True).start()
        else:
            self._end()

    def lost(self, cause: str) -> None:
        """Report the end of a worker of which nothing will be heard, as calls have ended for good."""
        with self._lock:
            self._steps.clear()
            self._report_end(Exited(self._number, cause))

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else int(self._cause is not None)

    def is_alive(self) -> bool:
        return not self._over.is_set()

    def join(self, timeout: float | None = None) -> None:
        if not self.is_alive():
            return
        if _here.is_told:
            raise RuntimeError("the thread that is told of a worker's end can't wait for it")
        self._over.wait(timeout)

    # -- the parts -------------------------------------------------------------------------------

    def _place(self, told: Future[Any]) -> None:
        with suppress(Exception):  # it has died
            self.placed = told.result()
            if self.placed[1] != platform.node():
                self._clock = FarClock(partial(self.call, "clock"))
                self._clock.look()

    def _deliver(self, _: Any) -> None:
        with self._lock:
            while self._steps and self._steps[0].done():
                self._take(self._steps.popleft())
            if self._life.done() and not self._steps:
                self._report_end(self._exit())

    def _report_end(self, exited: Exited) -> None:
        if not self._over.is_set():
            self._cause = exited.cause
            self._report(exited)
            self._over.set()
            self.over()

    def _end(self) -> None:
        with suppress(Exception):  # it is gone already
            self.end()

    def _give_up(self, reason: str) -> None:
        """Kill a worker one of whose tasks would never have an answer."""
        if not self._over.is_set() and not self._life.done() and not self._doomed:
            self._doomed = reason
            threading.Thread(target=self.terminate, daemon=True).start()

    def _take(self, step: Future[Any]) -> None:
        try:
            for head, *buffers in step.result():
                event = loads(head, buffers=buffers)
                if isinstance(event, Done):
                    if self._clock is not None and event.extras is not None:
                        self._clock.translate(event.extras)
                    event = self.received(event, step)
                if not self.ready:
                    self.ready = True
                    self.started()
                self._report(event)
        except Exception as error:
            self._give_up(f"gave no answer: {error!r}")

    def _exit(self) -> Exited:
        try:
            exited: Exited = loads(self._life.result())
        except Exception as error:
            exited = self.died(error)
            if self._doomed:
                exited = replace(exited, cause=f"{self._doomed}; it was killed, and {exited.cause}")
        return exited
