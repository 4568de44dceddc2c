"""Search for the plan of workers: pure decisions, from measured trials to the next plan to try.

The search first sees one thread and two, from which follow the costs of each stage. From these follow
first plans; then neighbors of the best one are tried, with more and with fewer workers, until none is
better by more than the noise. It never proposes a plan beyond the limits. No clock, no thread.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# -- Plans of workers, costs of stages, and the limits that no plan exceeds.
#
# Nothing here reads a clock, starts a worker or knows a loader.


FORKED, FRESH = 40 << 20, 250 << 20
"""Bytes of a worker process, forked and fresh: one of the latter loads the libraries of the dataset."""

IN_FLIGHT = 3
"""Results of a worker in memory: two that are asked for ahead, and the one that the loop has."""

OVERLAP = 3.0
"""Limit of workers that wait for a part of their time, as a multiple of those that keep all CPUs busy on
average: waits do not end in turn, so that with exactly as many, CPUs are idle at times."""

MOST_THREADS = 64  # threads of a stage, at most

IN_PROCESS = ("inline", "threads")


class Place(NamedTuple):
    """Workers of one stage."""

    backend: str
    workers: int  # number of workers; 0 inline
    threads: int = 1  # threads of each

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

Plan = tuple[Place, ...]  # a place for each stage


def price(plan: Plan) -> int:
    """Return a price by which plans that are as fast are ordered: threads, and ten for each process."""
    return sum(
        10 * place.processes + (0 if place == INLINE else place.concurrent) for place in plan
    )


def shown(plan: Plan) -> str:
    return "; ".join(map(str, plan))


@dataclass(frozen=True)
class Stage:
    """Stage to be placed."""

    name: str  # name in tables, and that of its row in statistics
    threads_inside: bool = True  # True if `threads_per_worker` has an effect
    shares_task: bool = False
    """True if the threads of a worker share one result, as those of a loader share a batch."""


@dataclass(frozen=True)
class Costs:
    """Cost of one result of a stage."""

    wall: float  # seconds in one thread that works alone
    cpu: float | None = None  # CPU seconds; None if not known
    bytes: int = 0  # bytes of the result; 0 if not known
    speedup: float | None = None
    """Results that two threads make, as a multiple of those of one; None if not known."""
    gil: bool = True  # False on a Python whose threads run at the same time
    load: float = 0.0  # busy share of the workers in the trial that found this, from 0 to 1

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
        least = ALONE if self.computing <= COMPUTES else SPEEDUP
        holds = self.gil and self.speedup is not None and self.speedup < least
        # On busy cores a thread also waits for a core, and seems to wait for something else.
        if self.computing <= COMPUTES and not (holds and self.computing > 0.5):
            return "mixed"
        return "holds-gil" if holds else "releases-gil"


TINY = 100e-6  # seconds of a result below which handing it to a worker costs as much

WAITS, COMPUTES = 0.1, 0.8
"""Shares of CPU time up to which a stage waits, and from which on it computes."""

ALONE = 1.2
"""Speedup of two threads below which work that waits for less than half of the time holds the GIL."""

SPEEDUP = 1.4  # speedup of two threads from which on they are taken to release the GIL


@dataclass(frozen=True)
class Limits:
    """Limits of every plan that is tried."""

    cores: float  # CPUs; a fraction if a quota allows that
    memory: int = 1 << 62  # bytes for results in flight and for worker processes
    backends: tuple[str, ...] = ("inline", "threads", "fork")  # backends that are offered
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reason for each backend that is not offered."""

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


MEMORY = 0.5  # share of this process's memory that a plan may take


