"""Loaders and pipelines as subjects of a tuning, by their public attributes; and the measurement of one
plan on real items: rates of consecutive parts of a short run.

A loader is measured by another one over the same dataset, which draws from own samplers and
generators; a pipeline by its own operators with other placements, while those that it joins keep theirs.
The clock is an argument, so that tests move it.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.utils.data

from hybridloader._support.system import cached_property
from hybridloader._support.text import beginning
from hybridloader._support.user_objects import attribute, described, has
from hybridloader.compat.torch_loaders import from_torch
from hybridloader.engine.contract import get_backend
from hybridloader.fetching.readers import MapFetch
from hybridloader.loader.dataloader import DataLoader
from hybridloader.observe.stats import Stats
from hybridloader.pipeline.pipeline import Pipeline
from hybridloader.running.operator import Placement, steps_in
from hybridloader.seeding.worker_seeds import kept
from hybridloader.tuning.planner import INLINE, Costs, Place, Plan, Stage, Trial

PARTS = 8  # parts of a trial, each with a rate, at most

LEAST = 3  # rounds of results that a trial waits for, if there is time

MOST = 20_000  # results of a trial, at most: tiny ones say no more after as many

AND = " + "  # text between the names of functions that share a stage

MESSAGE = 200  # characters of an error that are kept


_END: Any = object()


class Running(Iterator[Any]):
    """Results of a subject with one plan, epoch after epoch; `epoch` is the present one."""

    def __init__(self, epochs: Iterator[Any], names: Sequence[str]) -> None:
        self._epochs, self._names = epochs, names
        self.epoch: Any = None

    def __next__(self) -> Any:
        result = _END if self.epoch is None else next(self.epoch, _END)
        if result is not _END:
            return result
        self.epoch = next(self._epochs)
        return next(self.epoch)  # raises at an epoch without a result

    def stages(self) -> tuple[Costs | None, ...]:
        """Return the costs of each stage until now."""
        stats = self.epoch.stats()
        return tuple(_costs(stats, name) for name in self._names)


def _costs(stats: Stats, name: str) -> Costs | None:
    """Return the costs of the stage `name`, which may be a part of a row."""
    for row in stats.stages:
        if {*name.split(AND)} <= {*row.name.split(AND)} and row.items:
            count = row.items
            cpu = None if row.cpu is None else row.cpu / count
            return Costs(row.busy / count, cpu, (row.bytes or 0) // count, load=row.load)
    return None


class Subject(ABC):
    """Something to tune."""

    name: str  # name in texts, such as ``"DataLoader"``
    unit: str  # name of a result, such as ``"batches"``
    stages: tuple[Stage, ...]  # stages to be placed
    start: Plan  # plan as the user has it

    @abstractmethod
    def open(self, plan: Plan, timeout: float) -> AbstractContextManager[Running]:
        """Run with `plan`; a result that takes longer than `timeout` seconds raises `WorkerTimeout`."""

    @abstractmethod
    def apply(self, plan: Plan) -> Any:
        """Return the loader or pipeline with `plan`."""

    @abstractmethod
    def code(self, plan: Plan) -> str:
        """Return the code to paste."""


class Empty(ValueError):
    """There is no item to measure."""


@dataclass(frozen=True)
class Measured:
    """A trial, and the error that ended it, if one did."""

    trial: Trial
    error: Exception | None
    overhead: float
    """Seconds until its first result, and from its last one until its workers had ended."""
    closing: float = 0.0  # seconds of the latter alone
    kept: tuple[Any, ...] = ()  # first results, if they were asked for


def measure(
    subject: Subject,
    plan: Plan,
    seconds: float,  # to measure for, after the first results
    deadline: float,  # time on `clock` after which it waits for no other result; the workers end then
    clock: Callable[[], float],
    *,
    step: Callable[[Any], object] | None = None,  # called with each result, as the user's loop does
    keep: int = 0,  # number of results to return
) -> Measured:
    """Run `subject` with `plan` and measure its rates."""
    began = clock()
    kept: list[Any] = []
    try:
        with subject.open(plan, max(1.0, deadline - began)) as running:
            times = [began]
            together = max((place.concurrent for place in plan), default=1)  # results at once
            for result in running:
                if step is not None:
                    step(result)
                if len(kept) < keep:
                    kept.append(result)
                del result
                now = clock()
                times.append(now)
                several = len(times) > LEAST * together + 1 and now - times[1] >= seconds
                if several or now >= deadline or len(times) > MOST:
                    break
            stages = running.stages()
    except Exception as error:
        line = described(error).splitlines()[0]  # torch's own have a traceback in the next lines
        trial = Trial(plan, error=beginning(line, MESSAGE))
        return Measured(trial, error, clock() - began, kept=tuple(kept))
    if len(times) == 1:
        empty = Empty(f"{subject.name} gives no {subject.unit}, so there is nothing to measure")
        return Measured(Trial(plan, error=str(empty)), empty, clock() - began)
    trial = Trial(plan, rates_of(times, together), stages)
    closing = clock() - times[-1]
    return Measured(trial, None, closing + times[1] - began, closing, tuple(kept))


def rates_of(times: list[float], together: int) -> tuple[float, ...]:
    """Return the rates of parts of a run that began at ``times[0]``, and had a result at each other.

    `together` results may come at once, for one round of all workers. So a part has a whole number of
    rounds: from one result to the one at the same place in a later round. Without a whole round there is
    one rate: that of all results after the first, if these took twice as long as the first, as where
    the loop is slow; else that of all, with the start.
    """
    results = times[1:]
    rounds = (len(results) - 1) // together
    parts = min(PARTS, rounds)
    if not parts:
        first, took = times[1] - times[0], times[-1] - times[1]
        count = len(results) - 1
        if took < 2 * first:
            took, count = took + first, count + 1
        return (count / took,) if took > 0 else ()
    edges = [together * round(part * rounds / parts) for part in range(parts + 1)]
    found = [(high - low, results[high] - results[low]) for low, high in itertools.pairwise(edges)]
    return tuple(count / took for count, took in found if took > 0)


DRAWN = 1 << 16
"""Indices, or batches of them, that are drawn from a sampler for a measurement, at most."""


def subject_of(given: Any) -> Subject:
    """Return `given` as a subject. Raises `TypeError` if it is neither a loader nor a pipeline."""
    if isinstance(given, Pipeline):
        return PipelineSubject(given)
    if isinstance(given, torch.utils.data.DataLoader):
        return LoaderSubject(given)
    raise TypeError(
        f"tune() takes a DataLoader, ours or torch's, or a Pipeline, not a {type(given).__qualname__}"
    )


class LoaderSubject(Subject):
    """A loader, ours or torch's."""

    name, unit = "DataLoader", "batches"

    def __init__(
        self, loader: torch.utils.data.DataLoader[Any], *, keep_threads: bool = False
    ) -> None:
        """Take a loader; with `keep_threads` its `threads_per_worker` stays in every plan."""
        self._keep_threads = keep_threads
        # Of torch's, one of ours with the same attributes: refused here if it can't be had.
        ours: Any = loader if isinstance(loader, DataLoader) else from_torch(loader)
        self._loader = ours
        self._iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        whole = callable(attribute(loader.dataset, "__getitems__"))
        inside = not (self._iterable or whole or keep_threads)
        self.stages = (Stage("DataLoader", inside, shares_task=True),)
        backend = "shared-memory" if ours.backend is None else get_backend(ours.backend).name
        place = Place(backend if ours.num_workers else "inline", int(ours.num_workers))
        self.start = (place if keep_threads else place._replace(threads=ours.threads_per_worker),)

    def _backend(self, place: Place) -> Any:
        """Return the backend of a place: the user's object if it is of that kind."""
        mine = self._loader.backend
        if mine is not None and get_backend(mine).name == place.backend:
            return mine
        return place.backend

    @contextlib.contextmanager
    def open(self, plan: Plan, timeout: float) -> Iterator[Running]:
        ours, (place,) = self._loader, plan
        loader = DataLoader.__new__(DataLoader)  # the constructor would wrap a data pipe again
        vars(loader).update(
            vars(ours),
            observe=True,
            timeout=timeout if place.workers else 0,
            generator=torch.Generator().manual_seed(0),
            persistent_workers=bool(place.workers),
            _auto=None,
            _iterator=None,
        )
        if not self._iterable:
            name = "sampler" if ours.batch_sampler is None else "batch_sampler"
            vars(loader)[name] = itertools.cycle(self._drawn)
        self._place_on(loader, place)
        with untouched_generators(ours, ours.dataset):
            running = Running(iter(lambda: iter(loader), None), ("DataLoader",))
            try:
                yield running
            finally:
                if running.epoch is not None:
                    running.epoch.close()

    @cached_property
    def _drawn(self) -> list[Any]:
        """Indices, or batches of them, from the loader's sampler, whose generators are as before."""
        ours = self._loader
        sampler = ours.sampler if ours.batch_sampler is None else ours.batch_sampler
        with untouched_generators(sampler, ours):
            return list(itertools.islice(iter(sampler), DRAWN))

    def apply(self, plan: Plan) -> DataLoader:
        loader: DataLoader = self._loader
        if plan != self.start:
            loader._iterator = None  # persistent workers of the plan before end
            self._place_on(loader, *plan)
        return loader

    def _place_on(self, loader: Any, place: Place) -> None:
        """Give a loader the workers of a place."""
        loader.num_workers = place.workers
        loader.backend = self._backend(place) if place.workers else None
        if not self._keep_threads:
            loader.threads_per_worker = place.threads
        if place.workers and place.backend != self.start[0].backend:
            loader.multiprocessing_context = None
        if not place.workers:
            loader.prefetch_factor = None
        elif loader.prefetch_factor is None:
            loader.prefetch_factor = 2  # torch's default

    def code(self, plan: Plan) -> str:
        (place,) = plan
        words = [f"num_workers={place.workers}"]
        if place.workers and not (plan == self.start and self._loader.backend is None):
            words.append(f"backend={self._backend(place)!r}")
        if place.threads > 1 or self._loader.threads_per_worker > 1:
            words.append(f"threads_per_worker={place.threads}")
        if not place.workers and self._loader.persistent_workers:
            words.append("persistent_workers=False")
        return f"hybridloader.DataLoader(..., {', '.join(words)})"


