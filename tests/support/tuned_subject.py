"""Subject of a tuning whose results cost what a test has scripted, on a clock that the test moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hybridloader.loader.dataloader import Auto
from hybridloader.tuning import tune as choosing
from hybridloader.tuning.planner import INLINE, Costs, Limits, Place, Plan, Stage, Trial, price
from hybridloader.tuning.subjects import (
    Empty,
    LoaderSubject,
    Running,
    Subject,
    subject_of,
)
from hybridloader.tuning.tune import Tuner, Tuning
from support.manual_clock import Clock

__all__ = ["INLINE", "Auto", "Empty", "Limits", "LoaderSubject", "Place", "Trial"]
__all__ += ["Tuner", "Tuning", "choosing", "price", "subject_of"]
"""Parts of the inside, which tests of tuning import from here alone."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one result: waiting, computing without the GIL and with it, and under one lock.

    `sending` is CPU time that a process takes more, `crowd` the share by which each thread more under
    the lock makes it longer.
    """

    waiting: float = 0.0
    free: float = 0.0
    held: float = 0.0
    locked: float = 0.0
    sending: float = 0.0
    crowd: float = 0.0
    handing: float = 20e-6

    def rate(self, plan: Plan, cores: float, at: int = 0) -> float:
        """Return results a second of one stage alone."""
        place = plan[at]
        together, groups = place.concurrent, max(1, place.processes)
        cpu = self.free + self.held + (self.sending if place.processes else 0.0)
        cpu += 0.0 if place.backend == "inline" else self.handing
        locked = self.locked * (1 + self.crowd * (together - 1))
        alone = self.waiting + cpu + locked
        bounds = [together / alone, cores / max(cpu, 1e-9)]
        if self.held:
            bounds.append(groups / self.held)
        if locked:
            bounds.append(1 / locked)
        return min(bounds)


class _Running(Running):
    def __init__(self, subject: Scripted, plan: Plan) -> None:
        self._subject, self._plan = subject, plan

    def __next__(self) -> Any:
        subject = self._subject
        subject.given += 1
        if subject.on_next is not None:
            subject.on_next(self._plan)
        subject.clock.now += 1 / subject.rate(self._plan)
        return subject.given

    def stages(self) -> tuple[Costs | None, ...]:
        found: list[Costs | None] = []
        for at, cost in enumerate(self._subject.costs):
            together = self._plan[at].concurrent
            alone = cost.rate(self._plan, self._subject.cores, at)
            busy = together / alone
            load = min(1.0, self._subject.rate(self._plan) / alone)
            cpu = cost.free + cost.held
            found.append(Costs(busy, cpu, self._subject.bytes, load=load))
        return tuple(found)


@dataclass
class Scripted(Subject):
    """Stages with scripted costs; the plans that were opened are in `opened`."""

    costs: tuple[Cost, ...]
    start: Plan
    cores: float = 4.0
    bytes: int = 1000
    on_next: Callable[[Plan], None] | None = None
    on_open: Callable[[Plan], None] | None = None
    closing: float = 0.0  # seconds in which the workers of any plan end
    clock: Clock = field(default_factory=Clock)
    name: str = "Scripted"
    unit: str = "batches"
    opened: list[Plan] = field(default_factory=list)
    running: int = 0
    given: int = 0

    def __post_init__(self) -> None:
        self.stages = tuple(Stage(f"stage {at}") for at in range(len(self.costs)))

    def rate(self, plan: Plan) -> float:
        return min(cost.rate(plan, self.cores, at) for at, cost in enumerate(self.costs))

    @contextlib.contextmanager
    def open(self, plan: Plan, timeout: float) -> Iterator[Running]:
        self.opened.append(plan)
        if self.on_open is not None:
            self.on_open(plan)
        self.running += 1
        try:
            yield _Running(self, plan)
        finally:
            self.clock.now += self.closing
            self.running -= 1

    def apply(self, plan: Plan) -> Any:
        return plan

    def code(self, plan: Plan) -> str:
        return repr(plan)
