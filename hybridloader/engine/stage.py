"""Stage: drives one scheduler and one crew, on the thread that asks for the next item.

                  index                    Task                       index
    source ---------------->  Stage  ---------------->  Crew  ---------------->  Worker.step
   (sampler)                 |     ^                    |  ^                          |
                     assign  v     |  pop               |  |         Done / Failed    |
                          Scheduler                     |  +--------------------------+
                             ^           events         |
                             +--------------------------+

It never reads ahead of `lookahead` tasks, and never asks the source for an index without room for
its task. Where a result is late and workers rest, a `ReorderLimit` lets it read further.

A source is an iterator, which the stage pulls and, if need be, waits for. Or it is a `Feed`, which it
never waits for: while the feed has nothing, it hands out results, and sleeps until either comes.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from hybridloader._support.text import (
    DEBUG,
    INFO,
    beginning,
    brief,
    log,
    policy,
    seconds,
    table,
    whole,
)
from hybridloader._support.torch_env import Modes, modes_here
from hybridloader._support.user_objects import (
    Failure,
    Raised,
    add_note,
    foreign,
    is_ours,
    keeps_number,
    no_answer,
    text_of,
)
from hybridloader.engine.contract import CLOSING, Backend, Crew, WorkerHandle, ended_with
from hybridloader.engine.dataset_state import Change
from hybridloader.engine.feed import Feed, StageFlow, is_forwarded, items_in
from hybridloader.engine.messages import (
    Begin,
    ByReference,
    Done,
    Event,
    Exhausted,
    Exited,
    Failed,
    GivenUp,
    Last,
    PartlyGivenUp,
    Ready,
    Result,
    Stop,
    Task,
    WorkerSpec,
)
from hybridloader.engine.scheduler import (
    ACTIVE,
    Dispatch,
    Fault,
    ReorderLimit,
    Scheduler,
    WorkerState,
    round_robin,
)
from hybridloader.errors import IteratorClosed, NotReady, TaskTimeout, WorkerDied, WorkerTimeout

if TYPE_CHECKING:
    from hybridloader.engine.meter import Metering


@dataclass(frozen=True)
class RestartPolicy:
    """Policy to restart workers that die, and to send their tasks to the restarted ones.

    A worker that dies before it is ready is restarted too. If no worker becomes ready (the dataset's
    import ends it, for instance), restarts continue until `max_restarts`; then an error is raised.

    Parameters
    ----------
    max_restarts
        Number of restarts in one stage within `window_seconds`; the next death raises. Workers that end
        together, with the process that forks them or with their machine, count as one restart.
    window_seconds
        Seconds that a restart counts.
    deaths_per_sample
        Number of deaths at the same sample after which it is given up: an error replaces it, which
        `on_error` may skip or replace. If the sample within the task is unknown, the whole task is given
        up.
    """

    max_restarts: int = 10
    window_seconds: float = 600.0
    deaths_per_sample: int = 2

    def __post_init__(self) -> None:
        for name in ("max_restarts", "deaths_per_sample"):
            whole(f"RestartPolicy: {name}", getattr(self, name), 1)
        seconds("RestartPolicy: window_seconds", self.window_seconds, above=True)

    @classmethod
    def of(cls, value: Any, name: str = "on_worker_death") -> RestartPolicy | None:
        """Return the policy that `on_worker_death` names; None: a death is raised.

        Raises `ValueError` if it names none.
        """
        if value is None:
            return None
        choices = '"raise", "restart" or a RestartPolicy'
        return policy(name, value, {"raise": None, "restart": cls}, (cls,), choices)


# -- Supervision of workers: it restarts those that die and kills those that exceed their time.
#
# A restarted worker has the number and the seed of the dead one and gets its unanswered tasks. So order
# and number of the results do not change. A sample at which workers die repeatedly is given up: a
# `GivenUp` replaces it in the task, and the fetcher treats it as a sample that raised. Error policies,
# not this module, decide how an error is handled.


_NEVER_READY = (
    " None of them ever became ready: their first steps end them. Check the imports, the loading of "
    "the dataset and worker_init_fn."
)


class Supervisor:
    """Restarts the workers of one stage, and limits the time of each task.

    A task's time starts when its worker can have begun it: when the task was sent, or when the stage
    received the result of the task before. So the time of a busy consumer does not count.
    A worker that does not become ready exceeds its time `START` seconds later.
    """

    def __init__(
        self,
        policy: RestartPolicy | None,  # None: no worker is restarted
        task_timeout: float,  # seconds that a worker may take for one task; 0: no limit
        *,
        threads: bool,  # the workers are threads, which can't be killed
        table: WorkerTable,  # a sample that is given up is replaced in its indices
    ) -> None:
        self._policy, self._timeout, self._threads = policy, task_timeout, threads
        self._table, self._scheduler = table, table.scheduler
        self._crew = table.crew
        # All the other mutable state:
        self._spec = table.spec
        self._killed: dict[int, tuple[str, str]] = {}
        """Reason and stack of each worker that was killed and has not exited yet."""
        self._restarts: deque[float] = deque()  # times of recent restarts
        self._deaths: Counter[tuple[int | None, int | None]] = Counter()  # by task and sample in it
        self._together: set[str] = set()  # values of `Exited.with_it` that were counted
        self.refusal = ""  # reason why the last dead worker was not restarted

    def begin(self, message: Begin, absent: Sequence[int], *, first: bool) -> None:
        """Begin an epoch: start workers for the places in `absent`."""
        spec = self._spec
        self._spec = replace(
            spec,
            shared_seed=message.shared_seed,
            deferred=False,
            starts=spec.starts if first else (),  # only in the first epoch
            seeding=spec.seeding and replace(spec.seeding, epoch=message.epoch),
            modes=message.modes,
        )
        self._deaths.clear()  # task numbers of the next epoch differ
        for worker in absent:
            self._start(worker)

    # -- deaths ----------------------------------------------------------------------------------

    def take_in(self, death: Exited) -> Exited | None:
        """Replace the worker that died; return its death, with the reason, if it is to be raised."""
        why, stack = self._killed.pop(death.worker, (death.cause, death.evidence))
        if death.cause is not None and why != death.cause:
            death = replace(death, cause=why, evidence=stack, memory="", slots=None)
        if death.cause is None or self._policy is None:
            return death
        return None if self._replace(death, self._policy) else death

    def _start(self, worker: int) -> None:
        """Start a new worker in a place, where the one before had got to."""
        self._table.replaced(worker)
        spec = replace(self._spec, skip=self._table.position[worker])
        self._crew.start(worker, spec)
        self._crew.settle()

    def _replace(self, death: Exited, policy: RestartPolicy) -> bool:
        """Replace the worker; False if its death is to be raised."""
        worker, scheduler = death.worker, self._scheduler
        if scheduler.workers[worker] is WorkerState.STOPPING:
            return False
        blamed = self._blamed(death, scheduler.held(worker))
        if blamed is not None:
            self._deaths[blamed, death.at] += 1
        count = self._deaths[blamed, death.at]
        deadly = count >= policy.deaths_per_sample
        self.refusal = self._refusal(policy, death, deadly)
        if self.refusal:
            return False
        again = scheduler.replace(worker)
        if scheduler.workers[worker] is not WorkerState.STARTING:
            return True  # it has no task before the next epoch
        tasks = self._table.tasks
        try:
            self._start(worker)
            for seq in again:
                if deadly and seq == blamed:
                    spared = self._spared(tasks[seq].index, death, count)
                    tasks[seq] = tasks[seq]._replace(index=spared)
                self._crew.send(worker, tasks[seq])
        except Exception as error:  # for example, no further process, or no memory for a task
            self.refusal = f"It could not be restarted: {text_of(error)}"
            return False
        log(INFO, "stage %r: worker %d was restarted", self._spec.stage, worker)
        self._crew.flush()
        return True

    def _refusal(self, policy: RestartPolicy, death: Exited, deadly: bool) -> str:
        """Return the reason why the worker can't be replaced; empty if it can."""
        if deadly and self._spec.fetch.in_turn:
            return (
                f"{policy.deaths_per_sample} workers died at this position of their shard, which can't "
                "be read beyond it, so the worker was not restarted."
            )
        if not self._may_restart(policy, death.with_it):
            return (
                f"{policy.max_restarts} workers of this stage were restarted within "
                f"{policy.window_seconds:g} seconds, and RestartPolicy allows no more."
                + ("" if self._table.proven else _NEVER_READY)
            )
        return ""

    def _may_restart(self, policy: RestartPolicy, with_it: str | None) -> bool:
        """Count another restart, unless there were too many of late."""
        if with_it in self._together:
            return True
        now, restarts = self._table.clock(), self._restarts
        while restarts and restarts[0] <= now - policy.window_seconds:
            restarts.popleft()
        if len(restarts) >= policy.max_restarts:
            return False
        restarts.append(now)
        if with_it is not None:
            self._together.add(with_it)
        return True

    def _blamed(self, death: Exited, held: Sequence[int]) -> int | None:
        """Return the task that most likely killed the worker."""
        if self._scheduler.workers[death.worker] is WorkerState.STARTING:
            return None  # it died before its first task
        if death.at is None:
            return held[0] if held else None
        return death.task if death.at >= 0 and death.task in held else None

    def _spared(self, index: Any, death: Exited, deaths: int) -> Any:
        """Return `index` without the sample that kills, or without all if it is not known which."""
        text = self._table.given_up(death, deaths)
        if not self._spec.fetch.batched:
            return GivenUp(index, text)
        items = list(index.peek() if is_forwarded(index) else index)
        chosen = range(len(items)) if death.at is None else (death.at,)
        for number in chosen:
            if number < len(items) and type(items[number]) is not GivenUp:
                items[number] = GivenUp(items[number], text)
        return PartlyGivenUp(items)

    # -- tasks that run over ---------------------------------------------------------------------

    def sooner(self, remaining: float | None) -> float | None:
        """Return `remaining` seconds, or fewer if a task runs over before."""
        longest = self._table.longest() if self._timeout > 0 else None
        if longest is None:
            return remaining
        left = max(0.0, self._timeout - longest[0])
        return left if remaining is None else min(remaining, left)

    def look(self) -> None:
        """Kill a worker whose task has run over; raise `TaskTimeout` if it can't be replaced."""
        longest = self._table.longest() if self._timeout > 0 else None
        if longest is None or longest[0] < self._timeout:
            return
        seconds, worker = longest
        stack = self._crew.stack(worker)
        if self._threads or self._policy is None:
            words = self._table.overrun(worker, seconds, self._timeout, stack, thread=self._threads)
            raise no_answer(TaskTimeout(words))
        what = "its task ran over"
        if self._scheduler.workers[worker] is not WorkerState.READY:
            what = f"it was not ready after {START:g} seconds more than"
        why = f"was killed because {what} task_timeout={self._timeout:g} seconds"
        self._killed[worker] = why, stack
        # So that it is not killed twice for one task.
        self._table.since[worker] = self._table.clock()
        self._crew.kill(worker)