class _Step(NamedTuple):
    """Step to be placed: its number in the pipeline, the operator, and a name that no other step has."""

    at: int
    work: Any
    label: str


class PipelineSubject(Subject):
    """A pipeline: each function, or row of functions with equal placements, is a stage."""

    name, unit = "Pipeline", "items"

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        for operator in steps_in(pipeline):
            if operator.read_once:
                raise TypeError(
                    "tune() reads the source of a pipeline several times, and this one can be read only "
                    "once; give a function that makes it, as in from_iterable(lambda: read(file))"
                )
        self._groups = _groups(pipeline)
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
                not work.step().concurrency,
            )
            for group, work in zip(self._groups, firsts, strict=True)
        )

    @contextlib.contextmanager
    def open(self, plan: Plan, timeout: float) -> Iterator[Running]:
        rows = [AND.join(step.label for step in group) for group in self._groups]
        with (
            untouched_generators(*steps_in(self._pipeline)),
            self.apply(plan, timeout).epochs(None, seed=0, observe=True) as epochs,
        ):
            yield Running(iter(epochs), rows)

    def apply(self, plan: Plan, timeout: float | None = None) -> Pipeline:
        """Return the pipeline with `plan`; with a `timeout`, for a measurement."""
        operators = list(self._pipeline.operators)
        for group, place, before in zip(self._groups, plan, self.start, strict=True):
            for at, work, label in group:
                placement: Placement = work.placement
                if place != before:
                    placement = _moved(placement, place)
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
        if not joins:
            groups.append([])
        groups[-1].append(step)
    return groups


