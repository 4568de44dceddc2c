"""Handle of a worker that is driven by calls: for transports that call methods, and return values.

One call lasts as long as the worker, and its return is the worker's last word, whatever way it ends.
Each message is another call, which returns the events that came of it; tasks that are short beside a
call go in one together. `called_worker.py` has the far side.
"""

from __future__ import annotations

import platform
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from hybridloader._support.error_handling import repr_of
from hybridloader.engine.called_worker import Parts, SentMessage, parts_of
from hybridloader.engine.contract import WorkerHandle
from hybridloader.engine.messages import Done, Event, Exited, First, Message, Task
from hybridloader.engine.meter import MEASURES
from hybridloader.engine.serving import loads

TRIPS = 3
"""Round trips at a time: of these the shortest counts, as the others have waited for something."""

EVERY = 30.0
"""Seconds from one look at the other clock to the next. Clocks of two machines part by some 50 us a
second at most: 1.5 ms meanwhile, about what a busy network adds to a round trip."""

BUNDLE_SECONDS = 2e-3
"""Seconds that the tasks of a call take together, about, and by which the first result of them is later.

A call of Ray's costs 0.5 to 0.8 ms. With tasks of 0.3 ms, prefetched 32 deep, a batch took 0.85 ms in
calls of one, 0.87 in bundles of 1 ms, 0.37 of 2 ms, and 0.34 of 4 ms (two cores, two workers).
"""

BUNDLE_BYTES = 64 << 10
"""Bytes of the messages of a call, or of their results, about. Ray sends up to 100 KB with the call, or
with its reply; more goes by way of its store, which takes longer."""

BESIDE = 3e-5
"""Seconds that a worker takes for a task beside its work: to open it, and to pack the result."""

UNDER_WAY = 2
"""Calls behind which a worker's tasks wait for others: one to do, and one so that it need not rest."""

RECENT = 8
"""Results of which a worker's mean is, about."""


class Place(NamedTuple):
    """Place of a result that is sent on unopened."""

    returned: Any
    """Return of the call that had it, as the transport refers to it; hashable."""
    at: int
    """Number of its event in there."""


_Packed = tuple[Parts, Place | None]


class _Here(threading.local):
    """Calls that a thread makes, and whether the transport reports their ends on it."""

    making = 0
    """Calls that it makes now."""
    is_told = False
    """True for a thread of the transport, which is told of ends: to wait for one could last for ever."""


_here = _Here()


def _when_done(call: Future[Any], then: Callable[[Future[Any]], None]) -> None:
    """Call `then` when a call ends, on the thread that reports its end; at once if it has ended."""
    _here.making += 1
    try:
        call.add_done_callback(partial(_tell, then))
    finally:
        _here.making -= 1


def _tell(then: Callable[[Future[Any]], None], call: Future[Any]) -> None:
    if not _here.making and threading.get_ident() != threading.main_thread().ident:
        _here.is_told = True  # for good: a finalizer may come between two ends, too
    then(call)


