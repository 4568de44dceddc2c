"""Pipelines as subjects of a tuning: measured by their own operators with other placements.

Pipelines that an operator joins keep their workers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from hybridloader._support.user_objects import has
from hybridloader.engine.contract import get_backend
from hybridloader.fetching.readers import MapFetch
from hybridloader.pipeline.pipeline import Pipeline
from hybridloader.running.operator import steps_in
from hybridloader.running.placement import Placement
from hybridloader.tuning.endless import AND, Endless
from hybridloader.tuning.plans import INLINE, Place, Plan, Stage
from hybridloader.tuning.trials import Running, Subject
from hybridloader.tuning.untouched import untouched_generators


class _Step(NamedTuple):
    """Step to be placed: its number in the pipeline, the operator, and a name that no other step has."""

    at: int
    work: Any
    label: str


class PipelineSubject(Subject):
    """A pipeline: each function, or row of functions with equal placements, is a stage."""

    name, unit = "Pipeline", "items"

    def __init__(self, pipeline: Pipeline, *, only_auto: bool = False) -> None:
        """Take a pipeline; with `only_auto`, the stages that leave their workers to a measurement."""
        self._pipeline = pipeline
        for operator in steps_in(pipeline):
            if operator.read_once:
                raise TypeError(
                    "tune() reads the source of a pipeline several times, and this one can be read only "
                    "once; give a function that makes it, as in from_iterable(lambda: read(file))"
                )
        self._groups = [
            group for group in _groups(pipeline) if not only_auto or group[0].work.placement.auto
        ]
        if not self._groups:
            raise TypeError(
                "tune() found no step of this pipeline to place: it has no map(), filter() or "
                "flat_map(), and its source is no slow dataset; pipelines that it joins are tuned alone"
            )
        firsts = [group[0].work for group in self._groups]
        self.start = tuple(_place_of(work.placement) for work in firsts)
        self.stages = tuple(
            Stage(
                AND.join([group[0].label, *(step.work.name for step in group[1:])]),
                not work.step().concurrency and not only_auto,
                only=place.backend if only_auto and work.placement.auto == "num_workers" else None,
            )
            for group, work, place in zip(self._groups, firsts, self.start, strict=True)
        )

    @contextlib.contextmanager
    def open(self, plan: Plan, timeout: float) -> Iterator[Running]:
        rows = [AND.join(step.label for step in group) for group in self._groups]
        with untouched_generators(*steps_in(self._pipeline)):
            epochs = self._placed(plan, timeout).epochs(None, seed=0, observe=True)
            last: list[Any] = []

            def runs() -> Iterator[Any]:
                for run in epochs:
                    last[:] = [run]
                    yield run

            with epochs:
                yield Endless(runs(), lambda: last[0].stats(), rows)

    def apply(self, plan: Plan) -> Pipeline:
        return self._placed(plan, None)

    def _placed(self, plan: Plan, timeout: float | None) -> Pipeline:
        """Return the pipeline with `plan`; with a `timeout`, for a measurement."""
        operators = list(self._pipeline.operators)
        for group, place, before in zip(self._groups, plan, self.start, strict=True):
            for at, work, label in group:
                placement: Placement = work.placement
                if place != before:
                    placement = _moved(placement, place)
                placement = replace(placement, auto="")
                if timeout is not None and not placement.inline:
                    placement = replace(placement, timeout=timeout)
                if placement != work.placement:
                    work = replace(work, placement=placement)
                if timeout is not None and label != work.name and has(work, "label"):
                    # The name of its row in the statistics. A user's operator may have no label.
                    work = replace(work, label=label)
                operators[at] = work
        if all(new is old for new, old in zip(operators, self._pipeline.operators, strict=True)):
            return self._pipeline
        return Pipeline(operators)

    def code(self, plan: Plan) -> str:
        lines = []
        for stage, place in zip(self.stages, plan, strict=True):
            if place == INLINE:
                lines.append(f"{stage.name}: no backend")
                continue
            words = [f"backend={place.backend!r}"]
            if place.workers:
                words.append(f"num_workers={place.workers}")
            if place.threads > 1:
                words.append(f"threads_per_worker={place.threads}")
            lines.append(f"{stage.name}: {', '.join(words)}")
        return "\n".join(lines)


def _groups(pipeline: Pipeline) -> list[list[_Step]]:
    """Return the steps to be placed: a row with equal placements is one group."""
    groups: list[list[_Step]] = []
    met: Counter[str] = Counter()
    operators = pipeline.operators
    for at, operator in enumerate(operators):
        if operator.placement is None or operator.step().kind == "read" or operator.cheap:
            continue
        met[operator.name] += 1
        number = met[operator.name]
        step = _Step(at, operator, operator.name + (f" #{number}" if number > 1 else ""))
        joins = (
            groups
            and groups[-1][-1].at == at - 1
            and operators[at - 1].placement == operator.placement
            and operator.placement.fuse
            and not operator.step().concurrency
            and not isinstance(operators[at - 1].step().function, MapFetch)
        )
        if joins:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _place_of(placement: Placement) -> Place:
    if placement.backend is None or placement.backend.in_caller:
        return INLINE
    return Place(placement.backend.name, placement.num_workers, placement.threads_per_worker)


def _moved(placement: Placement, place: Place) -> Placement:
    """Return a placement with the workers of `place`, and all other options that it may have."""
    if place == INLINE:
        return replace(
            placement,
            backend=None,
            num_workers=1,
            threads_per_worker=1,
            prefetch=None,
            buffer_bytes=None,
            timeout=0,
            task_timeout=0,
            on_worker_death=None,
        )
    mine = placement.backend
    backend = (
        mine if mine is not None and mine.name == place.backend else get_backend(place.backend)
    )
    return replace(
        placement,
        backend=backend,
        num_workers=place.workers,
        threads_per_worker=place.threads,
        ranks=1,
    )
