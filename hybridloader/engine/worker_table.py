"""Table of a stage's workers: the tasks of each, their start times, and the number of tasks done.

It holds counts and times, and makes error texts from them. The stage and its supervisor write to it and
make all decisions.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridloader._support.text import brief, table
from hybridloader.engine.contract import Crew, WorkerHandle
from hybridloader.engine.messages import Result, Task, WorkerSpec
from hybridloader.engine.scheduler import Fault, Scheduler
from hybridloader.engine.states import ACTIVE, WorkerState

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
        self.failed: Any = None  # index of the last task whose error was raised, if any

    def begin(self) -> None:
        """Begin an epoch: all shards are read from their beginning."""
        self.position = [0] * len(self.position)

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

    def report(self) -> list[WorkerReport]:
        now, handles = self.clock(), self.crew.handles()
        rows = []
        for worker, state in enumerate(self.scheduler.workers):
            held = self.scheduler.held(worker)
            handle = handles[worker] if worker < len(handles) else None
            rows.append(
                WorkerReport(
                    worker=worker,
                    name=handle.name if handle else "",
                    pid=handle.known_pid if handle else None,
                    state=_STATES.get(state, "busy" if held else "idle"),
                    done=self.answered[worker],
                    restarts=self.restarts[worker],
                    index=self.index(held),
                    seconds=now - self.since[worker] if held else None,
                )
            )
        return rows

    def index(self, held: Sequence[int]) -> Any:
        """Return the index of the first of these tasks; None if there is none."""
        task = self.tasks.get(held[0]) if held else None
        return None if task is None else task.index

    def name(self, worker: int) -> str:
        return name_of(self.crew.handles(), worker)

    def place(self, worker: int, index: Any, doing: str) -> str:
        """Return the origin of an exception, in one line."""
        return f"In stage {self.spec.stage!r}, {self.name(worker)}, {doing} {brief(index)}."

    def death_report(self, fault: Fault, refusal: str) -> str:
        stage, worker = self.spec.stage, fault.worker
        torchs = end_of(stage, self.crew.handles(), worker)
        indices = {seq: task.index for seq, task in self.tasks.items()}
        return self._with_table(torchs + death(stage, self.name(worker), fault, indices, refusal))

    def overrun(
        self, worker: int, seconds: float, timeout: float, stack: str, *, thread: bool
    ) -> str:
        """Word the error for a worker that is at one task for too long, and is not replaced."""
        held = self.scheduler.held(worker)
        index = self.index(held)
        stage, name = self.spec.stage, self.name(worker)
        return self._with_table(
            overrun(stage, name, index, seconds, timeout, stack=stack, thread=thread)
        )

    def lateness(self, timeout: float) -> str:
        sent = dict(self.scheduler.sent)  # a copy, as another thread may pull
        late_ones = sorted(sent)[:1] if self.scheduler.ordered else sorted(sent)
        workers = [self.name(sent[seq]) for seq in late_ones]
        held = "; ".join(brief(self.index([seq])) for seq in late_ones[:4])
        who = ", ".join(dict.fromkeys(workers)) or "no worker"
        words = (  # torch's words come first, for programs that match them
            f"{self.spec.stage} timed out after {timeout} seconds: no result came from {who}, which was "
            f"to fetch {held}. Call next() again to keep waiting, or set a larger timeout=; "
            f"backend='inline' under a debugger shows where it is stuck."
        )
        if late_ones:
            words = f"{words}\n{self.crew.stack(sent[late_ones[0]]).rstrip()}".rstrip()
        return self._with_table(words)

    def _with_table(self, words: str) -> str:
        return f"{words}\n{workers_table(self.report())}"


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


@dataclass(frozen=True)
class WorkerReport:
    """State of one worker of a stage, a row of `workers_table`."""

    worker: int
    name: str  # kind of the worker
    pid: int | None  # None before the process exists
    state: str
    done: int  # tasks answered by all workers of this number
    restarts: int  # restarts of the worker of this number
    index: Any  # index of its oldest task; None if it has none
    seconds: float | None  # seconds since it began that task; None if it has none


def name_of(handles: Sequence[WorkerHandle], worker: int) -> str:
    """Name a worker in errors: ``"worker 1 (process, pid 4711)"``, as far as it is known."""
    if worker >= len(handles):
        return f"worker {worker}"
    handle = handles[worker]
    pid = "" if handle.known_pid is None else f", pid {handle.known_pid}"
    return f"worker {worker} ({handle.name}{pid})"


def end_of(stage: str, handles: Sequence[WorkerHandle], worker: int) -> str:
    """Return the end of a worker process in torch's words, which programs match.

    They are from ``torch/csrc/DataLoader.cpp``, with the stage's name in place of "DataLoader". The text
    is empty if the worker is no process of this machine, or has not ended.
    """
    handle = handles[worker] if worker < len(handles) else None
    if handle is None or handle.known_pid in (None, os.getpid()) or handle.exitcode is None:
        return ""
    who, code = f"{stage} worker (pid {handle.known_pid})", handle.exitcode
    if not handle.code_known:
        return f"{who} exited unexpectedly. "
    if code >= 0:
        return f"{who} exited unexpectedly with exit code {code}. "
    try:
        return f"{who} is killed by signal: {signal.strsignal(-code)}. "
    except ValueError:  # a number without a signal on this platform
        return f"{who} is killed by signal: {-code}. "


def death(
    stage: str,
    worker: str,
    fault: Fault,
    indices: Mapping[int, Any],  # indices of the tasks, by number
    refusal: str = "",  # reason why it was not restarted
) -> str:
    """Word the error for a worker that ended without being asked to."""
    event = fault.event
    held = [brief(indices.get(seq)) for seq in fault.in_flight]
    tasks = f"It was to fetch {'; '.join(held[:4])}" if held else "It had no task"
    more = f"; and {len(held) - 4} tasks more" if len(held) > 4 else ""
    advice = _advice(fault.cause)
    # The kernel's report is more exact than the guess.
    if event.memory and "SIGKILL" in fault.cause:
        advice = (
            "If it is memory: try fewer workers, or backend='threads', which shares one copy of the "
            "dataset."
        )
    elif event.memory and "SIGBUS" in fault.cause:
        advice = ""
    full = "" if event.slots is None else "Its slots took {:,} of {:,} bytes.".format(*event.slots)
    sample = "" if event.task is None else sample_at(indices.get(event.task), event.at)
    parts = [f"In stage {stage!r}, {worker} {fault.cause}.", f"{tasks}{more}.", sample]
    parts += [refusal, advice, full]
    lines = [" ".join(part for part in parts if part)]
    lines += [event.memory.strip("\n"), event.evidence.strip("\n")]
    return "\n".join(line for line in lines if line)


def _advice(cause: str) -> str:
    return next((text for word, text in _ADVICE.items() if word in cause), "")


def sample_at(index: Any, at: int | None) -> str:
    """Name sample number `at` of a task: ``"It was at sample 2 of [7, 3, 9]: 9."``.

    The text is empty if it is not known which sample it was.
    """
    if at is None or at < 0 or index is None:
        return ""
    inside = isinstance(index, (list, tuple)) and at < len(index)
    which = f": {brief(index[at])}" if inside else ""
    return f"It was at sample {at} of {brief(index)}{which}."


def overrun(
    stage: str,
    worker: str,
    index: Any,
    seconds: float,  # seconds of the task so far
    timeout: float,
    *,
    stack: str = "",  # stack of the worker, or the reason why there is none; on separate lines
    thread: bool = False,  # the worker is a thread of this process
) -> str:
    """Word the error for a task that took longer than `task_timeout`, its worker not replaced."""
    if thread:
        fate = (
            "A thread can't be killed: it finishes its sample, and the result is dropped. "
            "Workers that are processes can be killed and restarted: backend='fork', 'spawn' or "
            "'shared-memory' with on_worker_death='restart'."
        )
    else:
        fate = "It was killed; on_worker_death='restart' would restart it and continue."
    sentences = [
        f"In stage {stage!r}, {worker} has been at {brief(index)} for {_seconds(seconds)}, "
        f"longer than task_timeout={timeout:g} seconds.",
        fate,
        "If such a task may take that long, raise task_timeout.",
    ]
    text = " ".join(sentences)
    return f"{text}\n{stack.strip(chr(10))}" if stack.strip() else text


def given_up(stage: str, worker: str, deaths: int, cause: str, *, at: int | None = None) -> str:
    """Word the error in place of a sample, or of a task, that has killed workers again and again.

    `worker` is the last that died, of `cause`; `at` is None if it is not known at which sample.
    """
    workers = "1 worker" if deaths == 1 else f"{deaths} workers"
    what = "at this sample" if at is not None else "at a task that contains this sample"
    return (
        f"In stage {stage!r}, {workers} died {what}, so it was given up; "
        f"the last one, {worker}, {cause}. {_advice(cause)}".rstrip()
    )


def workers_table(rows: Sequence[WorkerReport]) -> str:
    """Return a heading and one line for each worker; empty without rows."""
    if not rows:
        return ""
    heading = ("worker", "where", "pid", "state", "done", "restarts", "for", "task")
    return "\n".join(table([heading, *map(_cells, rows)], left=(0, 1, len(heading) - 1)))


_MOST = 40  # characters of a task in the table


def _cells(row: WorkerReport) -> tuple[str, ...]:
    spent = task = "-"
    if row.seconds is not None:
        spent, task = _seconds(row.seconds), " ".join(brief(row.index).split())
        task = task if len(task) <= _MOST else f"{task[: _MOST - 3]}..."
    pid = "-" if row.pid is None else str(row.pid)
    counts = f"{row.done:,}", f"{row.restarts:,}"
    return str(row.worker), row.name, pid, row.state, *counts, spent, task


def _seconds(seconds: float) -> str:
    """Word a time: ``"0.42 s"``, ``"12.3 s"``, ``"5 min 7 s"``, ``"2 h 3 min"``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
