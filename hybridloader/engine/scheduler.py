"""Scheduler: decides which task goes to which worker, which result is next, and the outcome of an exit.

A pure state machine. It holds sequence numbers and states; it never holds a thread, a process, a clock,
a tensor or an index, and it never waits. The stage (`stage.py`) asks it for decisions and reports events
to it.

Theory of operation
-------------------
While `free` is above 0, a task is wanted: `dispatch` chooses a worker for it, if any should have it now,
and `assign` gives it the next sequence number. A task is in one of two dicts: `sent` (seq -> worker)
until its result comes, then `done` (seq -> result) until it is popped. The two are disjoint. `sent`
holds at most `window` tasks, and both together at most `window + extra`. `extra` is 0, unless workers
have nothing to do because results wait for one that is late: then `widen` raises it. It falls again once
that result has come. Numbers are never reused: an epoch begins at `first`, and lower numbers are stale.
Every number that was assigned leaves exactly once: popped as a value or an error, or counted in
`skipped` (the worker's shard ended before it) or in `abandoned` (a new epoch or a close came first). A
worker may be replaced in the middle: its tasks are then sent to the new one, under the same numbers.

The states of the run and of its workers, and the moves between them, are tables.
An illegal move raises `IllegalTransition` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from hybridloader._support.user_objects import size_of
from hybridloader.engine.messages import ByReference, Done, Exhausted, Exited, Result, known_bytes
from hybridloader.errors import IllegalTransition

# -- States of a stage's run and of its workers, and the moves between them.
#
# Each of the two state machines is a table: (state, event) -> state. A pair that is not in its table is
# illegal: it raises `IllegalTransition` and changes nothing.


class _State(Enum):
    __hash__ = object.__hash__  # `Enum.__hash__` is a Python function, called for each look-up


class RunState(_State):
    NEW = "NEW"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    IDLE = "IDLE"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"


class WorkerState(_State):
    STARTING = "STARTING"
    READY = "READY"
    EXHAUSTED = "EXHAUSTED"
    ABSENT = "ABSENT"
    STOPPING = "STOPPING"
    GONE = "GONE"


# fmt: off
RUN_TABLE: dict[tuple[RunState, str], RunState] = {
    (RunState.NEW,      "begin"):   RunState.RUNNING,
    (RunState.NEW,      "fault"):   RunState.CLOSING,
    (RunState.NEW,      "close"):   RunState.CLOSING,
    (RunState.RUNNING,  "begin"):   RunState.RUNNING,
    (RunState.RUNNING,  "ended"):   RunState.DRAINING,
    (RunState.RUNNING,  "fault"):   RunState.CLOSING,
    (RunState.RUNNING,  "close"):   RunState.CLOSING,
    (RunState.DRAINING, "begin"):   RunState.RUNNING,
    (RunState.DRAINING, "drained"): RunState.IDLE,
    (RunState.DRAINING, "fault"):   RunState.CLOSING,
    (RunState.DRAINING, "close"):   RunState.CLOSING,
    (RunState.IDLE,     "begin"):   RunState.RUNNING,
    (RunState.IDLE,     "fault"):   RunState.CLOSING,
    (RunState.IDLE,     "close"):   RunState.CLOSING,
    (RunState.CLOSING,  "fault"):   RunState.CLOSING,
    (RunState.CLOSING,  "close"):   RunState.CLOSING,
    (RunState.CLOSING,  "gone"):    RunState.CLOSED,
    (RunState.CLOSED,   "close"):   RunState.CLOSED,
}

WORK_TABLE: dict[tuple[WorkerState, str], WorkerState] = {
    (WorkerState.STARTING,  "ready"):     WorkerState.READY,
    (WorkerState.STARTING,  "begin"):     WorkerState.STARTING,
    (WorkerState.STARTING,  "replaced"):  WorkerState.STARTING,
    (WorkerState.STARTING,  "stop"):      WorkerState.STOPPING,
    (WorkerState.STARTING,  "exited"):    WorkerState.GONE,
    (WorkerState.READY,     "exhausted"): WorkerState.EXHAUSTED,
    (WorkerState.READY,     "begin"):     WorkerState.READY,
    (WorkerState.READY,     "replaced"):  WorkerState.STARTING,
    (WorkerState.READY,     "stop"):      WorkerState.STOPPING,
    (WorkerState.READY,     "exited"):    WorkerState.GONE,
    (WorkerState.EXHAUSTED, "exhausted"): WorkerState.EXHAUSTED,
    (WorkerState.EXHAUSTED, "begin"):     WorkerState.READY,
    (WorkerState.EXHAUSTED, "replaced"):  WorkerState.ABSENT,  # restarted only with the next epoch
    (WorkerState.EXHAUSTED, "stop"):      WorkerState.STOPPING,
    (WorkerState.EXHAUSTED, "exited"):    WorkerState.GONE,
    (WorkerState.ABSENT,    "begin"):     WorkerState.STARTING,
    (WorkerState.ABSENT,    "stop"):      WorkerState.GONE,
    (WorkerState.STOPPING,  "ready"):     WorkerState.STOPPING,
    (WorkerState.STOPPING,  "exhausted"): WorkerState.STOPPING,
    (WorkerState.STOPPING,  "stop"):      WorkerState.STOPPING,
    (WorkerState.STOPPING,  "exited"):    WorkerState.GONE,
    (WorkerState.GONE,      "stop"):      WorkerState.GONE,
}
# fmt: on

ACTIVE = (WorkerState.READY, WorkerState.STARTING)  # states of workers that get tasks


def run_after(state: RunState, event: str) -> RunState:
    """Return the state of a run after `event`."""
    try:
        return RUN_TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"run is {state.value}: {event!r} is illegal") from None


def worker_after(worker: int, state: WorkerState, event: str) -> WorkerState:
    """Return the state of `worker`, which is in `state`, after `event`."""
    try:
        return WORK_TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"worker {worker} is {state.value}: {event!r} is illegal") from None


_RUNNING = RunState.RUNNING  # bound once, because Python 3.11 takes 0.2 us to look it up
_OVER = (RunState.CLOSING, RunState.CLOSED)


class Fault(NamedTuple):
    """Worker that ended unasked, with the tasks it had, oldest first, and its last event."""

    worker: int
    cause: str
    in_flight: tuple[int, ...]
    event: Exited


Dispatch = Callable[["Scheduler"], "int | None"]
"""Function that returns the worker of the next task, or None if no worker should get it yet."""


def round_robin(scheduler: Scheduler, last: int | None = None) -> int | None:
    """Return the next active worker after `last`: torch's rule, so that worker ``k`` gets batch ``k``.

    None for `last` is the worker that got the last task.
    """
    active = scheduler.active
    worker = active.find(1, (scheduler.last if last is None else last) + 1)
    if worker < 0:
        worker = active.find(1)
    return None if worker < 0 else worker


def round_robin_with_room(scheduler: Scheduler) -> int | None:
    """Return the next active worker with less than its share: torch's rule for ``in_order=False``."""
    active, last = scheduler.active, scheduler.last
    count = len(active)
    share = scheduler.window // max(1, active.count(1))
    for step in range(1, count + 1):
        worker = (last + step) % count
        if active[worker] and scheduler.load[worker] < share:
            return worker
    return None


