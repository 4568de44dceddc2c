"""Recording of one run: what was measured until now, as plain frozen data.

All times are seconds of `time.perf_counter`. What is not known is None. `figures` and `verdict`
are functions of these, without a clock or a thread.
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
    """Busy share of the workers of its stage meanwhile, by this one: 0.5 for one of two that works
    without a pause."""
    density: float = 1.0
    """Busy share of this worker meanwhile, from 0 to 1."""


class Wait(NamedTuple):
    """Time that the loop spent in one call of `next()`."""

    began: float
    ended: float


class CoroutineUse(NamedTuple):
    """Use of the event loops that a step with an ``async def`` function has."""

    step: str
    concurrency: int
    begun: int
    """Number of coroutines."""
    idle: float
    """Seconds that they waited for something that a coroutine awaits."""
    held: float
    """Seconds that coroutines kept them from that."""


@dataclass(frozen=True)
class Faults:
    """Faults of one stage, or of all.

    Attributes
    ----------
    skipped
        Items that failed and were left out.
    replaced
        Items that failed, and in whose places others were put.
    retried
        Calls that were made again because the one before had failed.
    restarted
        Workers that died, or ran over, and in whose places others were started.
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
    """Backend that it runs on; ``"thread"`` for a relay's, ``"caller"`` for the loop's own thread."""
    workers: int = 1
    items: int = 0
    busy: float = 0.0
    """Seconds that its workers worked, together; as the next three."""
    starved: float = 0.0
    blocked: float = 0.0
    other: float = 0.0
    cpu: float | None = None
    """CPU seconds of its workers."""
    wait_for_core: float | None = None
    """Seconds that its workers could have run and had no core."""
    gil_waits: tuple[float, ...] = ()
    """Seconds that its threads waited for the GIL when they had let go of it, at some moments."""
    collating: float = 0.0
    """Seconds of `busy` that `collate_fn` took."""
    packing: float = 0.0
    """Seconds of `busy` that went into packing results."""
    sending: float = 0.0
    """Seconds besides, that went into sending results, and into opening them."""
    bytes: int | None = None
    arrays: float = 0.0
    """Share of these that is of tensors and arrays, and not pickled."""
    queued: int = 0
    faults: Faults = field(default=Faults())
    spans: tuple[Span, ...] = ()
    latencies: tuple[float, ...] = ()
    """Seconds from the end of a task to when it was heard, where that was waited for."""
    since: float | None = None
    """Time before which `spans` has nothing, because it was dropped."""
    first: float | None = None
    """Time at which its first task began."""
    firsts: tuple[Wait, ...] = ()
    """Times in which each of its workers did its first task."""
    later: float | None = None
    """Seconds of any other task, on average; None if there were no others."""
    parts: tuple[float, ...] = ()
    """Busy seconds of each worker, if each reads a part of the data of its own."""
    coroutines: CoroutineUse | None = None
    """Use of event loops, if its function, or the slowest of its functions, is an ``async def``."""
    full: float | None = None
    """Time at which as many tasks had come back as its window holds."""
    in_process: bool = True
    """True if its workers share the GIL with the loop."""
    source: bool = False
    """True for a sampler, and for whatever reads a source."""
    reads: bool = False
    """True for whatever reads samples of a dataset."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that whoever made it may change so that it changes something, and their values."""


@dataclass(frozen=True)
class LoopRecord:
    """Measurements of the loop that takes the items."""

    began: float
    ended: float
    items: int = 0
    waited: float = 0.0
    """Seconds spent in `next()`, in all."""
    waits: tuple[Wait, ...] = ()
    """The longer ones of these, in their order."""
    brief: int = 0
    """Number of the shorter ones, which are not in `waits`."""
    brief_seconds: float = 0.0
    dropped: int = 0
    """Number of longer ones that are no more in `waits`."""


@dataclass(frozen=True)
class CoreUse:
    """Cores that this process may use, and how busy they were.

    Attributes
    ----------
    cores
        Number of cores, by affinity and cgroup quota; with a quota it may be a fraction.
    busy
        Number of these that were busy on average, with this program or another; None: not known.
    own
        Number of cores that this program and its workers kept busy; None: not known.
    throttled
        Share of the time in which the quota had run out, from 0 to 1.
    share
        Number of cores of this rank, if several run on the machine; None: there is one.
    """

    cores: float
    busy: float | None = None
    own: float | None = None
    throttled: float = 0.0
    share: float | None = None


@dataclass(frozen=True)
class Recording:
    """Measurements of one run: stages from the source on, branches before what joins them."""

    stages: tuple[StageRecord, ...]
    loop: LoopRecord
    cores: CoreUse | None = None
    switch_interval: float = 0.005
    """Seconds after which a thread that waits for the GIL asks for it; infinite where there is none."""
    batch_size: int | None = None
    """Samples of each item; None if that is not known."""
    stores: tuple[StoreUse, ...] = ()
    """Use of object stores, by their names."""
