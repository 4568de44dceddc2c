"""Measurement of one plan on real items: rates of consecutive parts of a short run.

A `Subject` is a loader or pipeline that can be run with any plan. The clock is an
argument, so that tests move it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hybridloader._support.text import beginning
from hybridloader._support.user_objects import described
from hybridloader.observe.stats import Stats
from hybridloader.tuning.planner import Costs, Plan, Stage, Trial

PARTS = 8
"""Parts of a trial, each with a rate, at most."""

LEAST = 3
"""Rounds of results that a trial waits for, if there is time."""

MOST = 20_000
"""Results of a trial, at most: tiny ones say no more after as many."""

AND = " + "
"""Text between the names of functions that share a stage."""

MESSAGE = 200
"""Characters of an error that are kept."""


_END: Any = object()


class Running(Iterator[Any]):
    """Results of a subject with one plan, epoch after epoch; `epoch` is the present one."""

    def __init__(
        self, epochs: Iterator[Any], stats: Callable[[Any], Stats], names: Sequence[str]
    ) -> None:
        self._epochs, self._stats, self._names = epochs, stats, names
        self.epoch: Any = None

    def __next__(self) -> Any:
        result = _END if self.epoch is None else next(self.epoch, _END)
        if result is not _END:
            return result
        self.epoch = next(self._epochs)
        return next(self.epoch)  # raises at an epoch without a result

    def stages(self) -> tuple[Costs | None, ...]:
        """Return the costs of each stage until now."""
        stats = self._stats(self.epoch)
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
    """Something to tune.

    Attributes
    ----------
    name
        Name in texts, such as ``"DataLoader"``.
    unit
        Name of a result, such as ``"batches"``.
    stages
        Stages to be placed.
    start
        Plan as the user has it.
    """

    name: str
    unit: str
    stages: tuple[Stage, ...]
    start: Plan

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
    closing: float = 0.0
    """The latter alone."""
    kept: tuple[Any, ...] = ()
    """First results, if they were asked for."""


def measure(
    subject: Subject,
    plan: Plan,
    seconds: float,
    deadline: float,
    clock: Callable[[], float],
    *,
    step: Callable[[Any], object] | None = None,
    keep: int = 0,
) -> Measured:
    """Run `subject` with `plan` and measure its rates.

    Parameters
    ----------
    seconds
        Seconds to measure for, after the first results.
    deadline
        Time on `clock` after which it waits for no other result. The workers end then.
    step
        Called with each result, as the user's loop does.
    keep
        Number of results to return.
    """
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