class CallingHandle(WorkerHandle):
    """Handle of a `CalledWorker`: makes its calls, and reports the returned events in order.

    A call costs the same for many messages as for one. So while `UNDER_WAY` calls are in flight, tasks
    wait until one of them returns or a bundle of tasks is full, and are sent in one call. A long task
    fills a bundle by itself, so it is sent at once.

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

    _life: Future[Any]  # of `run`: it ends as the worker ends

    def __init__(self, number: int, report: Callable[[Event], None], alone: bool = False) -> None:
        self._number, self._report, self._alone = number, report, alone
        # All the mutable state:
        self.placed: tuple[int, str] | None = None  # process id and machine, once it runs
        self.ready = False
        self._clock: FarClock | None = None  # of a worker on another machine
        self._steps: deque[tuple[Future[Any], int]] = deque()  # in their order, with their messages
        self._queue: list[_Packed] = []  # messages that wait for a call to return
        self._filled = 0.0  # parts of a bundle that those are
        self._share = 1.0  # mean part of a bundle that each of the last tasks would have been
        self._failed = 0  # messages in the first call that failed
        self._over = threading.Event()
        self._lock = threading.RLock()  # a finalizer may come here on a thread that has it
        self._cause: str | None = None
        self._killed = False  # it may answer meanwhile what it was sent before
        self._doomed = ""  # reason why it is killed

    # -- to be written ---------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the worker; calls of `step` are made in order, the others beside them.

        Small calls of `step` are made on any thread, such as the one that reports an end.
        """
        raise NotImplementedError

    def started(self) -> None:  # most hold nothing for it
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

    def over(self) -> None:  # most hold nothing else
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
            message, nbytes = Task(message.seq, None), message.index.nbytes
        parts = parts_of(message, other_main=True)
        part = (nbytes + len(parts[0])) / BUNDLE_BYTES
        waits = isinstance(message, (Task, First)) and not self._alone and part < 1
        if not waits or len(parts) > 1:  # its buffers are views of what may change meanwhile
            with self._lock:
                self._flush()
            # Not under the lock, which a thread that makes room in the transport's store may want.
            self._step([(parts, place)])
            return
        with self._lock:
            if self._filled + part > 1:
                self._flush()
            self._queue.append((parts, place))
            self._filled += max(part, self._share)
            if self._filled >= 1 or len(self._steps) < UNDER_WAY:
                self._flush()

    def leave(self) -> None:
        """Make the worker end without the rest of its batch and its waiting tasks."""
        with self._lock:
            self._queue.clear()
        with suppress(Exception):  # it is gone
            if self.is_alive():
                self.call("leave")

    def stack(self, timeout: float = 1.0) -> str:
        """Return the worker's stack; a worker in native code that holds the GIL can't return it."""
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
        except Exception as error:  # it may have ended meanwhile
            self._give_up(f"could not be called: {error!r}")
            return
        self._steps.append((step, len(messages)))
        _when_done(step, self._deliver)

    def _deliver(self, _: Any) -> None:
        with self._lock:
            while self._steps and self._steps[0][0].done():
                self._take(*self._steps.popleft())
            if not self._life.done():
                if len(self._steps) < UNDER_WAY:
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
        with suppress(Exception):  # it is gone already
            self.end()

    def _give_up(self, reason: str) -> None:
        """Kill a worker one of whose tasks would never have an answer."""
        if not self._over.is_set() and not self._life.done() and not self._doomed:
            self._doomed = reason
            threading.Thread(target=self.terminate, daemon=True).start()

    def _take(self, step: Future[Any], messages: int) -> None:
        try:
            for at, (head, *buffers) in enumerate(step.result()):
                event = loads(head, buffers=buffers)
                if isinstance(event, Done):
                    if self._clock is not None and event.extras is not None:
                        self._clock.translate(event.extras)
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
                # Nobody knows at which of them. Each is sent again alone, as nothing is known of a new
                # worker's tasks: so the next death tells.
                exited = replace(exited, at=-1)
            if self._doomed:
                exited = replace(exited, cause=f"{self._doomed}; it was killed, and {exited.cause}")
        return exited


class FarClock:
    """Offset of the clock of a worker on another machine, by the shortest of some round trips.

    Parameters
    ----------
    ask
        Asks for the time there; the future has it in seconds of `time.perf_counter`.
    """

    def __init__(
        self, ask: Callable[[], Future[float]], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._ask, self._clock = ask, clock
        # All the mutable state:
        self.offset: float | None = None  # seconds to take off a time there; None: not known yet
        self._shortest = float("inf")
        self._left = 0  # round trips
        self._due = float("inf")  # time of the next look

    def look(self) -> None:
        """Begin to measure the offset."""
        self._left, self._shortest, self._due = TRIPS, float("inf"), self._clock() + EVERY
        self._trip()

    def _trip(self) -> None:
        self._left -= 1
        sent = self._clock()
        self._ask().add_done_callback(partial(self._answered, sent))

    def _answered(self, sent: float, told: Future[float]) -> None:
        now = self._clock()
        try:
            there = told.result()
        except Exception:  # it has died
            return
        if now - sent < self._shortest:
            self._shortest = now - sent
            self.offset = there - (sent + now) / 2
        if self._left > 0:
            self._trip()

    def translate(self, extras: dict[str, Any]) -> None:
        """Turn the times of measures into ours; take those out that came before the first answer."""
        if MEASURES not in extras:
            return
        if self.offset is None:
            del extras[MEASURES]
        else:
            extras[MEASURES] = extras[MEASURES].moved(-self.offset)
        if self._clock() >= self._due:
            self.look()
