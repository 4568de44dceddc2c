"""Workers that are driven by calls: for transports that call methods, and return values.

A worker's loop asks for messages and reports events, as suits a stream. Here it runs in one long call,
on a thread of the far process (`CalledWorker`), and that call's return is the worker's last word,
whatever way it ends. Each message is another call of the near side (`CallingHandle`), which returns the
events that came of it; tasks that are short beside a call go in one together.
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
from typing import Any, NamedTuple

from hybridloader._support.user_objects import repr_of
from hybridloader.engine.contract import WorkerHandle
from hybridloader.engine.messages import Done, Event, Exited, Message, Stop, Task, WorkerSpec
from hybridloader.engine.meter import MEASURES
from hybridloader.engine.serving import PackedSpec, dumps, loads, own, process_worker, serve
from hybridloader.engine.worker import Worker
from hybridloader.memory.slots import PrivateSlots

BUNDLE_SECONDS = 2e-3
"""Total seconds of the tasks in one call; the first result of a call is delayed by about as much.

A call of Ray's costs 0.5 to 0.8 ms. With tasks of 0.3 ms and a prefetch of 32, a batch took
0.85 ms in calls of one, 0.87 in bundles of 1 ms, 0.37 of 2 ms, and 0.34 of 4 ms (two cores, two
workers).
"""

BUNDLE_BYTES = 64 << 10
"""Total bytes of the messages of one call, or of their results. Ray sends up to 100 KB with the
call, or with its reply; more is sent through its store, which takes longer."""

BESIDE = 3e-5
"""Seconds that a worker spends on a task in addition to the work: to open it and to pack the
result."""

CALLS_IN_FLIGHT = 2
"""Calls in flight to one worker from which further tasks are queued: one that the worker does, and
one that keeps it busy until the next call."""

RECENT = 8  # number of recent results in a worker's running mean, about


Parts = list[Any]
"""Pickle of an object, then the large buffers outside of it, as `bytes` and `PickleBuffer`."""

SentMessage = tuple[Parts, tuple[int, int] | None]
"""Message. If its task is a forwarded result: the number of the return that contains the result,
and the number of the event in that return."""


class Place(NamedTuple):
    """Place of a result that is sent on unopened."""

    returned: Any
    """Return value of the call that contains the result, in the transport's form; hashable."""
    at: int
    """Number of the event in that return value."""


_Packed = tuple[Parts, Place | None]


class _CallsHere(threading.local):
    """Calls that a thread makes, and whether the transport reports their ends on it."""

    making = 0
    """Calls that this thread is making now."""
    reports_ends = False
    """True for a thread on which the transport reports the ends of calls. It must not wait for an
    end: a wait could last forever."""


_here = _CallsHere()


def _when_done(call: Future[Any], then: Callable[[Future[Any]], None]) -> None:
    """Call `then` when a call ends, on the thread that reports its end; at once if it has ended."""
    _here.making += 1
    try:
        call.add_done_callback(partial(_on_end, then))
    finally:
        _here.making -= 1


def _on_end(then: Callable[[Future[Any]], None], call: Future[Any]) -> None:
    if not _here.making and threading.get_ident() != threading.main_thread().ident:
        _here.reports_ends = True  # never reset: a finalizer may also run between two ends
    then(call)


