"""Choice of ``num_workers="auto"`` and ``backend="auto"``, before the first batch of a loader."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hybridloader.tuning.pipeline_subject import PipelineSubject
from hybridloader.tuning.planner import Search
from hybridloader.tuning.plans import Limits, Place, Plan, limits_here
from hybridloader.tuning.subjects import LoaderSubject
from hybridloader.tuning.tune import Tuner, with_the_users
from hybridloader.tuning.tuning import Tuning

if TYPE_CHECKING:
    from hybridloader.loader.dataloader import Auto
    from hybridloader.pipeline.pipeline import Pipeline

SECONDS = 5.0
"""Limit of the measurement."""

MEMORY = 0.5
"""Share of this process's memory that a plan may take."""


@dataclass
class GivenWorkers(Search):
    """Search over backends with a number of workers that the user has given."""

    def plans(self) -> Iterator[Plan]:
        """Yield a plan for each backend that is offered."""
        (start,) = self.start
        for name in self.limits.backends:
            plan = (start._replace(backend=name),)
            if name != "inline" and plan not in self.trials:
                yield plan
        yield from self._confirm()


def choose(loader: Any, auto: Auto) -> Tuning:
    """Measure, set the attributes of `loader` that are ``"auto"``, and report the choice in one line."""
    subject = LoaderSubject(loader, keep_threads=True)
    tuner = tuner_of(subject, auto, limits_here(None, MEMORY))
    tuning = tuner.run()
    if tuning.interrupted:
        raise KeyboardInterrupt
    tuning.apply()
    _report("DataLoader", tuning)
    return tuning


def choose_for_pipeline(pipeline: Pipeline) -> Pipeline:
    """Return `pipeline` with measured workers for its steps with ``"auto"``; report them in a line."""
    subject = PipelineSubject(pipeline, only_auto=True)
    limits = with_the_users(limits_here(None, MEMORY), subject.start)
    tuning = Tuner(subject, limits, SECONDS).run()
    if tuning.interrupted:
        raise KeyboardInterrupt
    _report("Pipeline", tuning, [stage.name for stage in subject.stages])
    return subject.apply(tuning.plan)


def _report(name: str, tuning: Tuning, stages: Sequence[str] = ()) -> None:
    names = [f"{stage} on " for stage in stages] or [""]
    places = "; ".join(f"{n}{p}" for n, p in zip(names, tuning.plan, strict=True))
    print(
        f"hybridloader: {name} uses {places}: {tuning.rate:,.1f}/s, chosen from "
        f"{len(tuning.trials)} plans in {tuning.seconds:.1f} s",
        file=sys.stderr,
    )


def tuner_of(subject: LoaderSubject, auto: Auto, limits: Limits, **more: Any) -> Tuner:
    """Return a tuner that changes only the parameters that are ``"auto"``."""
    (start,) = subject.start
    if auto.workers and not auto.backend:  # only the number
        limits = with_the_users(limits, subject.start)
        limits = replace(limits, backends=("inline", start.backend))
    if not auto.workers:
        offered = tuple(name for name in limits.backends if name != "inline")
        limits = replace(limits, backends=offered)
    tuner = Tuner(subject, limits, SECONDS, **more)
    if not auto.workers:
        old = tuner.search
        place = Place("threads", start.workers)
        tuner.search = GivenWorkers(old.stages, (place,), limits, old.gil)
    return tuner