# -- Table of a stage's workers: the tasks of each, their start times, and the number of tasks done.
#
# It holds counts and times, and makes error texts from them. The stage and its supervisor write to it
# and make all decisions.


START = 30.0
"""Seconds in which a worker must become ready if tasks are timed. A fresh process that imports torch
needs 2, and ten times that on an overloaded machine."""


class WorkerTable:
    """Workers of one stage, by number, with their tasks."""

    def __init__(
        self, spec: WorkerSpec, scheduler: Scheduler, crew: Crew, clock: Callable[[], float]
    ) -> None:
        workers = len(scheduler.workers)
        self.spec, self.scheduler, self.crew, self.clock = spec, scheduler, crew, clock
        # All the mutable state:
        self.tasks: dict[int, Task] = {}  # by number, those that are not yet returned
        self.since = [clock()] * workers  # when each began its oldest task, or last had none
        self.answered = [0] * workers  # tasks answered, by all workers of each number
        self.position = [0] * workers  # samples of its shard that each has delivered in this epoch
        self.restarts = [0] * workers  # restarts of each number
        self.proven = False  # a worker has become ready

    def take_in(self, results: Iterable[Result]) -> None:
        """Record results that workers reported, of this epoch or an earlier one."""
        now, first = self.clock(), self.scheduler.first
        for result in results:
            worker = result.worker
            self.since[worker] = now
            self.answered[worker] += 1
            if result.seq >= first:
                self.position[worker] = result.position

    def ready(self, worker: int) -> None:
        self.since[worker] = self.clock()
        self.proven = True

    def replaced(self, worker: int) -> None:
        self.since[worker] = self.clock()
        self.restarts[worker] += 1

    def longest(self) -> tuple[float, int] | None:
        """Return the longest time at one task, in seconds, and its worker; None if none has a task.

        Starting is no task: of a worker that is not ready yet, the time beyond `START` seconds counts.
        """
        now, scheduler = self.clock(), self.scheduler
        found = [
            (now - self.since[worker] - (0.0 if state is WorkerState.READY else START), worker)
            for worker, state in enumerate(scheduler.workers)
            if state in ACTIVE and scheduler.busy[worker]
        ]
        return max(found, default=None)

    # -- words -----------------------------------------------------------------------------------

    def report(self) -> str:
        """Return a table of the workers and their tasks, from any thread."""
        now, handles = self.clock(), self.crew.handles
        heading = ("worker", "where", "pid", "state", "done", "restarts", "for", "task")
        rows: list[tuple[str, ...]] = [heading]
        for worker, state in enumerate(self.scheduler.workers):
            held = self.scheduler.held(worker)
            handle = handles[worker] if worker < len(handles) else None
            pid = None if handle is None else handle.known_pid
            task = " ".join(_asked(self.index(held)).split())
            rows.append(
                (
                    str(worker),
                    "" if handle is None else handle.name,
                    "-" if pid is None else str(pid),
                    _STATES.get(state, "busy" if held else "idle"),
                    f"{self.answered[worker]:,}",
                    f"{self.restarts[worker]:,}",
                    _seconds(now - self.since[worker]) if held else "-",
                    beginning(task, _MOST) if held else "-",
                )
            )
        return "\n".join(table(rows, left=(0, 1, len(heading) - 1)))

    def index(self, held: Sequence[int]) -> Any:
        """Return the index of the first of these tasks; None if there is none."""
        task = self.tasks.get(held[0]) if held else None
        return None if task is None else task.index

    def name(self, worker: int) -> str:
        """Name a worker in errors: ``"worker 1 (process, pid 4711)"``, as far as it is known."""
        handles = self.crew.handles
        if worker >= len(handles):
            return f"worker {worker}"
        handle = handles[worker]
        pid = "" if handle.known_pid is None else f", pid {handle.known_pid}"
        return f"worker {worker} ({handle.name}{pid})"

    def place(self, worker: int, index: Any, doing: str) -> str:
        """Return the origin of an exception, in one line."""
        return f"In stage {self.spec.stage!r}, {self.name(worker)}, {doing} {_asked(index)}."

    def death(self, fault: Fault, refusal: str) -> str:
        """Word the error for a worker that ended unasked, and was not restarted because of `refusal`."""
        event, worker = fault.event, self.name(fault.worker)
        held = [_asked(self.index([seq])) for seq in fault.in_flight]
        tasks = f"It was to fetch {'; '.join(held[:4])}" if held else "It had no task"
        more = f"; and {len(held) - 4} tasks more" if len(held) > 4 else ""
        # The kernel's report, which has an advice if memory is the cause, is more exact than a guess.
        advice = "" if event.memory else _advice(fault.cause)
        full = (
            "" if event.slots is None else "Its slots took {:,} of {:,} bytes.".format(*event.slots)
        )
        sample = "" if event.task is None else _sample_at(self.index([event.task]), event.at)
        parts = [f"{self._end(fault.worker)}In stage {self.spec.stage!r}, {worker} {fault.cause}."]
        parts += [f"{tasks}{more}.", sample, refusal, advice, full]
        lines = [" ".join(part for part in parts if part)]
        lines += [event.memory.strip("\n"), event.evidence.strip("\n")]
        return self._below("\n".join(line for line in lines if line))

    def _end(self, worker: int) -> str:
        """Return the end of a worker process in torch's words, which programs match.

        They are from ``torch/csrc/DataLoader.cpp``, with the stage's name in place of "DataLoader". The
        text is empty if the worker is no process of this machine, or has not ended.
        """
        handles = self.crew.handles
        handle = handles[worker] if worker < len(handles) else None
        if handle is None or handle.known_pid in (None, os.getpid()) or handle.exitcode is None:
            return ""
        who, code = f"{self.spec.stage} worker (pid {handle.known_pid})", handle.exitcode
        if not handle.code_known:
            return f"{who} exited unexpectedly. "
        if code >= 0:
            return f"{who} exited unexpectedly with exit code {code}. "
        try:
            return f"{who} is killed by signal: {signal.strsignal(-code)}. "
        except ValueError:  # a number without a signal on this platform
            return f"{who} is killed by signal: {-code}. "

    def overrun(
        self, worker: int, seconds: float, timeout: float, stack: str, *, thread: bool
    ) -> str:
        """Word the error for a task that took longer than `task_timeout`, its worker not replaced.

        `seconds` are those of the task so far. `stack` is that of the worker, or the reason why there is
        none. A `thread` of this process can't be killed.
        """
        fate = "It was killed; on_worker_death='restart' would restart it and continue."
        if thread:
            fate = (
                "A thread can't be killed: it finishes its sample, and the result is dropped. "
                "Workers that are processes can be killed and restarted: backend='fork', 'spawn' or "
                "'shared-memory' with on_worker_death='restart'."
            )
        asked = _asked(self.index(self.scheduler.held(worker)))
        words = (
            f"In stage {self.spec.stage!r}, {self.name(worker)} has been at {asked} for "
            f"{_seconds(seconds)}, longer than task_timeout={timeout:g} seconds. {fate} If such a task "
            "may take that long, raise task_timeout."
        )
        return self._below(f"{words}\n{stack.strip(chr(10))}" if stack.strip() else words)

    def given_up(self, death: Exited, deaths: int) -> str:
        """Word the error in place of a sample, or of a task, that has killed workers again and again."""
        workers = "1 worker" if deaths == 1 else f"{deaths} workers"
        what = "at this sample" if death.at is not None else "at a task that contains this sample"
        cause = death.cause or ""
        return (
            f"In stage {self.spec.stage!r}, {workers} died {what}, so it was given up; "
            f"the last one, {self.name(death.worker)}, {cause}. {_advice(cause)}".rstrip()
        )

    def lateness(self, timeout: float) -> str:
        """Word the error for no result within `timeout` seconds; from any thread."""
        sent = dict(self.scheduler.sent)  # a copy, as another thread may pull
        late_ones = sorted(sent)[:1] if self.scheduler.ordered else sorted(sent)
        workers = [self.name(sent[seq]) for seq in late_ones]
        held = "; ".join(_asked(self.index([seq])) for seq in late_ones[:4])
        who = ", ".join(dict.fromkeys(workers)) or "no worker"
        words = (  # torch's words come first, for programs that match them
            f"{self.spec.stage} timed out after {timeout} seconds: no result came from {who}, which was "
            f"to fetch {held}. Call next() again to keep waiting, or set a larger timeout=; "
            f"backend='inline' under a debugger shows where it is stuck."
        )
        if late_ones:
            words = f"{words}\n{self.crew.stack(sent[late_ones[0]]).rstrip()}".rstrip()
        return self._below(words)

    def _below(self, words: str) -> str:
        """Return `words` with the table of the workers below them."""
        return f"{words}\n{self.report()}"