class CallingHandle(WorkerHandle):
    """Handle of a `CalledWorker`: makes its calls, and reports the returned events in order.

    A call costs the same for many messages as for one. So while `CALLS_IN_FLIGHT` calls are in flight,
    tasks wait until one of them returns or a bundle of tasks is full, and are sent in one call. A long
    task fills a bundle by itself, so it is sent at once.

    Calls may end in any order, on any thread. A thread that reports an end, the main one excepted, is
    taken for the transport's own, and can't `join`. Events that the worker sent before it died are
    reported before its `Exited`. A subclass writes `call` and `end`, and calls `begin`.

    Parameters
    ----------
    number
        Number of the worker.
    report
        `Crew.report`.
    alone
        True if each task needs its own call, for instance because its time is limited.
    """

    _life: Future[Any]  # call of `run`; it ends when the worker ends

    def __init__(self, number: int, report: Callable[[Event], None], alone: bool = False) -> None:
        self._number, self._report, self._alone = number, report, alone
        # All the mutable state:
        self.placed: tuple[int, str] | None = None  # process id and machine; None before it runs
        self.ready = False
        # In call order, each with its number of messages.
        self._steps: deque[tuple[Future[Any], int]] = deque()
        self._queue: list[_Packed] = []  # messages that wait until a call returns
        self._filled = 0.0  # filled fraction of the bundle in `_queue`
        self._share = 1.0  # mean fraction of a bundle per recent task
        self._failed = 0  # number of messages in the first call that failed
        self._over = threading.Event()
        self._lock = threading.RLock()  # a finalizer may call it on a thread that already holds it
        self._cause: str | None = None
        self._killed = False  # tasks that were sent earlier may still be answered
        self._doomed = ""  # reason of the kill

    # -- to be written ---------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the worker; calls of `step` are made in order, the others beside them.

        Small calls of `step` are made on any thread, such as the one that reports an end.
        """
        raise NotImplementedError

    def started(self) -> None:  # most keep no such objects
        """Release the objects that the worker needed to start; it has started."""

    def end(self) -> None:
        """Kill the worker, if it is there; the call of `run` ends with an error."""
        raise NotImplementedError

    def received(self, done: Done, step: Future[Any], at: int) -> Done:
        """Return what to report of a result that a call has brought as event number `at`."""
        return done

    def died(self, error: Exception) -> Exited:
        """Describe the end of a worker whose `run` has ended with an error."""
        return Exited(self._number, f"is gone: {error}")

    def over(self) -> None:  # most keep nothing else
        """Let go of the worker, which has ended."""

    # -- for the crew ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the worker."""
        _when_done(self.call("where"), self._place)
        self._life = self.call("run")
        self._step([])
        _when_done(self._life, self._deliver)

    def send(self, message: Message, place: Place | None = None) -> None:
        """Send a message, in order, now or soon; nothing if the worker is gone, or was killed.

        The index of a task that has a `place` is the value there. Raises `ResultPicklingError`.
        """
        nbytes = 0
        if place is not None:
            assert isinstance(message, Task)
            message, nbytes = message._replace(index=None), message.index.nbytes
        parts = parts_of(message, other_main=True)
        part = (nbytes + len(parts[0])) / BUNDLE_BYTES
        waits = isinstance(message, Task) and not self._alone and part < 1
        if not waits or len(parts) > 1:  # its buffers are views of memory that may change later
            with self._lock:
                self._flush()
            # Not under the lock: a thread that frees room in the transport's store may need the
            # lock.
            self._step([(parts, place)])
            return
        with self._lock:
            if self._filled + part > 1:
                self._flush()
            self._queue.append((parts, place))
            self._filled += max(part, self._share)
            if self._filled >= 1 or len(self._steps) < CALLS_IN_FLIGHT:
                self._flush()

    def leave(self) -> None:
        """Make the worker end without the rest of its batch and its waiting tasks."""
        with self._lock:
            self._queue.clear()
        with suppress(Exception):  # it has ended
            if self.is_alive():
                self.call("leave")

    def stack(self, timeout: float = 1.0) -> str:
        """Return the worker's stack; a worker in native code that holds the GIL can't return it."""
        try:
            return str(self.call("stack").result(timeout))
        except Exception as error:
            return f"Its stack could not be read: {error!r}"

    def terminate(self) -> None:
        self._killed = True
        if _here.reports_ends:  # `end` may wait for an answer, which this thread would report
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
        if _here.reports_ends:
            raise RuntimeError(
                "the thread on which ends are reported can't join a worker; join it on another thread"
            )
        self._over.wait(timeout)

    # -- the parts -------------------------------------------------------------------------------

    def _place(self, where: Future[Any]) -> None:
        with suppress(Exception):  # it has died
            self.placed = where.result()

    def _flush(self) -> None:
        queue, self._queue, self._filled = self._queue, [], 0.0
        if queue:
            self._step(queue)

    def _step(self, messages: list[_Packed]) -> None:
        if self._killed or self._doomed or not self.is_alive():
            return
        returns: dict[Any, int] = {}
        sent: list[SentMessage] = []
        for parts, place in messages:
            which = None
            if place is not None:
                which = returns.setdefault(place.returned, len(returns)), place.at
            sent.append((parts, which))
        try:
            step = self.call("step", sent, *returns)
        except Exception as error:  # it may have ended in the meantime
            self._give_up(f"could not be called: {error!r}")
            return
        self._steps.append((step, len(messages)))
        _when_done(step, self._deliver)

    def _deliver(self, _: Any) -> None:
        with self._lock:
            while self._steps and self._steps[0][0].done():
                self._take(*self._steps.popleft())
            if not self._life.done():
                if len(self._steps) < CALLS_IN_FLIGHT:
                    self._flush()
            elif not self._steps:
                self._report_end(self._exit())

    def _report_end(self, exited: Exited) -> None:
        if not self._over.is_set():
            self._cause = exited.cause
            self._report(exited)
            self._over.set()
            self._queue.clear()
            self.over()

    def _end(self) -> None:
        with suppress(Exception):  # it has ended already
            self.end()

    def _give_up(self, reason: str) -> None:
        """Kill a worker one of whose tasks would never have an answer."""
        if not self._over.is_set() and not self._life.done() and not self._doomed:
            self._doomed = reason
            threading.Thread(target=self.terminate, daemon=True).start()

    def _take(self, step: Future[Any], messages: int) -> None:
        try:
            events = [loads(head, buffers=buffers) for head, *buffers in step.result()]
            extras_of = [event.extras or {} for event in events if isinstance(event, Done)]
            measured = [extras for extras in extras_of if MEASURES in extras]
            is_near = self.placed is not None and self.placed[1] == platform.node()
            if measured and not is_near:  # as if the last one had come at once
                later = perf_counter() - measured[-1][MEASURES].spans[-1][1]
                for extras in measured:
                    extras[MEASURES] = extras[MEASURES].moved(later)
            for at, event in enumerate(events):
                if isinstance(event, Done):
                    part = event.payload.nbytes / BUNDLE_BYTES
                    part = max(part, (event.seconds + BESIDE) / BUNDLE_SECONDS)
                    self._share += (part - self._share) / RECENT
                    event = self.received(event, step, at)
                if not self.ready:
                    self.ready = True
                    self.started()
                self._report(event)
        except Exception as error:
            self._failed = self._failed or messages
            self._give_up(f"gave no answer: {repr_of(error)}")

    def _exit(self) -> Exited:
        try:
            exited: Exited = loads(self._life.result())
        except Exception as error:
            exited = self.died(error)
            if self._failed > 1 and exited.at is None:
                # Any of its tasks may have killed the worker. Each is sent again in its own call,
                # as a new worker's task durations are unknown; so the next death identifies the
                # task.
                exited = replace(exited, at=-1)
            if self._doomed:
                exited = replace(exited, cause=f"{self._doomed}; it was killed, and {exited.cause}")
        return exited


