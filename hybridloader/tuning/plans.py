"""Plans of workers, costs of stages, and the limits that no plan exceeds.

Nothing here reads a clock, starts a worker or knows a loader.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

FORKED, FRESH = 40 << 20, 250 << 20
"""Bytes of a worker process, forked and fresh: one of the latter loads the libraries of the dataset."""

IN_FLIGHT = 3
"""Results of a worker in memory: two that are asked for ahead, and the one that the loop has."""

OVERLAP = 3.0
"""Limit of workers that wait for a part of their time, as a multiple of those that keep all CPUs busy on
average: waits do not end in turn, so that with exactly as many, CPUs are idle at times."""

MOST_THREADS = 64
"""Threads of a stage, at most."""

IN_PROCESS = ("inline", "threads")


class Place(NamedTuple):
    """Workers of one stage."""

    backend: str
    workers: int
    """Number of workers; 0 inline."""
    threads: int = 1
    """Threads of each."""

    @property
    def processes(self) -> int:
        return 0 if self.backend in IN_PROCESS else self.workers

    @property
    def concurrent(self) -> int:
        """Threads that work at the same time."""
        return max(1, self.workers) * self.threads

    def __str__(self) -> str:
        if not self.workers:
            return "inline" + (f", {self.threads} threads" if self.threads > 1 else "")
        inside = f" x {self.threads} threads" if self.threads > 1 else ""
        return f"{self.backend} x {self.workers}{inside}"


INLINE = Place("inline", 0)

Plan = tuple[Place, ...]
"""A place for each stage."""


def price(plan: Plan) -> int:
    """Return a price by which plans that are as fast are ordered: threads, and ten for each process."""
    return sum(
        10 * place.processes + (0 if place == INLINE else place.concurrent) for place in plan
    )


def shown(plan: Plan) -> str:
    return "; ".join(map(str, plan))


@dataclass(frozen=True)
class Stage:
    """Stage to be placed.

    Attributes
    ----------
    name
        Name in tables, and that of its row in statistics.
    threads_inside
        True if `threads_per_worker` has an effect.
    shares_task
        True if the threads of a worker share one result, as those of a loader share a batch.
    only
        Backend of all its workers, if that is not to be chosen.
    """

    name: str
    threads_inside: bool = True
    shares_task: bool = False
    only: str | None = None

    def within(self, place: Place) -> Place:
        """Return `place` with the backend that is not to be chosen, if there is one."""
        return place if self.only is None else place._replace(backend=self.only)


@dataclass(frozen=True)
class Costs:
    """Cost of one result of a stage.

    Attributes
    ----------
    wall
        Seconds in one thread that works alone.
    cpu
        CPU seconds; None if not known.
    bytes
        Bytes of the result; 0 if not known.
    speedup
        Results that two threads make, as a multiple of those of one; None if not known.
    gil
        False on a Python whose threads run at the same time.
    """

    wall: float
    cpu: float | None = None
    bytes: int = 0
    speedup: float | None = None
    gil: bool = True

    @property
    def computing(self) -> float:
        """Share of the time that is CPU time, from 0.01 to 1; 1 if not known."""
        if self.cpu is None or self.wall <= 0:
            return 1.0
        return min(1.0, max(0.01, self.cpu / self.wall))

    @property
    def kind(self) -> str:
        """``"tiny"``, ``"waits"``, ``"mixed"``, ``"holds-gil"`` or ``"releases-gil"``."""
        if self.wall < TINY:
            return "tiny"
        if self.computing <= WAITS:
            return "waits"
        known = self.gil and self.speedup is not None
        # On busy cores a thread also waits for a core, and seems to wait for something else.
        if self.computing <= COMPUTES and not (
            known and self.computing > 0.5 and (self.speedup or 0.0) < ALONE
        ):
            return "mixed"
        holds = known and (self.speedup or 0.0) < SPEEDUP
        return "holds-gil" if holds else "releases-gil"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"kind": self.kind}


TINY = 100e-6
"""Seconds of a result below which handing it to a worker costs as much."""

WAITS, COMPUTES = 0.1, 0.8
"""Shares of CPU time up to which a stage waits, and from which on it computes."""

ALONE = 1.2
"""Speedup of two threads below which work that waits for less than half of the time holds the GIL."""

SPEEDUP = 1.4
"""Speedup of two threads from which on they are taken to release the GIL."""


@dataclass(frozen=True)
class Limits:
    """Limits of every plan that is tried.

    Attributes
    ----------
    cores
        CPUs; a fraction if a quota allows that.
    memory
        Bytes for results in flight and for worker processes.
    backends
        Backends that are offered.
    refused
        Reason for each backend that is not offered.
    """

    cores: float
    memory: int = 1 << 62
    backends: tuple[str, ...] = ("inline", "threads", "fork")
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole_cores(self) -> int:
        """Number of cores, rounded up."""
        return max(1, math.ceil(self.cores))

    def problem(
        self, plan: Plan, stages: tuple[Stage, ...], costs: tuple[Costs | None, ...]
    ) -> str | None:
        """Return the limit that `plan` exceeds, in words; None if it keeps all."""
        processes = sum(place.processes for place in plan)
        if processes > self.whole_cores:
            return f"{processes} processes, and {self.cores:g} CPUs"
        memory = 0
        for place, stage, cost in zip(plan, stages, costs, strict=True):
            if place.backend not in self.backends:
                return f"no {place.backend}: {self.refused.get(place.backend, 'not offered')}"
            if stage.only not in (None, place.backend):
                return f"{stage.name} is to have {stage.only}"
            if place.concurrent > self.most_concurrent(cost):
                return f"{place.concurrent} threads of {stage.name}, and {self.cores:g} CPUs"
            tasks = place.workers if stage.shares_task else place.concurrent
            memory += IN_FLIGHT * max(1, tasks) * (0 if cost is None else cost.bytes)
            memory += place.processes * (FORKED if place.backend == "fork" else FRESH)
        if memory > self.memory and plan != (INLINE,) * len(plan):
            return f"{memory >> 20} MB, and {self.memory >> 20} MB are allowed"
        return None

    def most_concurrent(self, costs: Costs | None) -> int:
        """Return the number of threads of a stage that are allowed, in all of its workers."""
        if costs is None:
            return max(2, self.whole_cores)  # two are needed to find out
        if costs.computing > COMPUTES:
            return self.whole_cores
        return min(MOST_THREADS, max(2, math.ceil(OVERLAP * self.whole_cores / costs.computing)))


def limits_here(cpus: float | None, memory: int | float) -> Limits:
    """Return the limits of this process: those given, within those of the machine and its ranks.

    Parameters
    ----------
    cpus
        CPUs at most; None: no other limit than affinity, quota and ranks.
    memory
        Share of this process's memory (a float up to 1), or bytes (an int).
    """
    from hybridloader.memory.limits import Memory, ranks_here
    from hybridloader.observe.cores import share

    own = share(ranks_here())
    offered, refused = _backends()
    return Limits(
        own if cpus is None else min(own, cpus),
        Memory(limit=memory).bytes(),
        offered,
        refused,
    )


def _backends() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the backends that this process can use, and why it can't use the others."""
    import multiprocessing

    from hybridloader._support.torch_env import device_in_use
    from hybridloader.backends.process.fork_safety import fork_hazard

    offered, refused = ["inline", "threads"], {}
    if multiprocessing.current_process().daemon:
        reason = "this is a daemonic process, which may have no children"
        return tuple(offered), dict.fromkeys(("fork", "spawn"), reason)
    if "fork" not in multiprocessing.get_all_start_methods():
        refused["fork"] = "this platform has no fork"
    elif (method := multiprocessing.get_start_method()) != "fork":
        refused["fork"] = f"the start method of multiprocessing is {method!r}"
    elif (device := device_in_use()) is not None:
        refused["fork"] = f"{device} is initialized, which does not survive a fork"
    elif (hazard := fork_hazard()) is not None:
        refused["fork"] = hazard.runs
    if "fork" in refused:
        offered.append("spawn")
    else:
        offered.append("fork")
        refused["spawn"] = "fork starts faster, and is safe here"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        offered.append("ray")
    else:
        refused["ray"] = "no cluster is connected"
    return tuple(offered), refused
