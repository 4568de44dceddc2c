"""Messages from a stage to its workers, events from the workers, and the contract of their work.

They depend on no transport. Every message is frozen and made of plain values, so that it can go by
reference to a thread and by pickle to a process. Those of which there is one a batch are named
tuples, which are made in a third of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from hybridloader._support.user_objects import mark
from hybridloader.errors import WorkerDied

if TYPE_CHECKING:
    from hybridloader._support.torch_env import Modes
    from hybridloader._support.user_objects import Failure
    from hybridloader.engine.dataset_state import Change, DatasetStates, ShardStart
    from hybridloader.engine.meter import Metering, Slices, TaskParts
    from hybridloader.seeding.sample_rng import Key, Origin, SampleRng


# -- Contract between a worker and the work of a stage.
#
# A `Fetch` describes the work, and can be sent to a worker. The `Fetcher` that it opens there does the
# work of one epoch, a task at a time. Both share a `TaskContext` with the worker that drives them.


class EndOfShard(Exception):
    """The iterable dataset of this worker has no more to give in this epoch."""


class Abandoned(BaseException):
    """The iterator was closed; no one waits for this batch. No ``except Exception`` catches it."""


class TaskContext:
    """State of the current task, shared by a worker, its fetcher and its backend."""

    __slots__ = (
        *("at", "cancelled", "extras", "helpers", "loop", "parts", "retried", "rng", "set_up"),
        *("slices", "task", "tracked"),
    )

    def __init__(self, *, tracked: bool = False) -> None:
        self.tracked = tracked
        """True if fetchers note which sample of a task they are at, should the worker die."""
        self.cancelled = False
        """True once no one waits any more; fetchers check it after every sample. Set from any thread,
        even by a finalizer: a plain attribute, without a lock."""
        self.rng: SampleRng | None = None  # if samples are seeded; read when a fetcher opens
        self.extras: dict[str, Any] | None = None
        """Metadata of the task's value, for `Done.extras`. Set by the fetcher, taken by the worker."""
        # Fetchers add to these two: slices of a trace, and seconds of parts of tasks if observed.
        self.slices: Slices | None = None
        self.parts: TaskParts | None = None
        self.set_up: dict[int, Any] = {}
        """Objects of a stage's functions whose `setup` this worker has called, by their number."""
        # Threads (`Fanout`) and event loop (`Loop`) of this worker, from the first fetcher that needs
        # them to the end of the worker.
        self.helpers: Any = None
        self.loop: Any = None
        self.at = -1  # sample in the task, set before each if `tracked`; -1: none, or not known
        self.task = -1  # number of the task, for a worker that is a thread; -1: none
        self.retried = 0
        """Number of calls of the user's functions that were made again because they had failed, since
        a meter has last reported."""

    def add(self, name: str, value: Any) -> None:
        """Add metadata to the value of the current task."""
        if self.extras is None:
            self.extras = {name: value}
        else:
            self.extras[name] = value

    def timed(
        self, name: str, function: Callable[[Any], Any], least: float = 0.0
    ) -> Callable[[Any], Any]:
        """Return `function`, whose calls are slices of a trace, if there is one; see `Slices.timed`."""
        return function if self.slices is None else self.slices.timed(name, function, least)

    def take_extras(self) -> dict[str, Any] | None:
        """Return the metadata, and begin with none."""
        extras, self.extras = self.extras, None
        return extras

    def take_retried(self) -> int:
        """Return `retried`, and count from 0 again."""
        retried, self.retried = self.retried, 0
        return retried


class FollowingContext(TaskContext):
    """Context of work within a task of `other`: cancelled with it, untracked, with its own extras."""

    __slots__ = ("_other",)

    def __init__(self, other: TaskContext, rng: SampleRng | None) -> None:
        self._other = other
        super().__init__()
        self.rng, self.slices, self.parts = rng, other.slices, other.parts

    @property
    def cancelled(self) -> bool:
        return self._other.cancelled

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        if value:
            self._other.cancelled = True


class GivenUp:
    """Mark in the place of an `index`, or item, at which workers have died again and again.

    `text` is the message of its error.
    """

    def __init__(self, index: Any, text: str) -> None:
        self.index, self.text = index, text

    def error(self) -> WorkerDied:
        error = WorkerDied(self.text)
        mark(error, "given up")
        return error


class PartlyGivenUp(list[Any]):
    """Indices of a task of which some are `GivenUp`; the type distinguishes them from others."""


class StartedTask(Protocol):
    """Samples of a task that threads, or coroutines, have begun to fetch."""

    seconds: list[float]  # seconds of each sample
    ended: bool  # no sample is in flight, or will be begun

    def result(self) -> Any:
        """Return the samples, for `Fetcher.assemble`; threads raise the error of the first bad one.

        Once, when they have ended.
        """

    def wait_here(self) -> bool:
        """Wait for the samples, or for `Fetcher.wake`; False, at once, if threads fetch them."""

    def stop(self) -> bool:
        """Begin no more samples; they have `ended` if none is in flight."""

    def leave(self) -> bool:
        """Wait for samples that are in flight, for a limited time; False if some are stuck."""


