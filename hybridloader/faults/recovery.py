"""What a stage does about a worker that died or is stuck: another takes its place, if that is allowed.

The new worker has the number and the seed of the dead one, and is sent again just what that had in
hand, so that order and count of the results are as if nothing had happened. A sample at which workers
die again and again is given up: its place in its task is taken by what tells why, and the fetcher
treats that as a sample that raised. Never decides what becomes of an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridloader.diagnosis import given_up
from hybridloader.faults.restart import Deaths, RestartPolicy
from hybridloader.feed import is_sealed
from hybridloader.fetch import GivenUp, Spared
from hybridloader.messages import Exited, Task
from hybridloader.roster import Roster
from hybridloader.scheduler import Work


class Recovery:
    """Replaces the workers of one stage.

    Parameters
    ----------
    policy
        How often, and when a sample is given up.
    roster
        The stage's; the indices of tasks with such a sample are changed in it.
    """

    def __init__(self, policy: RestartPolicy, roster: Roster) -> None:
        self._roster, self._spec = roster, roster.spec
        self._scheduler, self._crew = roster.scheduler, roster.crew
        self._deaths = Deaths(policy)
        # All the other mutable state:
        self._shared_seed = roster.spec.shared_seed
        self._begun = False
        self.refusal = ""
        """Why the last worker that died was not replaced."""

    def begin(self, shared_seed: int | None) -> None:
        """An epoch begins."""
        if self._begun and self._spec.starts:  # those were of the first alone
            self._spec = replace(self._spec, starts=())
        self._begun = True
        self._shared_seed = shared_seed
        self._deaths.forget()

    def start(self, worker: int) -> None:
        """Start the new worker of a place: where the one before had got to."""
        self._roster.restarts[worker] += 1
        self._roster.since[worker] = self._roster.clock()
        spec = replace(
            self._spec, shared_seed=self._shared_seed, skip=self._roster.position[worker]
        )
        self._crew.start(worker, spec)
        self._crew.settle()

    def take_in(self, death: Exited) -> bool:
        """Replace the worker; False if its death is to be raised."""
        worker, scheduler = death.worker, self._scheduler
        if scheduler.workers[worker] is Work.STOPPING:
            return False
        blamed = self._blamed(death, scheduler.held(worker))
        deaths = 0 if blamed is None else self._deaths.count(blamed, death.at)
        deadly = deaths >= self._deaths.policy.deaths_per_sample
        self.refusal = self._refusal(deadly)
        if self.refusal:
            return False
        again = scheduler.replace(worker)
        if scheduler.workers[worker] is not Work.STARTING:
            return True  # it has nothing to do before the next epoch
        try:
            self.start(worker)
        except Exception as error:  # no process or thread can be had any more, for instance
            self.refusal = f"It could not be replaced: {error}"
            return False
        indices = self._roster.indices
        try:
            for seq in again:
                if deadly and seq == blamed:
                    indices[seq] = self._spared(indices[seq], death, deaths)
                self._crew.send(worker, Task(seq, indices[seq]))
        except Exception as error:  # no memory for a copy of it, for instance
            self.refusal = f"What it had in hand could not be given to another: {error}"
            return False
        return True

    # -- the parts -------------------------------------------------------------------------------

    def _refusal(self, deadly: bool) -> str:
        """Why the worker can't be replaced; empty if it can."""
        policy = self._deaths.policy
        if deadly and getattr(self._spec.fetch, "in_turn", False):
            return (
                f"{policy.deaths_per_sample} workers died at this place of their shard, which can't be "
                "read past it, so no other was put in its place."
            )
        if not self._deaths.may_restart(self._roster.clock()):
            return (
                f"{policy.max_restarts} workers of this stage were replaced within "
                f"{policy.window_seconds:g} seconds, and RestartPolicy allows no more.{self._never()}"
            )
        return ""

    def _never(self) -> str:
        """Hint at causes other than a sample; empty if a worker got ready: it may be a sample."""
        if self._roster.proven:
            return ""
        return (
            " None of them has ever got ready: what each does first ends it (imports, loading the "
            "dataset, worker_init_fn)."
        )

    def _blamed(self, death: Exited, held: Sequence[int]) -> int | None:
        """The task that the worker died of, as far as one can tell."""
        if self._scheduler.workers[death.worker] is Work.STARTING:
            return None  # it has not come to any
        if death.at is None:
            return held[0] if held else None
        return death.task if death.at >= 0 and death.task in held else None

    def _spared(self, index: Any, death: Exited, deaths: int) -> Any:
        """`index` without the sample that kills, or without all if it is not known which."""
        if not getattr(self._spec.fetch, "batched", True):
            return self._given_up(index, death, deaths)
        items = list(index.peek() if is_sealed(index) else index)
        chosen = range(len(items)) if death.at is None else (death.at,)
        for number in chosen:
            if number < len(items) and type(items[number]) is not GivenUp:
                items[number] = self._given_up(items[number], death, deaths)
        return Spared(items)

    def _given_up(self, item: Any, death: Exited, deaths: int) -> GivenUp:
        worker = self._roster.name(death.worker)
        at = death.at
        return GivenUp(item, given_up(self._spec.stage, worker, deaths, death.cause or "", at=at))
