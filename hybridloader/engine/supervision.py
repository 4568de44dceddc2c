"""Supervision of a stage's workers: it restarts workers that die and kills those that exceed their time.

A restarted worker has the number and the seed of the dead one and gets its unanswered tasks. So order
and number of the results do not change. A sample at which workers die repeatedly is given up: a
`GivenUp` replaces it in the task, and the fetcher treats it as a sample that raised. Error policies, not
this module, decide how an error is handled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridloader._support.text import INFO, log
from hybridloader._support.user_objects import no_answer, text_of
from hybridloader.engine.feed import is_forwarded
from hybridloader.engine.fetcher import GivenUp, PartlyGivenUp
from hybridloader.engine.messages import Begin, Exited
from hybridloader.engine.restart import RestartPolicy
from hybridloader.engine.states import WorkerState
from hybridloader.engine.worker_table import START, WorkerTable, given_up
from hybridloader.errors import TaskTimeout

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
        try:
            self._start(worker)
        except Exception as error:  # for example, no further process or thread can be started
            self.refusal = f"It could not be restarted: {text_of(error)}"
            return False
        log(INFO, "stage %r: worker %d was restarted", self._spec.stage, worker)
        tasks = self._table.tasks
        try:
            for seq in again:
                if deadly and seq == blamed:
                    spared = self._spared(tasks[seq].index, death, count)
                    tasks[seq] = tasks[seq]._replace(index=spared)
                self._crew.send(worker, tasks[seq])
        except Exception as error:  # for example, no memory for a copy of a task
            self.refusal = f"Its tasks could not be sent to the restarted worker: {text_of(error)}"
            return False
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
        if not self._spec.fetch.batched:
            return self._given_up(index, death, deaths)
        items = list(index.peek() if is_forwarded(index) else index)
        chosen = range(len(items)) if death.at is None else (death.at,)
        for number in chosen:
            if number < len(items) and type(items[number]) is not GivenUp:
                items[number] = self._given_up(items[number], death, deaths)
        return PartlyGivenUp(items)

    def _given_up(self, item: Any, death: Exited, deaths: int) -> GivenUp:
        worker = self._table.name(death.worker)
        at = death.at
        return GivenUp(item, given_up(self._spec.stage, worker, deaths, death.cause or "", at=at))

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
            text = self._table.overrun(worker, seconds, self._timeout, stack, thread=self._threads)
            raise no_answer(TaskTimeout(text))
        what = "its task ran over"
        if self._scheduler.workers[worker] is not WorkerState.READY:
            what = f"it was not ready after {START:g} seconds more than"
        why = f"was killed because {what} task_timeout={self._timeout:g} seconds"
        self._killed[worker] = why, stack
        # So that it is not killed twice for one task.
        self._table.since[worker] = self._table.clock()
        self._crew.kill(worker)