def _place_of(placement: Placement) -> Place:
    if placement.backend is None or placement.backend.in_caller:
        return INLINE
    return Place(placement.backend.name, placement.num_workers, placement.threads_per_worker)


def _moved(placement: Placement, place: Place) -> Placement:
    """Return a placement with the workers of `place`, and all other options that it may have."""
    if place == INLINE:
        kept = ("in_order", "worker_init_fn", "concurrency", "fuse", "on_error", "seeding")
        return Placement(**{name: getattr(placement, name) for name in kept})
    backend = placement.backend
    if backend is None or backend.name != place.backend:
        backend = get_backend(place.backend)
    placement = replace(placement, backend=backend, num_workers=place.workers)
    return replace(placement, threads_per_worker=place.threads, ranks=1)


@contextlib.contextmanager
def untouched_generators(*holders: Any) -> Iterator[None]:
    """Restore the generators of this process afterwards, and those that `holders` have as attributes.

    Samplers within samplers count, too.
    """
    found: dict[int, torch.Generator] = {}
    met: set[int] = set()
    todo = list(holders)
    while todo:
        one = todo.pop()
        if one is None or id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, torch.Generator):
            found[id(one)] = one
            continue
        for name in ("generator", "sampler", "batch_sampler"):
            with contextlib.suppress(Exception):
                todo.append(getattr(one, name))
    states = [(generator, generator.get_state()) for generator in found.values()]
    with kept():
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)
