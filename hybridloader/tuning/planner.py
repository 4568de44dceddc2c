"""Search for the plan of workers: pure decisions, from measured trials to the next plan to try.

The search first sees one thread and two, from which follow the costs of each stage. From these follow
first plans; then neighbors of the best one are tried, with more and with fewer workers, until none is
better by more than the noise. It never proposes a plan beyond the limits. No clock, no thread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridloader.tuning.plans import INLINE, Costs, Limits, Place, Plan, Stage, price, shown

NOISE = 0.03
"""Least difference of two medians, as a share, that counts."""

CLOSE = 0.05
"""Share by which a cheaper plan may be slower than the fastest, at most, and be chosen."""

FIRST = 32
"""Threads of the first plan for a stage that waits, at most; the search may go beyond."""

KEEPS_UP = 0.95
"""Share of the rate asked for from which on a plan keeps up with it."""


@dataclass(frozen=True)
class StageTrial:
    """Figures of one stage in a trial, for one result: seconds, CPU seconds, bytes; and the load."""

    busy: float
    cpu: float | None = None
    bytes: int = 0
    load: float = 0.0


@dataclass(frozen=True)
class Trial:
    """Measurement of one plan.

    Attributes
    ----------
    plan
        Places of the stages.
    rates
        Results a second, of consecutive parts of the trial; empty if it failed.
    stages
        Figures of each stage; empty if they are not known.
    error
        Reason for which it failed, in one line.
    """

    plan: Plan
    rates: tuple[float, ...] = ()
    stages: tuple[StageTrial | None, ...] = ()
    error: str | None = None

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

    def joined(self, other: Trial) -> Trial:
        """Return both trials of one plan as one."""
        if other.error is not None:
            return other
        return replace(self, rates=self.rates + other.rates)

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": [place._asdict() for place in self.plan],
            "rate": self.rate,
            "noise": self.noise,
            "rates": list(self.rates),
            "error": self.error,
        }


@dataclass
class Search:
    """Search over plans: iterate `plans`, measure each, and `note` it before the next.

    Attributes
    ----------
    stages
        Stages to be placed.
    start
        Plan as the user has it.
    limits
        Limits of every plan that is proposed.
    gil
        False on a Python whose threads run at the same time.
    target
        Results a second that are enough; None: the more the better. May be set during the search.
    """

    stages: tuple[Stage, ...]
    start: Plan
    limits: Limits
    gil: bool = True
    target: float | None = None
    trials: dict[Plan, Trial] = field(default_factory=dict)
    costs: tuple[Costs | None, ...] = ()
    refused: dict[Plan, str] = field(default_factory=dict)
    """Plans that the user has, and that exceed a limit, with the reason."""

    def __post_init__(self) -> None:
        self.costs = self.costs or (None,) * len(self.stages)

    # -- trials --------------------------------------------------------------------------------------

    def note(self, trial: Trial) -> None:
        """Take the measurement of a plan; a second one of a plan is joined to the first."""
        known = self.trials.get(trial.plan)
        self.trials[trial.plan] = trial if known is None else known.joined(trial)

    @property
    def good(self) -> list[Trial]:
        """Trials that did not fail, the fastest first.

        A plan that was tried before the bytes of a result were known, and exceeds the memory, is left
        out, unless there is no other. So is one that changes an idle stage.
        """
        good = [trial for trial in self.trials.values() if trial.rates]
        within = [trial for trial in good if self._allowed(trial.plan)]
        idle = self.idle
        kept = [t for t in within if all(t.plan[at] == self.start[at] for at in idle)]
        return sorted(kept or within or good, key=lambda trial: -trial.rate)

    @property
    def idle(self) -> list[int]:
        """Numbers of stages that had no result while others had: they keep the workers of the start."""
        return [at for at, cost in enumerate(self.costs) if cost is None] if any(self.costs) else []

    def chosen(self, trial: Trial) -> Plan:
        """Return the plan of `trial`, with the workers of the start for idle stages.

        They differ if the plan of the start was not measured, for lack of time or beyond the limits.
        """
        idle = self.idle
        return tuple(self.start[at] if at in idle else one for at, one in enumerate(trial.plan))

    def keeps_up(self, trial: Trial) -> bool:
        """Return True if a rate is asked for, and this trial reached it."""
        return self.target is not None and trial.rate >= KEEPS_UP * self.target

    @property
    def best(self) -> Trial | None:
        """Chosen trial: the cheapest that keeps up, else the cheapest as fast as the fastest."""
        good = self.good
        if not good:
            return None
        enough = [trial for trial in good if self.keeps_up(trial)]
        if enough:
            return min(enough, key=lambda trial: (price(trial.plan), -trial.rate))
        first = good[0]
        close = [t for t in good if t.rate >= first.rate * (1 - _close(first, t))]
        return min(close, key=lambda trial: (price(trial.plan), -trial.rate))

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
        ones = self._all(Place("threads", 1))
        twos = self._all(Place("threads", 2))
        processes = any(place.processes for place in self.start)
        # A worker process that dies leaves this one alive, so a plan with processes is the first.
        opening = (self.start, ones, twos) if processes else (ones, twos, self.start)
        for plan in opening:
            if plan not in self.trials and self._allowed(plan):
                yield plan
            elif plan == self.start and plan not in self.trials:
                self.refused[plan] = self._problem(plan) or ""
            self._learn(ones, twos)
        for plan in (*self._firsts(), self._all(INLINE)):
            if self._open(plan) and (plan != self._all(INLINE) or self._is_last_resort):
                yield plan
        yield from self._climb()

    @property
    def _is_last_resort(self) -> bool:
        """True if no plan within the limits has given a result, or the results are tiny."""
        tiny = all(cost is not None and cost.kind == "tiny" for cost in self.costs)
        return tiny or not any(t.rates and self._allowed(t.plan) for t in self.trials.values())

    def _climb(self) -> Iterator[Plan]:
        base = self._fastest()
        while base is not None:
            moved = False
            for plan in self._neighbors(base):
                if not self._open(plan):
                    continue
                yield plan
                trial = self.trials.get(plan)
                if trial is not None and trial.rates and self.better(trial, base):
                    base, moved = trial, True
                    break
            if not moved:
                break
        yield from self._confirm()

    def _confirm(self) -> Iterator[Plan]:
        """Yield the two plans that lead once more, so that no lucky trial decides."""
        leaders = [trial.plan for trial in self.good[:2]]
        best = self.best
        if best is not None and best.plan not in leaders:
            leaders.append(best.plan)
        for plan in leaders if len(leaders) > 1 else ():
            if not self.trials[plan].error:
                yield plan

    def _fastest(self) -> Trial | None:
        good = self.good
        return self.best if any(map(self.keeps_up, good)) else next(iter(good), None)

    def _all(self, place: Place) -> Plan:
        """Return a plan with `place` for each stage."""
        return tuple(stage.within(place) for stage in self.stages)

    def _allowed(self, plan: Plan) -> bool:
        return self._problem(plan) is None

    def _problem(self, plan: Plan) -> str | None:
        """Return the limit that `plan` exceeds, in words, but for idle stages; None if it keeps all."""
        idle = self.idle
        busy = [at for at in range(len(plan)) if at not in idle]
        places = tuple(plan[at] for at in busy)
        stages, costs = tuple(self.stages[at] for at in busy), tuple(self.costs[at] for at in busy)
        return self.limits.problem(places, stages, costs)

    def _open(self, plan: Plan) -> bool:
        """Return True if a plan may be tried: within the limits, not tried, no backend that failed."""
        return (
            plan not in self.trials
            and self._allowed(plan)
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
        for at, figures in enumerate(source.stages):
            if figures is None:
                continue
            speedup = None
            if two is not None and len(self.stages) == 1:
                speedup = two.rate / source.rate
            elif two is not None and two.stages:
                second = two.stages[at]
                if second is not None and second.busy > 0:
                    speedup = 2 * figures.busy / second.busy
            known = figures.cpu if source.plan[at].threads == 1 else None
            found[at] = Costs(figures.busy, known, figures.bytes, speedup, self.gil)
        self.costs = tuple(found)

    def _firsts(self) -> list[Plan]:
        """Return plans that follow from the costs: each stage by its kind."""
        options = []
        for at, (stage, cost) in enumerate(zip(self.stages, self.costs, strict=True)):
            places = [self.start[at]] if at in self.idle else self._first_places(stage, cost)
            options.append([stage.within(place) if place.workers else place for place in places])
        return [
            self._fitted(tuple(places[min(number, len(places) - 1)] for places in options))
            for number in range(max(map(len, options), default=0))
        ]

    def _first_places(self, stage: Stage, cost: Costs | None) -> list[Place]:
        cores = self.limits.whole_cores
        process = self._process_backend()
        if cost is None:
            return [Place("threads", max(2, cores))]
        if cost.kind == "tiny":
            return [INLINE]
        if cost.kind == "releases-gil":
            return [Place("threads", cores)]
        if cost.kind == "holds-gil":
            return [Place(process, cores) if process else Place("threads", 1)]
        several = math.ceil(cores / cost.computing)
        threads = Place("threads", max(2, min(several, FIRST, self.limits.most_concurrent(cost))))
        if cost.kind == "waits" or process is None:
            return [threads]
        within = math.ceil(1 / cost.computing) if stage.threads_inside else 1
        return [threads, Place(process, cores, within)]

    def _process_backend(self) -> str | None:
        """Return the backend of processes that is offered and works."""
        mine = [place.backend for place in self.start if place.processes]
        for name in (*mine, "fork", "spawn", "ray"):
            if name in self.limits.backends and not self._failed(name):
                return name
        return None

    def _fitted(self, plan: Plan) -> Plan:
        """Return a plan with fewer workers, until it is within the limits."""
        while not self._allowed(plan):
            widest = max(range(len(plan)), key=lambda at: (plan[at].workers, plan[at].threads))
            place = plan[widest]
            if place.threads > 1:
                smaller = place._replace(threads=place.threads // 2)
            elif place.workers > 1:
                smaller = place._replace(workers=place.workers - 1)
            else:
                break
            plan = (*plan[:widest], smaller, *plan[widest + 1 :])
        return plan

    def _neighbors(self, trial: Trial) -> Iterator[Plan]:
        """Yield plans beside that of `trial`: those of its busiest stage first."""
        busy = set(range(len(self.stages))).difference(self.idle)
        cheaper = self.keeps_up(trial)  # only cheaper ones are of use
        for at in sorted(busy, key=lambda at: -_load(trial, at)):
            for place in dict.fromkeys(self._beside(trial.plan[at], self.stages[at])):
                plan = (*trial.plan[:at], place, *trial.plan[at + 1 :])
                if not cheaper or price(plan) < price(trial.plan):
                    yield plan

    def _beside(self, place: Place, stage: Stage) -> list[Place]:
        workers, threads = place.workers, place.threads
        quarter = max(1, workers // 4)
        inside = [(workers, 2 * threads), (workers, threads // 2), (workers // 2, 2 * threads)]
        near = [
            place._replace(workers=several, threads=each)
            for several, each in (
                *((2 * workers, threads), (workers // 2, threads), (workers - quarter, threads)),
                *(inside if stage.threads_inside else ()),
                (workers + quarter, threads),
            )
            if workers and several > 0 and each > 0
        ]
        process = self._process_backend()
        cores = self.limits.whole_cores
        if place.processes:
            near += [Place("threads", place.concurrent), Place("threads", max(1, workers))]
        elif process is not None:
            count = min(cores, max(1, workers))
            each = max(1, place.concurrent // count) if stage.threads_inside else 1
            near += [Place(process, cores), Place(process, count, each)]
        return [*near, *([] if workers else [Place("threads", 1)]), INLINE]

    # -- the choice in words -------------------------------------------------------------------------

    def reason(self) -> str:
        """Return a sentence about why the best plan was chosen."""
        best = self.best
        if best is None:
            return "No plan gave a result."
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
        idle = ", ".join(self.stages[at].name for at in self.idle)
        return (
            f"{shown(self.chosen(best))}: {why}."
            + (f" {kinds}." if kinds else "")
            + (f" No trial had a result of {idle}, which keeps its workers." if idle else "")
        )


_WORDS = {
    "tiny": "takes less time than sending it to a worker",
    "waits": "waits (for a disk, a network, a lock)",
    "mixed": "waits and computes",
    "holds-gil": "computes and holds the GIL",
    "releases-gil": "computes, and its threads work at the same time",
}


def _close(first: Trial, other: Trial) -> float:
    """Return the share by which `other` may be slower than `first` and still counts as equally fast."""
    return min(CLOSE, max(0.02, first.noise + other.noise))


def _load(trial: Trial, at: int) -> float:
    figures: Sequence[StageTrial | None] = trial.stages
    found = figures[at] if at < len(figures) else None
    return 0.0 if found is None else found.load
