"""Messages from a stage to its workers, and events from the workers.

They depend on no transport. Every class is frozen and made of plain values, so that it can go by
reference to a thread and by pickle to a process. Those of which there is one a batch are named
tuples, which are made in a third of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hybridloader._support.torch_env import Modes
    from hybridloader._support.user_objects import Failure
    from hybridloader.engine.dataset_state import ShardStart
    from hybridloader.engine.fetcher import Fetch
    from hybridloader.engine.meter import Metering
    from hybridloader.engine.payload import Payload
    from hybridloader.engine.refresh import Change
    from hybridloader.seeding.sample_seeds import Origin


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of the workers of one stage; the same object for all of them."""

    stage: str
    """Name of the stage in errors."""
    workers: int
    """Number of workers of the stage. 0: the calling thread does the work, in its own context,
    without worker info, seeding or `init_fn`, as with torch's ``num_workers=0``."""
    fetch: Fetch
    """Work of the stage: makes one result of one index; opened once per worker and epoch."""
    base_seed: int = 0
    """Seed of worker 0; worker ``i`` is seeded with ``base_seed + i``."""
    init_fn: Callable[[int], None] | None = None
    """Function called in each worker, after seeding, with the worker's number."""
    shared_seed: int | None = None
    """Seed that all workers of an `IterDataPipe` share in the first epoch."""
    deferred: bool = False
    """True if the first epoch begins with a `Begin` too, since the workers start before it is known."""
    tracked: bool = False
    """True if a worker notes the current sample of its task, for a report if it dies."""
    timed: bool = False
    """True if the time that a worker takes for a task is limited."""
    skip: int = 0
    """Number of samples of the shard that an earlier worker of this number has delivered in this
    epoch."""
    starts: tuple[ShardStart, ...] = ()
    """Position at which each worker begins its first epoch; empty: all begin at the start."""
    seeding: Origin | None = None
    """Origin of the seeds of samples, under ``seeding="sample"``."""
    reports_state: bool = False
    """True if `Ready` carries the first state of the dataset, or the error of the worker's
    start."""
    metering: Metering | None = None
    """Specification of a worker's meter; None measures nothing."""
    modes: Modes | None = None
    """Modes of torch that a worker thread takes over from the thread that begins the epoch."""

    @property
    def sharable(self) -> bool:
        """True if workers on threads may fetch the samples of a task together.

        Not where a worker is watched: it must be known which task it is at, and since when.
        """
        alone = self.tracked or self.timed or self.reports_state or self.workers < 2
        return not alone and self.fetch.threads == 1 and self.fetch.divisible

    @property
    def overlaps(self) -> bool:
        """True if a worker's threads, or coroutines, may fetch samples of several tasks at a time."""
        return self.fetch.overlaps and not (self.tracked or self.timed or self.reports_state)


class Task(NamedTuple):
    """Order to fetch `index`, and to answer with `seq`."""

    seq: int
    index: Any
    item: int = 0
    """Number of its first item in the stage's input of this epoch, if items are seeded by number."""


@dataclass(frozen=True)
class Begin:
    """Begin of an epoch: apply `changes` and open a new fetcher, once the tasks before it are done."""

    epoch: int  # by which samples are seeded
    shared_seed: int | None = None
    changes: tuple[Change, ...] = ()
    modes: Modes | None = None  # see `WorkerSpec.modes`


@dataclass(frozen=True)
class Stop:
    """Order to finish: no more tasks will come."""


Message = Task | Begin | Stop


class Ready(NamedTuple):
    """Event: the worker has started and ran its `init_fn`.

    `shard_start` is the state of the dataset, or the error that it began with, if
    `WorkerSpec.reports_state` is True.
    """

    worker: int
    shard_start: ShardStart | Failure | None = None


class Done(NamedTuple):
    """Event: task `seq` has a value."""

    worker: int
    seq: int
    payload: Payload
    seconds: float = 0.0
    """Seconds that the worker spent on the task."""
    position: int = 0
    """Number of samples of its shard that the worker has read."""
    extras: dict[str, Any] | None = None
    """Metadata of the value, by name; None if there is none. ``"outcome"``: the errors that an
    error policy has handled. ``"state"``: the state of the dataset (`ShardStart`). ``"measures"``:
    the measures of a meter."""


class Failed(NamedTuple):
    """Event: task `seq` raised; the worker continues from `position` of its shard."""

    worker: int
    seq: int
    failure: Failure
    position: int = 0
    extras: None = None


class Last:
    """Record of the result handed out last, as `Done` has it, without the value; outlives the stage."""

    seq = -1  # no result yet
    worker = position = 0
    extras: dict[str, Any] | None = None


class Exhausted(NamedTuple):
    """Event: the worker's shard of an iterable dataset ended when it was asked for task `seq`.

    It answers no further task of this epoch. The shard had `position` samples. `shard_start` is the
    state of the dataset at its end, if it has one.
    """

    worker: int
    seq: int
    position: int = 0
    shard_start: ShardStart | None = None


@dataclass(frozen=True)
class Exited:
    """Event: the worker is gone."""

    worker: int
    cause: str | None = None
    """Cause of its end, as the predicate of a sentence; None if it was ordered to stop."""
    task: int | None = None
    """Task that it was doing, if `WorkerSpec.tracked` or if workers shared it."""
    at: int | None = None
    """Number of the sample in that task; -1 between two samples, None if it is not known."""
    evidence: str = ""
    """Stack of the worker at its end."""
    memory: str = ""
    """Report on memory, if a lack of memory may be the cause."""
    slots: tuple[int, int] | None = None
    """Bytes that its slots took, and the limit of these bytes."""
    with_it: str | None = None
    """Identity of the process or machine whose end ended this worker and others; None: it ended
    alone. A restart policy counts these deaths as one."""


Result = Done | Failed
Event = Ready | Done | Failed | Exhausted | Exited