def limits_here(
    start: Plan = (),  # plan of the user, whose backends are offered, too, unless they are not safe here
) -> Limits:
    """Return the limits of this process, within those of the machine and its ranks."""
    from hybridloader.memory.limits import Memory, ranks_here
    from hybridloader.observe.measures import share

    offered, refused = _backends()
    safe = {place.backend for place in start if place.backend != "fork" or "fork" not in refused}
    return Limits(
        share(ranks_here()),
        Memory(limit=MEMORY).bytes(),
        (*offered, *sorted(safe.difference(offered))),
        {name: why for name, why in refused.items() if name not in safe},
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


NOISE = 0.03  # least difference of two medians, as a share, that counts

CLOSE = 0.05  # share by which a cheaper plan may be slower than the fastest, at most, and be chosen

FIRST = 32  # threads of the first plan for a stage that waits, at most; the search may go beyond

KEEPS_UP = 0.95  # share of the rate asked for from which on a plan keeps up with it


@dataclass(frozen=True)
class Trial:
    """Measurement of one plan."""

    plan: Plan  # places of the stages
    rates: tuple[float, ...] = ()
    """Results a second, of consecutive parts of the trial; empty if it failed."""
    stages: tuple[Costs | None, ...] = ()  # costs of each stage; empty if they are not known
    error: str | None = None  # reason for which it failed, in one line

    @property
    def rate(self) -> float:
        """Median of the rates; 0 if it failed."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def noise(self) -> float:
        """Standard error of the median, as a share of it, from the median deviation; 1 for one rate."""
        if len(self.rates) < 2 or self.rate <= 0:
            return 1.0
        deviation = statistics.median(abs(rate - self.rate) for rate in self.rates)
        # 1.4826: deviation of a normal distribution; 1.2533: error of a median against a mean.
        return 1.4826 * 1.2533 * deviation / math.sqrt(len(self.rates)) / self.rate


@dataclass
class Search:
    """Search over plans: iterate `plans`, measure each, and `note` it before the next."""

    stages: tuple[Stage, ...]  # stages to be placed
    start: Plan  # plan as the user has it
    limits: Limits  # limits of every plan that is proposed
    gil: bool = True  # False on a Python whose threads run at the same time
    target: float | None = None
    """Results a second that are enough; None: the more the better. May be set during the search."""
    trials: dict[Plan, Trial] = field(default_factory=dict)
    costs: tuple[Costs | None, ...] = ()
    given: tuple[Plan, ...] = ()  # the only plans to measure, if that is no search
    refused: str | None = None
    """Limit that the plan of the user exceeds, in words; None if it keeps all."""

    def __post_init__(self) -> None:
        self.costs = self.costs or (None,) * len(self.stages)

    # -- trials --------------------------------------------------------------------------------------

    def note(self, trial: Trial) -> None:
        """Take the measurement of a plan; a second one of a plan is joined to the first."""
        known = self.trials.get(trial.plan)
        if known is not None and trial.error is None:
            trial = replace(known, rates=known.rates + trial.rates)
        self.trials[trial.plan] = trial

    @property
    def good(self) -> list[Trial]:
        """Trials that did not fail, the fastest first.

        A plan that was tried before the bytes of a result were known, and exceeds the memory, is left
        out, unless there is no other.
        """
        good = [trial for trial in self.trials.values() if trial.rates]
        within = [trial for trial in good if self._problem(trial.plan) is None]
        return sorted(within or good, key=lambda trial: -trial.rate)

    def keeps_up(self, trial: Trial) -> bool:
        """Return True if a rate is asked for, and this trial reached it."""
        return self.target is not None and trial.rate >= KEEPS_UP * self.target

    @property
    def best(self) -> Trial | None:
        """Chosen trial: the cheapest that keeps up, else the cheapest as fast as the fastest."""
        good = self.good
        found = [trial for trial in good if self.keeps_up(trial)]
        if not found:
            for trial in good:
                less = min(CLOSE, max(0.02, good[0].noise + trial.noise))
                if trial.rate >= good[0].rate * (1 - less):
                    found.append(trial)
        return min(found, key=lambda t: (price(t.plan), -t.rate), default=None)

    def better(self, one: Trial, other: Trial) -> bool:
        """Return True if `one` is better than `other` by more than the noise, or as good and cheaper."""
        if self.keeps_up(one) or self.keeps_up(other):
            if self.keeps_up(one) and self.keeps_up(other):
                return price(one.plan) < price(other.plan)
            return self.keeps_up(one)
        noise = max(NOISE, min(0.3, one.noise) + min(0.3, other.noise))
        return one.rate > other.rate * (1 + noise)

    # -- proposals -----------------------------------------------------------------------------------

    def plans(self) -> Iterator[Plan]:
        """Yield the plans to measure; each is noted before the next is asked for."""
        if self.given:
            yield from self.given
        else:
            yield from self._opening()
            for process in dict.fromkeys((self._process_backend(), None)):
                if self._is_open(plan := self._first(process)):
                    yield plan
            within = any(t.rates and self._problem(t.plan) is None for t in self.trials.values())
            if not within and self._is_open(plan := self._all(INLINE)):
                yield plan
            yield from self._climb()
        # The plans that lead once more, so that no lucky trial decides.
        leaders = dict.fromkeys(trial.plan for trial in (*self.good[:2], self.best) if trial)
        if len(leaders) > 1:
            yield from leaders

    def _opening(self) -> Iterator[Plan]:
        """Yield the plans from which follow the costs."""
        ones, twos = self._all(Place("threads", 1)), self._all(Place("threads", 2))
        processes = any(place.processes for place in self.start)
        # A worker process that dies leaves this one alive, so a plan with processes is the first.
        for plan in (self.start, ones, twos) if processes else (ones, twos, self.start):
            if plan in self.trials:
                continue
            problem = self._problem(plan)
            if problem is None:
                yield plan
            elif plan == self.start:
                self.refused = problem
            self._learn(ones, twos)

    def _climb(self) -> Iterator[Plan]:
        """Yield neighbors of the best plan, until none is better than it."""
        base = self.best
        while base is not None:
            for plan in self._neighbors(base):
                if not self._is_open(plan):
                    continue
                yield plan
                trial = self.trials.get(plan)
                if trial is not None and trial.rates and self.better(trial, base):
                    base = trial
                    break
            else:
                return

    def _all(self, place: Place) -> Plan:
        """Return a plan with `place` for each stage."""
        return (place,) * len(self.stages)

    def _problem(self, plan: Plan) -> str | None:
        """Return the limit that `plan` exceeds, in words; None if it keeps all."""
        return self.limits.problem(plan, self.stages, self.costs)

    def _is_open(self, plan: Plan) -> bool:
        """Return True if a plan may be tried: within the limits, not tried, no backend that failed."""
        return (
            plan not in self.trials
            and self._problem(plan) is None
            and not any(self._failed(place.backend) for place in plan)
        )

    def _failed(self, backend: str) -> bool:
        """Return True if every trial with workers of `backend` failed."""
        tried = [t for t in self.trials.values() if any(p.backend == backend for p in t.plan)]
        return bool(tried) and all(trial.error is not None for trial in tried)

    def _learn(self, ones: Plan, twos: Plan) -> None:
        """Work out the costs of the stages from one thread, two threads, or the plan as it was."""
        one, two = self.trials.get(ones), self.trials.get(twos)
        source = one if one is not None and one.rates else self.trials.get(self.start)
        if source is None or not source.stages:
            return
        found = list(self.costs)
        if source is not one or two is None or not two.rates or self.limits.cores < 1.5:
            two = None
        for at, cost in enumerate(source.stages):
            if cost is None:
                continue
            speedup = None
            if two is not None and len(self.stages) == 1:
                speedup = two.rate / source.rate
            elif two is not None and two.stages:
                second = two.stages[at]
                if second is not None and second.wall > 0:
                    speedup = 2 * cost.wall / second.wall
            known = cost.cpu if source.plan[at].threads == 1 else None
            found[at] = replace(cost, cpu=known, speedup=speedup, gil=self.gil)
        self.costs = tuple(found)

    def _first(self, process: str | None) -> Plan:
        """Return the plan that follows from the costs, with fewer workers where a limit asks for it.

        `process` is the backend of its processes; None: it has none.
        """
        plan = tuple(
            self._first_place(stage, cost, process)
            for stage, cost in zip(self.stages, self.costs, strict=True)
        )
        while self._problem(plan) is not None:
            widest = max(range(len(plan)), key=lambda at: (plan[at].workers, plan[at].threads))
            place = plan[widest]
            if place.threads > 1:
                place = place._replace(threads=place.threads // 2)
            elif place.workers > 1:
                place = place._replace(workers=place.workers - 1)
            else:
                break
            plan = (*plan[:widest], place, *plan[widest + 1 :])
        return plan

    def _first_place(self, stage: Stage, cost: Costs | None, process: str | None) -> Place:
        """Return the workers that follow from the kind of the work."""
        cores = self.limits.whole_cores
        if cost is None:
            return Place("threads", max(2, cores))
        if cost.kind == "tiny":
            return INLINE
        several = math.ceil(cores / cost.computing)
        waiting = max(2, min(several, FIRST, self.limits.most_concurrent(cost)))
        threads = {"waits": waiting, "mixed": waiting, "releases-gil": cores, "holds-gil": 1}
        place = Place("threads", threads[cost.kind])
        if process is not None and cost.kind in ("mixed", "holds-gil"):
            within = cost.kind == "mixed" and stage.threads_inside
            place = Place(process, cores, math.ceil(1 / cost.computing) if within else 1)
        return place

    def _process_backend(self) -> str | None:
        """Return the backend of processes that is offered and works."""
        mine = [place.backend for place in self.start if place.processes]
        for name in (*mine, "fork", "spawn", "ray"):
            if name in self.limits.backends and not self._failed(name):
                return name
        return None

    def _neighbors(self, trial: Trial) -> Iterator[Plan]:
        """Yield plans beside that of `trial`: those of its busiest stage first."""
        cheaper = self.keeps_up(trial)  # only cheaper ones are of use
        loads = [0.0 if cost is None else cost.load for cost in trial.stages or self.costs]
        for at in sorted(range(len(loads)), key=lambda at: -loads[at]):
            for place in self._beside(trial.plan[at], self.stages[at]):
                plan = (*trial.plan[:at], place, *trial.plan[at + 1 :])
                if not cheaper or price(plan) < price(trial.plan):
                    yield plan

    def _beside(self, place: Place, stage: Stage) -> Iterator[Place]:
        """Yield places with more and with fewer workers, other threads in each, and other backends."""
        workers, threads = place.workers, place.threads
        if workers:
            quarter = max(1, workers // 4)
            near = [(2 * workers, threads), (workers // 2, threads), (workers - quarter, threads)]
            if stage.threads_inside:
                near += [
                    (workers, 2 * threads),
                    (workers, threads // 2),
                    (workers // 2, 2 * threads),
                ]
            for several, each in (*near, (workers + quarter, threads)):
                if several and each:
                    yield place._replace(workers=several, threads=each)
        process, cores = self._process_backend(), self.limits.whole_cores
        if place.processes or not workers:
            yield Place("threads", place.concurrent)
        if not place.processes and process is not None:
            count = min(cores, max(1, workers))
            yield Place(process, cores)
            yield Place(process, count, place.concurrent // count if stage.threads_inside else 1)
        yield INLINE

    # -- the choice in words -------------------------------------------------------------------------

    def reason(self) -> str:
        """Return a sentence about why the best plan was chosen."""
        best = self.best
        assert best is not None
        kinds = ", ".join(
            f"{stage.name}: {_WORDS[cost.kind]}"
            for stage, cost in zip(self.stages, self.costs, strict=True)
            if cost is not None
        )
        fastest = self.good[0]
        if self.keeps_up(best):
            why = f"it is the cheapest that keeps up with {self.target:,.1f}/s"
        elif self.target is not None:
            why = f"it comes closest to {self.target:,.1f}/s, with which none keeps up"
        elif best is fastest:
            why = "it is the fastest"
        else:
            why = f"it is as fast as {shown(fastest.plan)} within the noise, and cheaper"
        return f"{shown(best.plan)}: {why}." + (f" {kinds}." if kinds else "")


_WORDS = {
    "tiny": "takes less time than sending it to a worker",
    "waits": "waits (for a disk, a network, a lock)",
    "mixed": "waits and computes",
    "holds-gil": "computes and holds the GIL",
    "releases-gil": "computes, and its threads work at the same time",
}
