"""Figures of a recording, for statistics and the verdict: pure functions.

`stall_by_stage` attributes the waits of a loop to stages. Each moment of a wait is divided among the
stages that are busy then, in proportion to the busy shares of their workers. A moment in which no stage
is busy belongs to none. Half of a moment belongs to none if the only busy worker works half of the time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridloader._support.store_use import StoreUse

# -- Recording of one run: the measurements until now, as plain frozen data.
#
# All times are seconds of `time.perf_counter`. Unknown values are None. `figures` and `verdict` are
# functions of recordings, without a clock or a thread.


class Span(NamedTuple):
    """Time in which a worker, or the thread of a relay, was busy."""

    began: float
    ended: float
    part: float = 1.0
    """This worker's part of its stage's capacity: 0.5 for one of two workers, if it never pauses."""
    density: float = 1.0  # busy share of this worker meanwhile, from 0 to 1


class Wait(NamedTuple):
    """Time that the loop spent in one call of `next()`."""

    began: float
    ended: float


class CoroutineUse(NamedTuple):
    """Use of the event loops of a step whose function is ``async def``."""

    step: str
    concurrency: int
    begun: int  # number of coroutines
    idle: float  # seconds that the event loops waited for something that a coroutine awaits
    held: float  # seconds that coroutines ran and blocked the event loops


@dataclass(frozen=True)
class Faults:
    """Faults of one stage, or of all.

    Attributes
    ----------
    skipped
        Items that failed and were left out.
    replaced
        Items that failed and were replaced by others.
    retried
        Calls that were repeated because the previous call failed.
    restarted
        Workers that were restarted because they died or exceeded a time limit.
    """

    skipped: int = 0
    replaced: int = 0
    retried: int = 0
    restarted: int = 0

    def __add__(self, other: Faults) -> Faults:
        return Faults(*map(operator.add, self.counts, other.counts))

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.skipped, self.replaced, self.retried, self.restarted

    def __bool__(self) -> bool:
        return any(self.counts)


@dataclass(frozen=True)
class StageStats:
    """Statistics of one stage until now.

    Attributes
    ----------
    name
        Name of the stage; ``"your loop"`` takes the items, ``"sampler"`` is the sampler of a loader.
    backend
        Backend; ``"thread"`` for a thread between two stages, ``"caller"`` for your loop's thread.
    num_workers
        Number of workers.
    items
        Items that left the stage; a loader's are batches.
    busy
        Seconds of work, summed over workers, as are the next four.
    starved
        Idle seconds for lack of input.
    blocked
        Idle seconds because results were not taken.
    other
        Seconds spent starting, receiving tasks or handing over results.
    cpu
        CPU seconds; None if unknown.
    bytes
        Bytes of the results, estimated; None if unknown.
    queued
        Items in flight in the stage, or waiting after it.
    stall
        Seconds that your loop waited for the stage after the prefetch was full.
    faults
        Faults, by kind.
    """

    name: str
    backend: str
    num_workers: int = 1
    items: int = 0
    busy: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0
    other: float = 0.0
    cpu: float | None = None
    bytes: int | None = None
    queued: int = 0
    stall: float = 0.0
    faults: Faults = field(default=Faults())

    @property
    def load(self) -> float:
        """Busy share of the workers' time, from 0 to 1."""
        whole = self.busy + self.starved + self.blocked + self.other
        return min(1.0, self.busy / whole) if whole > 0 else 0.0


@dataclass(frozen=True)
class StageRecord(StageStats):
    """Measurements of one stage, of one thread between two stages, or of a source. The stall is 0."""

    wait_for_core: float | None = None  # seconds that its workers were runnable but had no core
    gil_waits: tuple[float, ...] = ()
    """Seconds that its threads took to get the GIL back after releasing it, sampled."""
    collating: float = 0.0  # seconds of `busy` that `collate_fn` took
    packing: float = 0.0  # seconds of `busy` that packing results took
    sending: float = 0.0  # seconds, not in `busy`, that sending and opening results took
    arrays: float = 0.0  # share of `bytes` in tensors and arrays, which are not pickled
    spans: tuple[Span, ...] = ()
    since: float | None = None  # time before which spans were dropped
    first: float | None = None  # time at which its first task began
    parts: tuple[float, ...] = ()
    """Busy seconds of each worker, if each worker reads a separate part of the data."""
    coroutines: CoroutineUse | None = None
    """Use of event loops, if its function, or the slowest of its functions, is an ``async def``."""
    full: float | None = None  # time at which a whole window of tasks had returned
    in_process: bool = True  # True if its workers share the GIL with the loop
    source: bool = False  # True for a sampler and for the reader of a source
    reads: bool = False  # True for a stage that reads samples of a dataset
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the user's constructor that affect this stage, with their values."""