class Fetcher(ABC):
    """Makes the results of one worker in one epoch, one for each task."""

    position: int = 0
    """Number of samples of the worker's shard that were read; 0 if it has no shard."""
    ended: bool = False
    """True once the shard has ended."""
    states: DatasetStates | None = None
    """Access to the state of the dataset that is read; None if it has none."""

    @abstractmethod
    def fetch(self, index: Any) -> Any:
        """Return the result of a task.

        Raises `EndOfShard` if there is no more, and `Abandoned` if the context was cancelled.
        """

    def sample(self, index: Any) -> Any:
        """Return one sample of a task, for `assemble`; asked of any worker if `Fetch.divisible`."""
        raise NotImplementedError

    def begin(self, index: Any, ring: Callable[[], None]) -> StartedTask:
        """Have threads fetch the samples of a task, and `ring` when they have ended.

        Asked if `Fetch.overlaps`. Coroutines need no ring.
        """
        raise NotImplementedError

    def wake(self) -> None:  # noqa: B027  # threads need no wake-up
        """Have the worker look for messages: end `StartedTask.wait_here`. From any thread."""

    def assemble(self, samples: Any, index: Any) -> Any:
        """Return the result of a task, made of its samples, as `fetch` does."""
        raise NotImplementedError

    def key(self, index: Any) -> Key:
        """Return the key that seeds the collation of the task, under ``seeding="sample"``."""
        return b""

    def skip(self, count: int) -> None:  # noqa: B027  # nothing to skip without a shard
        """Skip `count` samples of the shard, which another worker has delivered."""

    def resume(self, start: ShardStart) -> None:  # noqa: B027  # nothing to resume without a shard
        """Resume at the position of an earlier run."""

    def close(self) -> None:  # noqa: B027  # most have no open iterators
        """Close the iterators that are read."""


class FunctionFetcher(Fetcher):
    """Fetcher that calls a function with each index: for work without a shard."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def fetch(self, index: Any) -> Any:
        return self._function(index)


class Fetch(ABC):
    """Work of a stage: makes a result of an index. Can be sent to a worker."""

    batched: bool = True
    """True if the index of a task is a list, of samples' indices or of items."""
    in_turn: ClassVar[bool] = False
    """True if a sample can be read only after those before it."""
    threads: int = 1
    """Number of threads of a worker that fetch samples."""
    coroutines: int = 0
    """Number of coroutines that a worker runs at a time; 0: none."""

    if TYPE_CHECKING:  # a field of some subclasses, a property of others

        @property
        def dataset(self) -> Any:
            """Dataset that ``get_worker_info().dataset`` shows."""

    @property
    def private(self) -> bool:
        """True if every worker must have a copy, also where workers share memory."""
        return False

    @property
    def divisible(self) -> bool:
        """True if several workers that share the dataset may fetch the samples of one task."""
        return False

    listed: ClassVar[bool] = False
    """True if the index of a task is a list of batches, of which there must be one to divide it."""

    @property
    def spreads(self) -> bool:
        """True if several threads of a worker may fetch the samples of a task."""
        return False

    @property
    def overlaps(self) -> bool:
        """True if a worker's threads, or coroutines, may fetch samples of several tasks at a time."""
        return self.coroutines > 1 or (self.threads > 1 and self.divisible)

    def with_dataset(self, dataset: Any) -> Fetch:
        """Return the same work on another copy of the dataset; by default that of a dataclass."""
        work: Any = self
        found: Fetch = replace(work, dataset=dataset)
        return found

    @abstractmethod
    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        """Make the fetcher for one epoch. It may raise `EndOfShard`, once and for all."""


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


class Payload:
    """Result on its way. Exactly one of `open` and `discard` is called, once."""

    __slots__ = ()

    forwardable: ClassVar[bool] = False
    """True if the unopened payload may be the index of a `Task` for another crew whose backend
    `forwards`. The worker there gets the value. The payload may be sent again, to another worker of
    that crew, until the task is answered."""

    count: int | None = None
    """Number of items, if the worker's value is a list and can be forwarded; else None."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, as far as it is known without opening it."""
        return 0

    @property
    def array_bytes(self) -> int:
        """Bytes of these that are of tensors and arrays, and are not pickled."""
        return 0

    def open(self) -> Any:
        """Return the value. An exception is reported as the failure of that task alone."""
        raise NotImplementedError

    def discard(self) -> None:
        """Free the payload. Never raises."""


def known_bytes(payload: Any) -> int:
    """Return the bytes of a payload; 0 for one of another class, which a backend may have."""
    return payload.nbytes if isinstance(payload, Payload) else 0


class ByReference(Payload):
    """Payload of a worker in this process: the value itself."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def open(self) -> Any:
        return self._value

    peek = open  # both leave the value in place

    def discard(self) -> None:
        self._value = None
