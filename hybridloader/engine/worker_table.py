"""Table of a stage's workers: the tasks of each, their start times, and the number of tasks done.

It holds counts and times, and makes error texts from them. The stage and its supervisor write to it and
make all decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridloader._support.text import brief
from hybridloader.engine.contract import Crew
from hybridloader.engine.diagnosis import (
    WorkerReport,
    death,
    end_of,
    name_of,
    overrun,
    workers_table,
)
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
