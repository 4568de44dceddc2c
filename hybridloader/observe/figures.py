"""Figures of a recording that the statistics show and the verdict is made of: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridloader.observe.attribution import (
    between,
    length,
    overlap,
    percentile,
    stall_by_stage,
    within,
)
from hybridloader.observe.recording import Recording, StageRecord, Wait

LOOP = "your loop"
"""Name of the row of the loop that takes the items."""

FIRST = 3
"""Multiple of any other task that the first of a worker takes, from which the start of the worker, such
as a file that it opens, is the larger part of it."""

NOTHING = 0.25
"""Part of the work of the worker that has most, below which another has next to nothing."""

REST = "none of them"
"""Name of the stall in which no stage was busy."""


@dataclass(frozen=True)
class Figures:
    """Figures of one recording."""

    recording: Recording
    names: tuple[str, ...]
    """Names of the stages; no two are the same, and none is that of another row."""
    full: float | None
    """Time at which the prefetch was full; None if it never was."""
    seconds: float
    """Seconds since the prefetch was full, as all below."""
    calls: int
    """Calls of `next()`."""
    stall: float
    """Seconds that it spent in `next()`."""
    warmup: float
    """Seconds that it spent there before."""
    p50: float
    p99: float
    by_stage: tuple[float, ...]
    """Seconds of the stall that belong to each stage."""
    late: float
    """Seconds of all waits until the first task began, and no source was busy."""
    opening: float
    """Seconds of all waits in which workers did slow first tasks."""

    @property
    def share(self) -> float:
        """Share of the stall in the time, from 0 to 1."""
        return min(1.0, self.stall / self.seconds) if self.seconds > 0 else 0.0

    @property
    def rest(self) -> float:
        """Seconds of the stall that belong to no stage."""
        return max(0.0, self.stall - sum(self.by_stage))

    @classmethod
    def of(cls, recording: Recording) -> Figures:
        loop = recording.loop
        full = _full(recording)
        since = loop.ended if full is None else min(max(full, loop.began), loop.ended)
        seconds, whole = loop.ended - since, loop.ended - loop.began
        later = within(loop.waits, since, loop.ended)
        kept = length(loop.waits)
        # Shorter calls, and those that were dropped, are spread over the time as the others are not.
        spread = max(0.0, loop.waited - kept)
        part = seconds / whole if whole > 0 else 0.0
        stall = min(seconds, length(later) + spread * part)
        # Of each stage as long as all rings go back.
        known = [since, *(s.since for s in recording.stages if s.since is not None)]
        if loop.dropped and loop.waits:
            known.append(loop.waits[0].began)
        seen = within(later, max(known), loop.ended)
        shares = stall_by_stage([stage.spans for stage in recording.stages], seen)
        if not seen and stall > 0:  # only short calls: each stage as often as it was busy
            shares = _by_load(recording.stages)
        measured = length(seen) if seen else 1.0
        stages = recording.stages
        firsts = [stage.first for stage in stages if stage.first is not None]
        sources = [span[:2] for stage in stages if stage.source for span in stage.spans]
        idle = between(loop.began, min(firsts, default=loop.began), sources)
        opening = [wait for stage in stages for wait in slow_firsts(stage)]
        return cls(
            recording=recording,
            names=_names(recording.stages),
            full=full,
            seconds=seconds,
            calls=0 if full is None else len(later) + loop.brief + loop.dropped,
            stall=stall,
            warmup=max(0.0, loop.waited - stall),
            p50=percentile(loop, later, 0.5),
            p99=percentile(loop, later, 0.99),
            by_stage=tuple(stall * share / measured for share in shares),
            late=overlap(loop.waits, idle),
            opening=overlap(loop.waits, opening),
        )


def slow_firsts(stage: StageRecord) -> list[Wait]:
    """Return the times in which workers did first tasks that took a multiple of any other."""
    if stage.later is None:
        return []
    least = FIRST * stage.later
    return [wait for wait in stage.firsts if wait.ended - wait.began >= least]


def without_data(stage: StageRecord) -> int:
    """Return how many workers had next to nothing to do, as others read all of the data."""
    most = max(stage.parts, default=0.0)
    return sum(busy < NOTHING * most for busy in stage.parts)


def _full(recording: Recording) -> float | None:
    """Return when the last stage was full, of those that ever were; None if none was.

    A stage of quick tasks may have had too few of them for that to be seen.
    """
    begun = [stage for stage in recording.stages if stage.first is not None]
    if not begun:
        return recording.loop.began if recording.loop.items else None
    return max((stage.full for stage in begun if stage.full is not None), default=None)


def _by_load(stages: Sequence[StageRecord]) -> list[float]:
    loads = [load_of(stage) for stage in stages]
    whole = max(1.0, sum(loads))
    return [load / whole for load in loads]


def load_of(stage: StageRecord) -> float:
    """Return the busy share of the time of a stage's workers, from 0 to 1."""
    whole = stage.busy + stage.starved + stage.blocked + stage.other
    return min(1.0, stage.busy / whole) if whole > 0 else 0.0


def _names(stages: Sequence[StageRecord]) -> tuple[str, ...]:
    names = [LOOP, REST]
    for stage in stages:
        name, number = stage.name, 1
        while name in names:
            number += 1
            name = f"{stage.name} ({number})"
        names.append(name)
    return tuple(names[2:])