_MOST = 40  # characters of a task in the table

_STATES = {
    WorkerState.STARTING: "starting",
    WorkerState.EXHAUSTED: "at the end",
    WorkerState.ABSENT: "dead",
    WorkerState.STOPPING: "stopping",
    WorkerState.GONE: "gone",
}


# -- texts of errors: stage, worker, indices, cause, and advice

_DEBUG = "To find it, run with backend='inline' under a debugger."

_ADVICE = {
    "SIGKILL": (
        "Likely the system ran out of memory, or a person or another program killed it. "
        "Try fewer workers, or backend='threads', which shares one copy of the dataset."
    ),
    "SIGSEGV": f"Native code crashed in the worker. {_DEBUG}",
    "0xc0000005": f"Native code used memory that it may not use. {_DEBUG}",
    "SIGFPE": f"Native code divided by zero in the worker. {_DEBUG}",
    "SIGABRT": (
        "Native code aborted in the worker: a failed assertion, or an uncaught C++ exception. "
        f"Its message is in the worker's stderr. {_DEBUG}"
    ),
    "SIGILL": (
        "Native code used an instruction that this CPU does not have: a library was built for another "
        "CPU. Install a build of it for this one."
    ),
    "SIGBUS": (
        "The system could not provide memory that it had promised: the shared-memory mount or the "
        "memory limit is full."
    ),
    "SystemExit": "The dataset or a function it uses called sys.exit().",
}


