"""What travels between a stage and its workers: messages one way, events the other.

Nothing here knows what carries it. Every class is frozen and made of plain values, so that it can
go by reference to a thread and by pickle to a process. Those of which there is one a batch are named
tuples, which are made in a third of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hybridloader._support.errors import Failure
    from hybridloader.engine.dataset_state import ShardStart
    from hybridloader.engine.fetcher import Fetch
    from hybridloader.engine.payload import Payload
    from hybridloader.engine.refresh import Change
    from hybridloader.seeding.sample_seeds import Origin


@dataclass(frozen=True)
class WorkerSpec:
    """What every worker of one stage is told when it starts; the same object for all of them.

    Attributes
    ----------
    stage
        The name that errors give to the stage.
    workers
        How many workers the stage has. 0 means that the caller does the work itself, in its own
        context: no worker info, no seeding, no `init_fn`, as torch does with ``num_workers=0``.
    fetch
        Makes one result out of one index; opened once per worker and epoch.
    base_seed
        Worker ``i`` is seeded with ``base_seed + i``.
    init_fn
        Called in each worker, after seeding, with the worker's number.
    shared_seed
        The seed that all workers of an `IterDataPipe` share in the first epoch.
    tracked
        Whether a worker notes which sample of its task it is at, should it die.
    skip
        Samples of its shard that the worker before it in this place has delivered in this epoch.
    starts
        Where each worker goes on in its first epoch, if not at the beginning.
    seeding
        What the seeds of samples follow from, under ``seeding="sample"``.
    tells
        Whether `Ready` tells the first state of the dataset, or why the worker could not begin.
    """

    stage: str
    workers: int
    fetch: Fetch
    base_seed: int = 0
    init_fn: Callable[[int], None] | None = None
    shared_seed: int | None = None
    tracked: bool = False
    skip: int = 0
    starts: tuple[ShardStart, ...] = ()
    seeding: Origin | None = None
    tells: bool = False


class Task(NamedTuple):
    """Fetch `index` and answer with `seq`."""

    seq: int
    index: Any


@dataclass(frozen=True)
class Begin:
    """A new epoch: take over `changes` and open a new fetcher, once the tasks before it are done."""

    epoch: int
    shared_seed: int | None = None
    changes: tuple[Change, ...] = ()


class First(NamedTuple):
    """What the next task begins with, under ``seeding="sample"``.

    Attributes
    ----------
    item
        Its first item's number in the stage's input, from 0 in each pass.
    epoch
        The number of the pass.
    """

    item: int
    epoch: int


@dataclass(frozen=True)
class Stop:
    """No more tasks will come: finish."""


Message = Task | Begin | First | Stop


class Ready(NamedTuple):
    """The worker has started and ran its `init_fn`.

    Attributes
    ----------
    told
        The state of the dataset, or the error with which it began, if the worker was to tell.
    """

    worker: int
    told: ShardStart | Failure | None = None


class Done(NamedTuple):
    """Task `seq` has a value; the worker spent `seconds` on it, and is at `position` of its shard.

    Attributes
    ----------
    extras
        Metadata of the value, by name; None if there is none. ``"outcome"`` is what failed on the way
        (`faults.tried.Outcome`), ``"state"`` the state of the dataset (`states.carried.Start`).
    """

    worker: int
    seq: int
    payload: Payload
    seconds: float = 0.0
    position: int = 0
    extras: dict[str, Any] | None = None


class Failed(NamedTuple):
    """Task `seq` raised; the worker goes on, from `position` of its shard. It has no metadata."""

    worker: int
    seq: int
    failure: Failure
    position: int = 0
    extras: None = None


class Last:
    """Record of the result handed out last, as `Done` has it, without the value.

    It outlives the stage. `seq` is -1 where there was none.
    """

    __slots__ = ("extras", "position", "seq", "worker")

    def __init__(self) -> None:
        self.seq, self.worker, self.position = -1, 0, 0
        self.extras: dict[str, Any] | None = None


class Exhausted(NamedTuple):
    """The worker's shard of an iterable dataset ended when it was asked for task `seq`.

    It answers no further task of this epoch.

    Attributes
    ----------
    position
        Number of samples that the shard had.
    told
        The state of the dataset behind its end, if it has one.
    """

    worker: int
    seq: int
    position: int = 0
    told: ShardStart | None = None


@dataclass(frozen=True)
class Exited:
    """The worker is gone.

    Attributes
    ----------
    cause
        What happened; None when it was asked to go.
    task, at
        The task that it was at, and the number of the sample in it, if somebody wanted to know
        (`TaskContext`). `at` is -1 between two samples, None where it is not known.
    evidence
        The stack that it left.
    memory
        What is known of the memory, if that may have been the cause.
    slots
        Bytes that its slots took, and that they were allowed.
    """

    worker: int
    cause: str | None = None
    task: int | None = None
    at: int | None = None
    evidence: str = ""
    memory: str = ""
    slots: tuple[int, int] | None = None


Result = Done | Failed
Event = Ready | Done | Failed | Exhausted | Exited
