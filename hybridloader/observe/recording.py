"""Recording of one run: the measurements until now, as plain frozen data.

All times are seconds of `time.perf_counter`. Unknown values are None. `figures` and `verdict` are
functions of recordings, without a clock or a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridloader._support.store_use import StoreUse


class Span(NamedTuple):
    """Time in which a worker, or the thread of a relay, was busy."""

    began: float
    ended: float
    part: float = 1.0
    """This worker's part of its stage's capacity: 0.5 for one of two workers, if it never pauses."""
    density: float = 1.0
    """Busy share of this worker meanwhile, from 0 to 1."""


class Wait(NamedTuple):
    """Time that the loop spent in one call of `next()`."""

    began: float
    ended: float


class CoroutineUse(NamedTuple):
    """Use of the event loops of a step whose function is ``async def``."""

    step: str
    concurrency: int
    begun: int
    """Number of coroutines."""
    idle: float
    """Seconds that the event loops waited for something that a coroutine awaits."""
    held: float
    """Seconds that coroutines ran and blocked the event loops."""


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
        pairs = zip(self.counts, other.counts, strict=True)
        return Faults(*(one + two for one, two in pairs))

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.skipped, self.replaced, self.retried, self.restarted

    def __bool__(self) -> bool:
        return any(self.counts)


@dataclass(frozen=True)
class StageRecord:
    """Measurements of one stage, of one thread between two stages, or of a source."""

    name: str
    backend: str
    """Backend of the stage; ``"thread"`` for a relay, ``"caller"`` for the loop's thread."""
    workers: int = 1
    items: int = 0
    busy: float = 0.0
    """Busy seconds, summed over workers, as are the next three."""
    starved: float = 0.0
    blocked: float = 0.0
    other: float = 0.0
    cpu: float | None = None
    """CPU seconds of its workers."""
    wait_for_core: float | None = None
    """Seconds that its workers were runnable but had no core."""
    gil_waits: tuple[float, ...] = ()
    """Seconds that its threads took to get the GIL back after releasing it, sampled."""
    collating: float = 0.0
    """Seconds of `busy` that `collate_fn` took."""
    packing: float = 0.0
    """Seconds of `busy` that packing results took."""
    sending: float = 0.0
    """Seconds, not in `busy`, that sending and opening results took."""
    bytes: int | None = None
    arrays: float = 0.0
    """Share of `bytes` in tensors and arrays, which are not pickled."""
    queued: int = 0
    faults: Faults = field(default=Faults())
    spans: tuple[Span, ...] = ()
    latencies: tuple[float, ...] = ()
    """Seconds from the end of a task until its result was received, for results that were waited for."""
    since: float | None = None
    """Time before which spans were dropped."""
    first: float | None = None
    """Time at which its first task began."""
    firsts: tuple[Wait, ...] = ()
    """Times of the first task of each worker."""
    later: float | None = None
    """Mean seconds of the other tasks; None if there were none."""
    parts: tuple[float, ...] = ()
    """Busy seconds of each worker, if each worker reads a separate part of the data."""
    coroutines: CoroutineUse | None = None
    """Use of event loops, if its function, or the slowest of its functions, is an ``async def``."""
    full: float | None = None
    """Time at which a whole window of tasks had returned."""
    in_process: bool = True
    """True if its workers share the GIL with the loop."""
    source: bool = False
    """True for a sampler and for the reader of a source."""
    reads: bool = False
    """True for a stage that reads samples of a dataset."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the user's constructor that affect this stage, with their values."""


@dataclass(frozen=True)
class LoopRecord:
    """Measurements of the loop that takes the items."""

    began: float
    ended: float
    items: int = 0
    waited: float = 0.0
    """Total seconds spent in `next()`."""
    waits: tuple[Wait, ...] = ()
    """The longer waits, in order."""
    brief: int = 0
    """Number of shorter waits, which are not in `waits`."""
    brief_seconds: float = 0.0
    dropped: int = 0
    """Number of longer waits that were dropped from `waits`."""


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


@dataclass(frozen=True)
class Recording:
    """Measurements of one run: stages in order from the source, branches before their join."""

    stages: tuple[StageRecord, ...]
    loop: LoopRecord
    cores: CoreUse | None = None
    switch_interval: float = 0.005
    """Seconds after which a waiting thread requests the GIL; infinite in a free-threaded Python."""
    batch_size: int | None = None
    """Samples per item; None if unknown."""
    stores: tuple[StoreUse, ...] = ()
    """Use of object stores, by their names."""