def _asked(index: Any) -> str:
    """Return the repr of a task's index, which has None for each sample of an iterable dataset."""
    if isinstance(index, list) and index and all(one is None for one in index):
        return f"the next {len(index)} samples"
    return brief(index)


def _advice(cause: str) -> str:
    return next((text for word, text in _ADVICE.items() if word in cause), "")


def _sample_at(index: Any, at: int | None) -> str:
    """Name sample number `at` of a task: ``"It was at sample 2 of [7, 3, 9]: 9."``.

    The text is empty if it is not known which sample it was.
    """
    if at is None or at < 0 or index is None:
        return ""
    inside = isinstance(index, (list, tuple)) and at < len(index)
    which = f": {brief(index[at])}" if inside else ""
    return f"It was at sample {at} of {brief(index)}{which}."


def _seconds(seconds: float) -> str:
    """Word a time: ``"0.42 s"``, ``"12.3 s"``, ``"5 min 7 s"``, ``"2 h 3 min"``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


T = TypeVar("T")

QUICK = 1e-4
"""Seconds of a task so short that two are sent at a time: waking a worker for each would cost more than
the worker gains by starting at once (docs/decisions.md)."""


class Stage(Iterator[Any]):
    """Running stage: a scheduler and a crew, and the iterator over their results.

    One lock serializes the thread that pulls and the one that closes; the crew and the scheduler need
    none. A call that uses them holds `_pulling` and is counted in `_inside`. If they were closed
    meanwhile (by the user's code, a signal's handler or a finalizer), it ends all at last: a caller of
    `close` that can't have the lock, or is the pulling thread itself, leaves the end to it.

    Making one raises `WorkerPicklingError`, before any worker has started. The caller has called
    `Backend.check`.
    """

    def __init__(
        self,
        backend: Backend,
        spec: WorkerSpec,  # ``workers == 0`` means one worker in the caller's context
        *,
        lookahead: int,  # most tasks in flight or waiting; 0: one, only during a pull
        ordered: bool = True,  # return results in the order of their indices
        reorder: ReorderLimit | None = None,  # results that may wait for a late one in addition
        timeout: float = 0,  # seconds to wait for one result; 0: no limit
        # False: no epoch follows, so a worker ends with its shard, and all workers with the epoch.
        persistent: bool = False,
        dispatch: Dispatch = round_robin,  # chooses the worker of the next task
        flow_control: StageFlow | None = None,  # counts items in flight, and may delay tasks
        observer: Observer | None = None,  # notes events here and in workers; None: not observed
        forwards: bool = False,  # return unopened results that are sent to another process
        on_worker_death: RestartPolicy | None = None,  # None: a death is raised
        task_timeout: float = 0,  # seconds that a worker may take for one task; 0: no limit
        numbers: bool = False,  # tasks carry the number of their first item, which seeds its work
        clock: Callable[[], float] = time.perf_counter,  # seconds; the same clock in all processes
    ) -> None:
        self.backend = backend
        metering = None if observer is None else observer.metering
        spec = replace(spec, modes=self._modes(), metering=metering)
        if on_worker_death is not None or task_timeout > 0:
            spec = replace(spec, tracked=on_worker_death is not None, timed=task_timeout > 0)
        self.spec = spec
        self._timeout, self._eager, self._clock = timeout, lookahead > 0, clock
        self._persistent, self._flow, self._forwards = persistent, flow_control, forwards
        self._numbers = numbers
        self._reorder = reorder if ordered and lookahead > 1 else None
        self._observer = observer
        self._each = observer if observer is not None and observer.each else None
        scheduler = Scheduler(
            max(1, spec.workers), max(1, lookahead), ordered=ordered, dispatch=dispatch
        )
        self._scheduler = scheduler
        # All the mutable state, besides that of the scheduler, the crew and the table:
        self.last = Last()
        self.items = 0
        """Number of items of the task of the last result, with flow control; 0 for a feed's error."""
        self._source: Iterator[Any] = iter(())
        self._feed: Feed | None = None  # used in place of a source
        self._quick = self._unsent = False  # the last task was `QUICK`; a task waits for a flush
        self._times_waits = observer is not None and not backend.in_caller
        self._waits_since = math.inf  # start of the wait for a result, if waits are timed
        self._hungry = False  # the feed had no item at the last try
        self._item = 0  # number of the next item, if tasks carry it
        self.epoch = -1  # number of the running epoch
        self._broken_off = -1  # number of the epoch that was interrupted
        self._closing = self._leaving = self._ended = self._gone = False
        self._inside = 0  # calls in progress that use the crew, on the thread that holds the lock
        self._death_report = ""
        self._error: Exception | None = None  # of the source; raised after all earlier results
        self.exhausted: dict[int, Exhausted] = {}  # of this epoch, by worker
        self._opened: dict[int, Ready] = {}  # those that carry a state or an error
        self._owner = os.getpid()
        self._pulling = threading.RLock()
        self._crew = crew = backend.open()
        self._finalizer = ended_with(self, crew)
        self.table = WorkerTable(self.spec, scheduler, crew, clock)
        self._supervisor: Supervisor | None = None
        if on_worker_death is not None or task_timeout > 0:
            self._supervisor = Supervisor(
                on_worker_death, task_timeout, threads=backend.in_process, table=self.table
            )
        # Two tasks at a time keep two results prefetched. With a supervisor, a task's time would count
        # from its assignment, so tasks are sent one at a time.
        self._pairs = lookahead >= 4 and self._supervisor is None
        try:
            for worker in range(len(scheduler.workers)):
                crew.start(worker, self.spec)
            crew.settle()
            kind, count = type(backend).__name__, len(scheduler.workers)
            log(DEBUG, "stage %r: started %d workers, %s", spec.stage, count, kind)
        except BaseException:
            self.close()
            raise

    @property
    def handles(self) -> Sequence[WorkerHandle]:
        return self._crew.handles

    @property
    def closed(self) -> bool:
        return self._closing or self._elsewhere

    @property
    def _elsewhere(self) -> bool:  # True in a fork of the process that started the workers
        return os.getpid() != self._owner and not self.backend.in_caller

    @property
    def next_seq(self) -> int:
        return self._scheduler.next_in

    @property
    def queued(self) -> int:
        """Number of tasks that are in flight, or wait to be returned."""
        return len(self._scheduler.sent) + len(self._scheduler.done)

    @property
    def active(self) -> bool:
        """True if a worker may still get tasks in this epoch."""
        return 1 in self._scheduler.active

    def has_ended(self, worker: int) -> bool:
        """True if the worker's shard has ended and all its results were returned."""
        scheduler = self._scheduler
        return not scheduler.active[worker] and not scheduler.load[worker]

    def begin(
        self,
        source: Iterator[Any] | Feed,
        shared_seed: int | None = None,
        changes: tuple[Change, ...] = (),
        epoch: int = 0,
        item: int = 0,
    ) -> None:
        """Begin an epoch over the indices of `source`, and fill the window with its first tasks.

        The rest of the epoch before is dropped. The first epoch needs no message, unless
        `WorkerSpec.deferred` is True: the workers open it when they start. Samples are seeded by number
        `epoch`. The first item of `source` has number `item`.
        """
        if os.getpid() != self._owner:
            self._check_process()
        # Workers have just begun with the modes of `spec`, unless they are to open the first epoch, too.
        modes = self._modes() if self.epoch >= 0 or self.spec.deferred else self.spec.modes
        message = Begin(epoch, shared_seed, changes, modes)
        self._use_crew(self._begin, source, message, item)

    def opened(self) -> dict[int, Ready]:
        """Wait until every worker has begun; return the `Ready` of those that reported a state or
        error."""

        def wait() -> dict[int, Ready]:
            deadline = self._clock() + self._timeout if self._timeout > 0 else None
            while WorkerState.STARTING in self._scheduler.workers:
                self._listen(self._remaining(deadline))
            opened, self._opened = self._opened, {}
            return opened

        return self._use_crew(wait)

    def pull(self, epoch: int | None = None, *, wait: bool = True) -> Any:
        """Return the next result of epoch number `epoch`, or of the one that runs.

        Raises `NotReady` if it has not come and `wait` is False, and `IteratorClosed` if the epoch is
        over, because it was interrupted or another has begun.
        """
        if os.getpid() != self._owner:
            self._check_process()
        with self._pulling:
            if self._closing or self._broken_off == self.epoch or epoch is not None:
                self._check_wanted(epoch)
            last, self._inside = self.last, self._inside + 1
            before = last.seq
            try:
                if self._scheduler.extra and self._scheduler.fault is None:
                    # Many results wait, and workers would stay idle until all of them were taken.
                    self._waits_since = math.inf  # these arrived while the caller was busy
                    self._hear(self._crew.wait(0.0))
                    if self._closing or self._broken_off == self.epoch:
                        # The wake-up of an interruption may have ended that wait.
                        self._check_wanted()
                result = self._scheduler.pop() if self._scheduler.done else None
                if result is None:
                    result = self._wait(wait)
                if self._flow is not None:
                    self.items = self._flow.left(result.seq)
                # Refill before the result is opened: the workers should not wait for the consumer.
                if self._eager:
                    self._fill()
                    if self._unsent or not (self._quick and self._scheduler.done):
                        self._crew.flush()
                        self._unsent = False
                    else:
                        self._unsent = True  # flushed with the next task
                last.worker, last.seq = result.worker, result.seq
                last.position, last.extras = result.position, result.extras
                return self._hand_out(result)
            except Exception:
                raise
            except BaseException:  # an interrupt may have dropped an event, so the state is unknown
                self._closing = True
                last.seq = before  # the result was not returned
                raise
            finally:
                self._inside -= 1
                if self._closing:
                    self._end()

    __next__ = pull

    def interrupt(self, epoch: int | None = None) -> None:
        """Break this epoch off: a caller that waits for a result gets `IteratorClosed`.

        From any thread. The workers stay, for `begin`. Does nothing if another epoch than number
        `epoch` runs.
        """
        if os.getpid() != self._owner:
            return
        running = self.epoch  # another thread may begin the next epoch meanwhile
        if epoch is not None and epoch != running:
            return
        self._broken_off = running
        if not self._closing:
            self._crew.wake()

    def leave(self, deadline: float) -> None:
        """Let all workers begin to end, without waiting for them; `close` follows.

        It waits for the thread that pulls, until `deadline` by `time.monotonic`.
        """
        if os.getpid() != self._owner or self._closing:
            return
        self._closing = self._leaving = True
        self._crew.wake()
        if self._pulling.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                if not self._inside:
                    self._crew.leave()
            finally:
                self._pulling.release()

    def close(self) -> None:
        """End all workers: from any thread, in any state, any number of times.

        Takes at most about 2 seconds. If the thread that pulls is busy in the user's own code (an
        inline worker, a sampler), this returns first and that thread ends the stage later. So it does
        if it is the one that closes: in the sampler, a signal's handler or a finalizer, which may
        come at any point of `pull`.
        """
        self._closing = True
        if os.getpid() != self._owner:
            return
        self._leaving = False  # if this returns first, the thread that pulls ends the stage
        self._crew.wake()
        if not self._pulling.acquire(timeout=CLOSING):
            return
        try:
            self._end()
        finally:
            self._pulling.release()

    # -- from the source to the workers ------------------------------------------------------------

    def _fill(self) -> None:
        scheduler, flow, feed = self._scheduler, self._flow, self._feed
        self._hungry = starved = False
        while scheduler.free > 0:
            worker = scheduler.dispatch(scheduler)
            if worker is None:
                break
            most = None if flow is None or flow.prefetch is None else flow.room()
            if most == 0:
                break
            try:
                index = next(self._source) if feed is None else feed.draw(most)
            except StopIteration:
                scheduler.source_ended()
                starved = True
                break
            except Exception as error:
                if is_ours(error, NotReady):
                    self._hungry = starved = True
                    break
                if feed is not None and not feed.ended_by(error):
                    if keeps_number(error):
                        self._item += 1
                    seq = scheduler.assign(worker)  # the error is raised in its turn
                    scheduler.take_in([Failed(worker, seq, Failure(error))])
                    continue
                self._error = error
                scheduler.source_ended()
                return
            seq = scheduler.assign(worker)
            item = self._item
            task = self.table.tasks[seq] = Task(seq, index, item)
            if self._numbers:
                self._item += items_in(index)
            if scheduler.busy[worker] == 1:
                self.table.since[worker] = self._clock()
            if flow is not None:
                flow.sent(seq, index)
            try:
                self._crew.send(worker, task)
            except Exception as error:  # for example, an index that can't be pickled
                result: Result = Failed(worker, seq, Failure(error))
                if feed is not None and feed.take_apart(index):
                    result = Done(worker, seq, ByReference([]))
                    self._item = item  # its items are drawn again
                scheduler.take_in([result])
                if flow is not None:
                    flow.came(result)
                    if isinstance(result, Done):
                        flow.left(seq)  # its items are sent again
        if self._each is not None:
            self._each.idle(scheduler.busy.count(0), starved=starved)

    # -- from the workers to the caller ------------------------------------------------------------

    def _wait(self, wait: bool) -> Result:
        """Return the next result in turn; wait for it, or look once if it has come."""
        scheduler = self._scheduler
        self._fill()
        if self._times_waits:
            self._waits_since = self._clock()
        deadline = self._clock() + self._timeout if self._timeout > 0 else None
        looked = False
        while True:
            if scheduler.done:
                result = scheduler.pop()
                if result is not None:
                    return result
            elif not scheduler.sent and scheduler.drain():
                self._end_epoch()
            if looked:
                raise no_answer(NotReady(f"stage {self.spec.stage!r} has no result yet"))
            if not wait:
                self._listen(0.0)
                looked = True
                continue
            waits_for_source = not scheduler.sent
            if self._feed is not None and self._hungry:
                self._feed.when_ready(self._crew.wake)
            remaining = None
            if deadline is not None or self._supervisor is not None:
                remaining = self._remaining(None if waits_for_source else deadline)
            self._listen(remaining)
            if deadline is not None and waits_for_source:
                # The wait so far was for the source, not for a worker.
                deadline = self._clock() + self._timeout

    def _remaining(self, deadline: float | None) -> float | None:  # in seconds; None: no limit
        remaining = None
        if deadline is not None:
            remaining = deadline - self._clock()
            if remaining <= 0:
                raise no_answer(WorkerTimeout(self.table.lateness(self._timeout)))
        return remaining if self._supervisor is None else self._supervisor.sooner(remaining)

    def _listen(self, timeout: float | None) -> None:
        """Take in the workers' events, and send more tasks."""
        each, supervisor, scheduler = self._each, self._supervisor, self._scheduler
        known = scheduler.fault is not None  # reported together with earlier results
        if known:
            pass
        elif each is None:
            self._hear(self._crew.wait(timeout))
        else:
            began = self._clock()
            events = self._crew.wait(timeout)
            each.waited_for(began, self._clock())
            self._hear(events)
        if supervisor is not None and not self._closing:
            try:
                supervisor.look()
            except TaskTimeout:
                self.close()
                raise
        fault = scheduler.fault
        if fault is not None and (known or not scheduler.has_next):
            self._close_for(fault)
        if self._closing or self._broken_off == self.epoch:
            self._check_wanted()
        reorder, done, fills = self._reorder, scheduler.done, self._feed is not None
        # Check conditions without a call first: this runs after every wait. All `QUICK` tasks that may
        # wait are a few milliseconds of work, so an idle worker beside a late result loses no more than
        # that.
        late = reorder is not None and done and scheduler.next_out not in done and not self._quick
        if late and 0 in scheduler.busy and scheduler.stalled:
            assert reorder is not None
            scheduler.widen(reorder.extra(done))
        if fills or scheduler.extra:
            self._fill()
            self._crew.flush()

    def _hear(self, events: Sequence[Event]) -> None:
        """Take in events of workers in their order, successive results together."""
        results: list[Result] = []
        for event in events:
            if isinstance(event, (Done, Failed)):
                results.append(event)
            else:
                self._hear(results)
                results = []
                self._hear_of(event)
        if not results:
            return
        if self._pairs:
            latest = results[-1]
            self._quick = type(latest) is Done and latest.seconds < QUICK
        stale = self._scheduler.take_in(results)
        self.table.take_in(results)
        observer = self._observer
        if observer is not None:
            each = self._each
            for result in results:
                # Without stale results, whose times are an earlier epoch's.
                if (each or result.extras is not None) and result.seq in self._scheduler.done:
                    observer.came(result, self._waits_since)
        if self._flow is not None:
            for result in results:
                if result.seq in self._scheduler.done:
                    self._flow.came(result)
        if stale:
            _discard(stale)

    def _hear_of(self, event: Ready | Exhausted | Exited) -> None:
        if isinstance(event, Ready):
            self._scheduler.ready(event.worker)
            self.table.ready(event.worker)
            if event.shard_start is not None:
                self._opened[event.worker] = event
        elif isinstance(event, Exited):
            if self._closing:
                return
            if event.cause is None:
                log(DEBUG, "stage %r: worker %d has ended", self.spec.stage, event.worker)
            else:
                log(INFO, "stage %r: worker %d %s", self.spec.stage, event.worker, event.cause)
            if self._supervisor is not None:
                death = self._supervisor.take_in(event)
                if death is None:
                    if self._observer is not None:
                        self._observer.replaced(event.worker, event.cause)
                    return
                event = death
            self._scheduler.exited(event)
        elif (skipped := self._scheduler.end_shard(event)) is not None:
            self.exhausted[event.worker] = event
            self._forget(skipped)
            if not self._persistent and self.spec.workers > 0:
                self._scheduler.stop(event.worker)
                self._crew.send(event.worker, Stop())
            if self._eager:  # other workers get its part of the window
                self._fill()

    def _hand_out(self, result: Result) -> Any:
        """Return the value, or raise the error, of a task that is no longer in flight."""
        table = self.table
        task = table.tasks.pop(result.seq, None)
        index = None if task is None else task.index
        if isinstance(result, Failed):
            # A feed's error, which has no task, already contains its origin.
            place = "" if task is None else table.place(result.worker, index, "fetching")
            if self._observer is not None:
                self._observer.raised(result.worker, result.seq, result.failure.exception)
            Raised(result.failure.to_exception(place)).throw()
        payload = result.payload
        if self._forwards and payload.count is not None and "notes" not in (result.extras or ()):
            return payload
        try:
            observer = self._observer
            if observer is None or (result.extras is None and not observer.opens_slowly):
                return payload.open()
            began = self._clock()
            value = payload.open()
            observer.opened(result.seq, began, self._clock())
            return value
        except Exception as error:
            raised = Raised(foreign(error))
        add_note(raised.error, table.place(result.worker, index, "loading the result of"))
        return raised.throw()

    # -- beginning and ending ------------------------------------------------------------------------

    def _forget(self, tasks: Iterable[int]) -> None:
        """Drop the indices of tasks that no worker will answer."""
        for seq in tasks:
            del self.table.tasks[seq]
            if self._flow is not None:
                self._flow.left(seq)

    def _close_for(self, fault: Fault) -> None:
        """End all because of a death, unless that was done."""
        if not self._death_report:
            refusal = "" if self._supervisor is None else self._supervisor.refusal
            self._death_report = self.table.death(fault, refusal)
        if not self._closing:
            self.close()

    def _check_process(self) -> None:
        if self._elsewhere:  # messages in it belong to the other process
            why = "belongs to the process that this one was forked from; make a new one"
            raise no_answer(IteratorClosed(f"this iterator {why}"))

    def _refuse(self) -> NoReturn:
        if self._scheduler.fault is not None:
            raise no_answer(WorkerDied(self._death_report))
        if self._ended:
            raise StopIteration
        raise no_answer(IteratorClosed(f"the iterator of stage {self.spec.stage!r} is closed"))

    def _check_wanted(self, epoch: int | None = None) -> None:
        if self._closing:
            self._refuse()
        if self._broken_off == self.epoch or (epoch is not None and epoch != self.epoch):
            over = f"this epoch of stage {self.spec.stage!r} was interrupted; make a new iterator"
            raise no_answer(IteratorClosed(over))

    def _use_crew(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call that uses crew and scheduler. `pull` has this written out: it is a call less."""
        # No separate context manager: an interrupt in its `__enter__` would leave the lock taken.
        with self._pulling:
            self._inside += 1
            try:
                return call(*arguments)
            except Exception:
                raise
            except BaseException:  # an interrupt may have dropped an event, so the state is unknown
                self._closing = True
                raise
            finally:
                self._inside -= 1
                if self._closing:
                    self._end()

    def _begin(self, source: Iterator[Any] | Feed, message: Begin, item: int) -> None:
        if self._scheduler.fault is not None:  # reported with a result that was returned before
            self._close_for(self._scheduler.fault)
        if self._closing:
            self._refuse()
        scheduler = self._scheduler
        self._ended = False
        absent = [i for i, w in enumerate(scheduler.workers) if w is WorkerState.ABSENT]
        _discard(scheduler.begin())
        self._forget(list(self.table.tasks))
        self.exhausted.clear()
        self._opened.clear()  # those of workers that were restarted in the epoch before
        self.epoch += 1
        self.table.position = [0] * len(scheduler.workers)  # shards are read from their beginning
        try:
            if self.epoch > 0 or self.spec.deferred:
                for worker in range(len(scheduler.workers)):
                    if worker not in absent:
                        self._crew.send(worker, message)
            if self._supervisor is not None:
                self._supervisor.begin(message, absent, first=self.epoch == 0)
        except Exception:  # some workers may not have begun this epoch
            self._closing = True
            raise
        self._error, self._item = None, item
        if isinstance(source, Iterator):
            self._source, self._feed = source, None
        else:
            self._source, self._feed = iter(()), source
        if self._eager and scheduler.free > 0:
            self._fill()
        self._crew.flush()

    def _modes(self) -> Modes | None:
        """Return the modes of this thread, for workers that are threads."""
        return modes_here() if self.backend.in_process and not self.backend.in_caller else None

    def _end_epoch(self) -> NoReturn:
        error, self._error = self._error, None
        self._ended = True
        if not self._persistent:
            self.close()
        if error is not None:
            raise error
        raise StopIteration

    def _end(self) -> None:
        """End all, unless a call uses the crew (it does so at its end) or `close` is still to follow."""
        if self._gone or self._inside or self._leaving:
            return
        _discard(self._scheduler.close())
        self._forget(list(self.table.tasks))
        self._source, self._feed = iter(()), None
        interrupt = sys.exc_info()[1]
        try:
            self._crew.close()  # not by the finalizer, which runs once: an interrupt may come here
        except KeyboardInterrupt:
            if not isinstance(interrupt, KeyboardInterrupt):
                raise
            return  # a second interrupt: the first is being raised, and the finalizer ends the rest
        self._finalizer.detach()
        self._gone = True


def _discard(results: Sequence[Result]) -> None:
    """Free the payloads of results that will not be returned."""
    for result in results:
        if isinstance(result, Done):
            result.payload.discard()


# -- observer of a stage: the one protocol for statistics, traces, watches and reports


class Observer(Protocol):
    """Observer of a stage: statistics, and a trace. A stage has one only if somebody asked for it.

    All methods are called on the thread that pulls the stage.
    """

    each: bool
    """True if it follows each task: results, waits and idle workers, in addition to meters'
    measures."""
    opens_slowly: bool
    """True if it follows the opening of each result, because the last one was slow to open."""

    @property
    def metering(self) -> Metering | None:
        """Specification of the meters of the stage's workers; None: they have no meters."""

    def idle(self, workers: int, *, starved: bool) -> None:
        """Note that `workers` are idle from now on: nothing came in (`starved`), or nothing went out."""

    def waited_for(self, began: float, ended: float) -> None:
        """Note that the thread that pulls the stage waited for events."""

    def came(self, event: Result, since: float) -> None:
        """Record a result, and remove the `Measures` from its extras.

        `since` is the time from which the consumer has waited for a result; infinity if it does not
        wait.
        """

    def opened(self, seq: int, began: float, ended: float) -> None:
        """Note how long it took to open a result, one that came with measures or any."""

    def replaced(self, worker: int, cause: str | None) -> None:
        """Note that another worker took the place of one that had died of `cause`."""

    def raised(self, worker: int, seq: int, error: BaseException) -> None:
        """Note that the error of a task is raised."""