IN_FLIGHT = 2
"""Most tasks in flight to a worker when any worker may do them: the one that it does, and one so that
it does not wait for the next. More tasks would wait for a slow worker while others are idle."""


def least_busy(scheduler: Scheduler, in_flight: int = IN_FLIGHT) -> int | None:
    """Return the active worker with the fewest tasks to do; None if each has `in_flight`."""
    active, busy, last = scheduler.active, scheduler.busy, scheduler.last
    count = len(active)
    found, least = None, in_flight
    for step in range(1, count + 1):
        worker = (last + step) % count
        if busy[worker] < least and active[worker]:
            if not busy[worker]:
                return worker
            found, least = worker, busy[worker]
    return found


FADE = 4
"""Number of results popped before `extra` is lowered by one, once the late result has arrived.

In that time workers get three tasks for every four popped results, so fewer and fewer results wait.
Without new tasks workers would be idle while the consumer takes the waiting results.
"""


class Scheduler:
    """State of one stage's tasks and workers; see the module for the rules."""

    def __init__(
        self,
        workers: int,
        window: int,  # most tasks in flight or waiting to be popped; see `widen`
        *,
        ordered: bool = True,  # pop results in the order of their tasks, else as they arrive
        dispatch: Dispatch = round_robin,
    ) -> None:
        if workers < 1 or window < 1:
            raise ValueError(f"need workers >= 1 and window >= 1, got {workers} and {window}")
        self.window = window
        self.ordered = ordered
        self.dispatch = dispatch
        # All the mutable state:
        self.run = RunState.NEW
        self.workers = [WorkerState.STARTING] * workers
        # 1 for each worker that gets tasks. A search in bytes runs in C: with hundreds of workers whose
        # shards have ended, a loop over their states would take most of the time of a task.
        self.active = bytearray([1]) * workers
        self.sent: dict[int, int] = {}
        self.done: dict[int, Result] = {}
        self.first = self.next_out = self.next_in = 0
        self.skipped = self.abandoned = 0
        self.fault: Fault | None = None
        self.last = workers - 1  # worker that got the last task
        self.load = [0] * workers  # tasks in `sent` or `done`, by worker
        self.busy = [0] * workers  # tasks in `sent`, by worker
        self.extra = 0  # number of results that may wait in addition to the window
        self.free = 0  # room for tasks if positive; at most 0 if the source has ended

    def __repr__(self) -> str:
        workers = " ".join(state.value for state in self.workers)
        return (
            f"<Scheduler {self.run.value} [{workers}] sent={sorted(self.sent)} "
            f"done={sorted(self.done)} out={self.next_out} in={self.next_in}>"
        )

    # -- moves -----------------------------------------------------------------------------------

    def begin(self) -> list[Result]:
        """Begin an epoch; return the results that will not be popped, to be discarded."""
        run = run_after(self.run, "begin")
        workers = [worker_after(i, state, "begin") for i, state in enumerate(self.workers)]
        self.run, self.workers = run, workers
        self.active[:] = [state in ACTIVE for state in workers]
        dropped = self._abandon()
        self.extra = 0
        self._count_free()
        self.first = self.next_out = self.next_in
        self.last = len(workers) - 1
        return dropped

    def assign(self, worker: int) -> int:
        """Give the next task to `worker`, whom `dispatch` has chosen; return its sequence number."""
        if self.free <= 0 or not self.active[worker]:
            raise IllegalTransition(f"assign: worker {worker} can take no task in {self!r}")
        seq = self.next_in
        self.next_in = seq + 1
        self.sent[seq] = self.last = worker
        self.load[worker] += 1
        self.busy[worker] += 1
        self.free -= 1
        return seq

    def source_ended(self) -> None:
        self.run = run_after(self.run, "ended")
        self.free = 0

    def take_in(self, results: Iterable[Result]) -> list[Result]:
        """Take in results that workers reported; return those that are stale, to be discarded."""
        sent, done, busy = self.sent, self.done, self.busy
        over = self.run in _OVER
        stale = []
        for result in results:
            seq, worker = result.seq, result.worker
            if over or seq < self.first:
                stale.append(result)
            elif sent.get(seq) != worker:
                raise IllegalTransition(f"worker {worker} reported task {seq} in {self!r}")
            else:
                del sent[seq]
                busy[worker] -= 1
                done[seq] = result
        if self.extra:
            self._settle()
        return stale

    def ready(self, worker: int) -> None:
        self._move(worker, "ready")

    def end_shard(self, event: Exhausted) -> list[int] | None:
        """Take in the end of a worker's shard; return the tasks that it had nothing for, oldest first.

        None if the event is stale.
        """
        worker = event.worker
        if event.seq < self.first or self.run in _OVER:
            return None
        state = worker_after(worker, self.workers[worker], "exhausted")
        run: RunState = self.run
        if run is RunState.RUNNING and self.active.count(1) == self.active[worker]:
            run = run_after(run, "ended")
        self.run, self.workers[worker], self.active[worker] = run, state, 0
        skipped = [seq for seq, holder in self.sent.items() if holder == worker]
        for seq in skipped:
            del self.sent[seq]
        self.load[worker] -= len(skipped)
        self.busy[worker] -= len(skipped)
        self.skipped += len(skipped)
        self._settle()
        return skipped

    def pop(self) -> Result | None:
        """Return the next result in turn, or None if it has not come."""
        sent, done = self.sent, self.done
        if not done:
            return None
        if self.ordered:
            seq = self.next_out
            if seq not in done:
                while seq not in sent and seq not in done:
                    seq += 1  # the shard of its worker had ended
                self.next_out = seq
                if seq in sent:
                    return None
            self.next_out = seq + 1
        else:
            seq = next(iter(done))
        result = done.pop(seq)
        self.load[result.worker] -= 1
        if self.extra:
            self._narrow(self.extra - (seq % FADE == 0))
            self._count_free()
        elif self.run is _RUNNING:
            self.free += 1
        return result

    @property
    def has_next(self) -> bool:
        """True if `pop` would return a result."""
        return bool(self.done) and (not self.ordered or self._turn() in self.done)

    @property
    def stalled(self) -> bool:
        """True if a worker has nothing to do because results wait for one that has not come."""
        rests = any(not b and s in ACTIVE for b, s in zip(self.busy, self.workers, strict=True))
        return rests and self.run is _RUNNING and self.free <= 0 and self._is_late()

    def widen(self, extra: int) -> None:
        """Let `extra` results wait besides the window, while the one whose turn it is has not come.

        Does nothing if it has come: a consumer that takes no results gets no more of them.
        """
        if self._is_late():
            self.extra = extra
            self._count_free()

    def drain(self) -> bool:
        """End the epoch if nothing is left to assign, to come or to be popped; return True if it has
        ended."""
        if self.run is RunState.DRAINING and not self.sent and not self.done:
            self.run = run_after(self.run, "drained")
        return self.run is RunState.IDLE

    def stop(self, worker: int) -> None:
        self._move(worker, "stop")

    def exited(self, event: Exited) -> None:
        """Note that a worker has ended, as it was asked to, or for a `fault`."""
        asked = self.workers[event.worker] is WorkerState.STOPPING
        run = self.run if asked else run_after(self.run, "fault")
        self._move(event.worker, "exited")
        self.run = run
        self._count_free()
        if not asked and self.fault is None:
            cause = event.cause or "exited without being asked to"
            self.fault = Fault(event.worker, cause, tuple(self.held(event.worker)), event)
        if self.run is RunState.CLOSING and self._all_gone():
            self.run = run_after(self.run, "gone")

    def replace(self, worker: int) -> list[int]:
        """Note that another worker takes the place of a dead one; return its tasks, oldest first.

        It is to start now if its state is then `WorkerState.STARTING`; with the next epoch if it is
        `WorkerState.ABSENT`.
        """
        self._move(worker, "replaced")
        return self.held(worker)

    def held(self, worker: int) -> list[int]:
        """Return the tasks that the worker was sent and has not answered, oldest first."""
        # A copy first, which is atomic: another thread may pull during a report.
        return sorted(seq for seq, holder in self.sent.copy().items() if holder == worker)

    def close(self) -> list[Result]:
        """End the run; return the results that will not be popped, to be discarded."""
        self.run = run_after(self.run, "close")
        for worker in range(len(self.workers)):
            self._move(worker, "stop")
        if self.run is not RunState.CLOSED and self._all_gone():
            self.run = run_after(self.run, "gone")
        self.free = 0
        return self._abandon()

    # -- the parts -------------------------------------------------------------------------------

    def _turn(self) -> int:
        """Return the number of the result whose turn it is, past those of shards that have ended."""
        seq = self.next_out
        while seq < self.next_in and seq not in self.sent and seq not in self.done:
            seq += 1
        return seq

    def _is_late(self) -> bool:
        return self.ordered and self._turn() in self.sent

    def _settle(self) -> None:
        """Let no more results wait than now do, unless one is late."""
        if not self._is_late():
            self._narrow(len(self.sent) + len(self.done) - self.window)
        self._count_free()

    def _narrow(self, extra: int) -> None:
        self.extra = max(0, min(self.extra, extra))

    def _count_free(self) -> None:
        room = self.window - len(self.sent) + min(0, self.extra - len(self.done))
        self.free = room if self.run is RunState.RUNNING else 0

    def _abandon(self) -> list[Result]:
        dropped = list(self.done.values())
        self.abandoned += len(self.sent) + len(dropped)
        self.sent.clear()
        self.done.clear()
        self.load = [0] * len(self.workers)
        self.busy = [0] * len(self.workers)
        return dropped

    def _all_gone(self) -> bool:
        return all(state is WorkerState.GONE for state in self.workers)

    def _move(self, worker: int, event: str) -> None:
        state = worker_after(worker, self.workers[worker], event)
        self.workers[worker], self.active[worker] = state, state in ACTIVE


