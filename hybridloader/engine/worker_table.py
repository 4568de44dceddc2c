"""The table of a stage's workers: what each has in hand, since when, and what it has done.

Counts, times and the words that errors make of them. The stage and its supervisor write down what they
hear and do; the table decides nothing and commands nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hybridloader.engine.contract import Crew
from hybridloader.engine.diagnosis import (
    WorkerReport,
    death,
    end_of,
    late,
    name_of,
    overrun,
    place,
    workers_table,
)
from hybridloader.engine.messages import Result, WorkerSpec
from hybridloader.engine.scheduler import ACTIVE, Fault, Scheduler, WorkerState

START = 30.0
"""Seconds that a worker may take to get ready where tasks are timed: a fresh process that imports torch
needs two, and ten times that on a machine that has too much to do."""


class WorkerTable:
    """The workers of one stage.

    Attributes
    ----------
    indices
        Of the tasks that are not yet handed out, by their numbers.
    since
        When each began with what it has in hand, or last had nothing. Seconds, of `clock`.
    answered
        Tasks that each place has answered, over all workers that had it.
    position
        How far each is in its shard of this epoch, in samples.
    restarts
        How often each place was given to another worker.
    proven
        Whether any worker has ever got ready.
    failed
        Index of the last task that was handed out as an error; None if the error was of no task.
    """

    def __init__(
        self, spec: WorkerSpec, scheduler: Scheduler, crew: Crew, clock: Callable[[], float]
    ) -> None:
        workers = len(scheduler.workers)
        self.spec, self.scheduler, self.crew, self.clock = spec, scheduler, crew, clock
        # All the mutable state:
        self.indices: dict[int, Any] = {}
        self.since = [clock()] * workers
        self.answered = [0] * workers
        self.position = [0] * workers
        self.restarts = [0] * workers
        self.proven = False
        self.failed: Any = None

    def begin(self) -> None:
        """An epoch begins: all shards are read from their beginning."""
        self.position = [0] * len(self.position)

    def take_in(self, results: Iterable[Result]) -> None:
        """Note results that workers reported, of this epoch or of one before."""
        now, first = self.clock(), self.scheduler.first
        for result in results:
            worker = result.worker
            self.since[worker] = now
            self.answered[worker] += 1
            if result.seq >= first:
                self.position[worker] = result.position

    def ready(self, worker: int) -> None:
        """Note that a worker can begin with its tasks."""
        self.since[worker] = self.clock()
        self.proven = True

    def replaced(self, worker: int) -> None:
        """Note that the place of a worker is given to another."""
        self.since[worker] = self.clock()
        self.restarts[worker] += 1

    def longest(self) -> tuple[float, int] | None:
        """Who has been at one task for longest: the seconds and the worker; None if nobody is.

        To start is no task: of a worker that has yet to get ready, only what it takes beyond `START`
        seconds counts.
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
        """A line for each worker; from any thread."""
        now, handles = self.clock(), self.crew.handles()
        lines = []
        for worker, state in enumerate(self.scheduler.workers):
            held = self.scheduler.held(worker)
            handle = handles[worker] if worker < len(handles) else None
            lines.append(
                WorkerReport(
                    worker=worker,
                    name=handle.name if handle else "",
                    pid=handle.pid if handle else None,
                    state=_STATES.get(state, "busy" if held else "idle"),
                    done=self.answered[worker],
                    restarts=self.restarts[worker],
                    index=self.indices.get(held[0]) if held else None,
                    seconds=now - self.since[worker] if held else None,
                )
            )
        return lines

    def name(self, worker: int) -> str:
        return name_of(self.crew.handles(), worker)

    def place(self, worker: int, index: Any, doing: str) -> str:
        """Where an exception came from."""
        return place(self.spec.stage, self.name(worker), index, doing)

    def death_report(self, fault: Fault, refusal: str) -> str:
        """What to say of a worker that has died and was not replaced."""
        stage, worker = self.spec.stage, fault.worker
        torchs = end_of(stage, self.crew.handles(), worker)
        words = death(stage, self.name(worker), fault, self.indices, refusal)
        return self._with_table(torchs + words)

    def overrun(
        self, worker: int, seconds: float, timeout: float, stack: str, *, thread: bool
    ) -> str:
        """What to say of a worker that is at one task for too long, and is not replaced."""
        held = self.scheduler.held(worker)
        index = self.indices.get(held[0]) if held else None
        words = overrun(
            self.spec.stage,
            self.name(worker),
            index,
            seconds,
            timeout,
            stack=stack,
            thread=thread,
        )
        return self._with_table(words)

    def lateness(self, timeout: float) -> str:
        """What to say when no result has come for `timeout` seconds."""
        sent = dict(self.scheduler.sent)  # another thread may be pulling
        late_ones = sorted(sent)[:1] if self.scheduler.ordered else sorted(sent)
        workers = [self.name(sent[seq]) for seq in late_ones]
        indices = [self.indices.get(seq) for seq in late_ones]
        words = late(self.spec.stage, workers, indices, timeout)
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