@dataclass(frozen=True)
class LoopRecord:
    """Measurements of the loop that takes the items."""

    began: float
    ended: float
    items: int = 0
    waited: float = 0.0  # total seconds spent in `next()`
    waits: tuple[Wait, ...] = ()  # the longer waits, in order
    brief: int = 0  # number of shorter waits, which are not in `waits`
    brief_seconds: float = 0.0
    dropped: int = 0  # number of longer waits that were dropped from `waits`


@dataclass(frozen=True)
class CoreUse:
    """Cores that this process may use, and how busy they were.

    Attributes
    ----------
    cores
        Number of cores, by affinity and cgroup quota; a quota may make it a fraction.
    busy
        Mean number of these cores that were busy, with any program; None if unknown.
    own
        Mean number of cores that this program and its workers kept busy; None if unknown.
    throttled
        Share of the time in which the quota had run out, from 0 to 1.
    share
        Number of cores for this rank if the machine runs several ranks; None if it runs one.
    """

    cores: float
    busy: float | None = None
    own: float | None = None
    throttled: float = 0.0
    share: float | None = None


def others_busy(use: CoreUse) -> float:
    """Return the cores that other programs kept busy; 0 for less than a quarter of the cores."""
    others = 0.0 if use.busy is None or use.own is None else use.busy - use.own
    return others if others >= 0.25 * use.cores else 0.0


@dataclass(frozen=True)
class Recording:
    """Measurements of one run: stages in order from the source, branches before their join."""

    stages: tuple[StageRecord, ...]
    loop: LoopRecord
    cores: CoreUse | None = None
    switch_interval: float = 0.005
    """Seconds after which a waiting thread requests the GIL; infinite in a free-threaded Python."""
    stores: tuple[StoreUse, ...] = ()  # use of object stores, by their names


def stall_by_stage(stages: Sequence[Iterable[Span]], waits: Iterable[Wait]) -> list[float]:
    """Return the seconds of `waits` that belong to each of `stages`, given by its spans.

    The waits follow one another. The sum of the result is never more than the sum of the waits.
    """
    # Time, stage (-1: the loop), 1 for begin or -1 for end, part and density.
    moves: list[tuple[float, int, int, float, float]] = []
    for wait in waits:
        if wait.ended > wait.began:
            moves += ((wait.began, -1, 1, 0.0, 0.0), (wait.ended, -1, -1, 0.0, 0.0))
    for number, spans in enumerate(stages):
        for span in spans:
            if span.ended > span.began and span.part > 0:
                moves += (
                    (span.began, number, 1, span.part, span.density),
                    (span.ended, number, -1, -span.part, -span.density),
                )
    moves.sort()
    found = [0.0] * len(stages)
    busy, parts = [0] * len(stages), [0.0] * len(stages)  # open spans of each, and their sum
    waiting, before, active = 0, 0.0, 0.0
    for time, number, step, part, density in moves:
        if waiting and time > before:
            whole = math.fsum(parts)
            if whole > 0:
                took = (time - before) * min(1.0, max(0.0, active))
                for stage, own in enumerate(parts):
                    if own:
                        found[stage] += took * (own / whole)
        before = time
        if number < 0:
            waiting += step
            continue
        busy[number] += step
        active += density
        # Exactly 0 after the last span: the sum would keep a rounding error.
        parts[number] = max(0.0, parts[number] + part) if busy[number] else 0.0
    return found


def between(began: float, ended: float, pauses: Iterable[tuple[float, float]]) -> list[Span]:
    """Return the spans from `began` to `ended` that are in none of the `pauses`."""
    spans, at = [], began
    for first, last in sorted(pauses):
        if first > at:
            spans.append(Span(at, min(first, ended)))
        at = max(at, last)
        if at >= ended:
            return spans
    if at < ended:
        spans.append(Span(at, ended))
    return spans