# -- limit of the finished results that wait for a late one
#
# Results are returned in the order of their tasks. While one of them is late, the following ones wait,
# and workers do other tasks up to this limit (docs/decisions.md).

TASKS = 64
"""Results per worker that may wait: one task may take as long as 64 others before a worker becomes
idle."""

BYTES = 1 << 28
"""Bytes of results that may wait, 256 MiB: 64 of 4 MB, such as batches of 32 images of 180 x 240."""

PAGES = 2e9
"""Bytes of fresh memory per second. A waiting result keeps its memory, so the next one needs other
pages, which are new, or at least not in the cache. If allocating these takes longer than computing the
result, the worker pauses."""


class ReorderLimit:
    """Limit of the results of one stage that wait for a late one, in tasks and in bytes.

    The bytes are an estimate: each result counts as much as the largest recent one. A result is measured
    only when a worker has nothing to do, so a stage that never stalls measures none.
    """

    def __init__(self, workers: int, nbytes: int = BYTES) -> None:
        self.tasks, self.nbytes = TASKS * workers, nbytes
        self._largest = 0

    def extra(self, done: dict[int, Result]) -> int:
        """Return how many results may wait, if those in `done` do, in the order in which they came."""
        newest = done[next(reversed(done))]
        if isinstance(newest, Done):
            payload = newest.payload
            size = known_bytes(payload)
            if isinstance(payload, ByReference):
                size = size_of(payload.peek())
            self._largest = max(size, self._largest * 7 // 8)
            if newest.seconds * PAGES < size:
                return 0
        return min(self.tasks, self.nbytes // max(1, self._largest))