# -- the far side

_ENDED = "the loop has ended"


def parts_of(thing: Message | Event, *, other_main: bool = False) -> Parts:
    """Pickle a message or an event as `dumps` does, with its large buffers apart."""
    buffers: list[Any] = []
    return [dumps(thing, buffers, other_main=other_main), *map(PickleBuffer, buffers)]


def work_of(spec: WorkerSpec) -> Parts:
    """Pickle the work of workers, as `CalledWorker` takes it. Raises `WorkerPicklingError`."""
    buffers: list[PickleBuffer] = []
    return [pickle.dumps(PackedSpec(spec), 5, buffer_callback=buffers.append), *buffers]


class CalledWorker:
    """Worker in a process, each method of which another process may call.

    `run` is called once, `step` for messages in their order, the others at any time; so three threads
    must be there for calls. Large batches are collated into recycled memory, so the value that a call of
    `step` returns must have been copied before the next one is made.

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

    def run(self) -> bytes:
        """Run the worker until it gets a `Stop`; return its `Exited`, by `dumps`."""
        try:
            self._thread = threading.get_ident()
            work, self._work = self._work, None
            assert work is not None, "run() is called once"
            self._worker = process_worker(self._number, work, slots=self._slots)
            del work
            serve(self._worker, self._get, self._report)
            return self._exit
        finally:
            self._outbox.put(_ENDED)

    def step(self, sent: list[SentMessage], *returns: list[Parts]) -> list[Parts]:
        """Hand messages over, one after the other; return the events up to where the loop asks for more.

        Parameters
        ----------
        sent
            Messages, by `parts_of`; none for the events up to the first message.
        returns
            Return values of the calls whose results are tasks here.
        """
        made = [] if sent else self._events()
        for left, (parts, place) in zip(reversed(range(len(sent))), sent, strict=True):
            self._inbox.put(_opened(parts, place, returns))
            events = self._events()
            # The next task may overwrite the memory of these results.
            made += [[*map(bytes, event)] for event in events] if left else events
        return made

    def _events(self) -> list[Parts]:
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
        self._outbox.put(None)  # reports that the previous message is done
        return self._inbox.get()

    def _report(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._exit = dumps(event)
        else:
            self._outbox.put(parts_of(event))


def _opened(parts: Parts, place: tuple[int, int] | None, returns: tuple[list[Parts], ...]) -> Any:
    message = loads(parts[0], buffers=[*map(own, parts[1:])])
    if place is not None:
        call, at = place
        head, *buffers = returns[call][at]
        message = message._replace(index=loads(head, buffers=buffers).payload.open())
    return message