def within(waits: Iterable[Wait], began: float, ended: float) -> list[Wait]:
    """Return `waits` cut to the time from `began` to `ended`."""
    cut = (Wait(max(wait.began, began), min(wait.ended, ended)) for wait in waits)
    return [wait for wait in cut if wait.ended > wait.began]


def length(waits: Iterable[Wait | Span]) -> float:
    """Return the seconds of all `waits`."""
    return math.fsum(wait.ended - wait.began for wait in waits)


def percentile(loop: LoopRecord, waits: Sequence[Wait], part: float) -> float:
    """Return the seconds that a call of `next()` did not exceed in `part` of the calls.

    `waits` are the entries of `loop.waits` to count. Shorter calls count with their mean.
    """
    longer = len(loop.waits)
    # Shorter calls also lie between the waits that were dropped.
    brief = round(loop.brief * longer / (longer + loop.dropped)) if loop.dropped else loop.brief
    shorter = loop.brief_seconds / loop.brief if loop.brief else 0.0
    rank = max(0, math.ceil(part * (brief + len(waits))) - 1)
    if rank >= brief and waits:  # `within` may have cut one of these
        return max(shorter, sorted(wait.ended - wait.began for wait in waits)[rank - brief])
    return shorter


LOOP = "your loop"  # name of the row of the loop that takes the items

NOTHING = 0.25
"""A worker with less than this fraction of the busiest worker's time has next to nothing to do."""

REST = "none of them"  # name of the stall in which no stage was busy


@dataclass(frozen=True)
class Figures:
    """Figures of one recording."""

    recording: Recording
    names: tuple[str, ...]
    """Names of the stages; no two are the same, and none is that of another row."""
    full: float | None  # time at which the prefetch was full; None if it never was
    seconds: float  # seconds since the prefetch was full; the fields below also count from then
    calls: int  # calls of `next()`
    stall: float  # seconds that the loop spent in `next()`
    warmup: float  # seconds that the loop spent in `next()` before the prefetch was full
    p50: float
    p99: float
    by_stage: tuple[float, ...]  # seconds of the stall that belong to each stage

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
        loop, stages = recording.loop, recording.stages
        full = _full(recording)
        since = loop.ended if full is None else min(max(full, loop.began), loop.ended)
        seconds, whole = loop.ended - since, loop.ended - loop.began
        later = within(loop.waits, since, loop.ended)
        kept = length(loop.waits)
        # Shorter calls and dropped ones have no known times: assume they are spread evenly.
        spread = max(0.0, loop.waited - kept)
        part = seconds / whole if whole > 0 else 0.0
        stall = min(seconds, length(later) + spread * part)
        # Only the time that the rings of all stages still cover.
        known = [since, *(s.since for s in stages if s.since is not None)]
        if loop.dropped and loop.waits:
            known.append(loop.waits[0].began)
        seen = within(later, max(known), loop.ended)
        shares = stall_by_stage([stage.spans for stage in stages], seen)
        if not seen and stall > 0:  # only short calls: divide the stall by the loads of the stages
            loads = [stage.load for stage in stages]
            shares = [load / max(1.0, sum(loads)) for load in loads]
        measured = length(seen) if seen else 1.0
        return cls(
            recording=recording,
            names=_names(stages),
            full=full,
            seconds=seconds,
            calls=0 if full is None else len(later) + loop.brief + loop.dropped,
            stall=stall,
            warmup=max(0.0, loop.waited - stall),
            p50=percentile(loop, later, 0.5),
            p99=percentile(loop, later, 0.99),
            by_stage=tuple(stall * share / measured for share in shares),
        )


def without_data(stage: StageRecord) -> int:
    """Return the number of workers with next to nothing to read, because others read the data."""
    most = max(stage.parts, default=0.0)
    return sum(busy < NOTHING * most for busy in stage.parts)


def _full(recording: Recording) -> float | None:
    """Return the time at which the last of the stages was full; None if none ever was.

    A stage of quick tasks may have reported too rarely for that to be seen.
    """
    begun = [stage for stage in recording.stages if stage.first is not None]
    if not begun:
        return recording.loop.began if recording.loop.items else None
    return max((stage.full for stage in begun if stage.full is not None), default=None)


def _names(stages: Sequence[StageRecord]) -> tuple[str, ...]:
    names = [LOOP, REST]
    for stage in stages:
        name, number = stage.name, 1
        while name in names:
            number += 1
            name = f"{stage.name} ({number})"
        names.append(name)
    return tuple(names[2:])
