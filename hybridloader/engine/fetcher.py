"""Contract between a worker and the work of a stage.

A `Fetch` describes the work, and can be sent to a worker. The `Fetcher` that it opens there does the
work of one epoch, a task at a time. Both share a `TaskContext` with the worker that drives them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hybridloader._support.user_objects import mark
from hybridloader.errors import WorkerDied

if TYPE_CHECKING:
    from hybridloader.engine.dataset_state import DatasetStates, ShardStart
    from hybridloader.engine.meter import TaskParts
    from hybridloader.engine.slices import Slices
    from hybridloader.seeding.sample_rng import Key, SampleRng


class EndOfShard(Exception):
    """The iterable dataset of this worker has no more to give in this epoch."""


class Abandoned(BaseException):
    """The iterator was closed; no one waits for this batch. No ``except Exception`` catches it."""


class TaskContext:
    """State of the current task, shared by a worker, its fetcher and its backend.

    Attributes
    ----------
    tracked
        True if fetchers note which sample of a task they are at, should the worker die.
    cancelled
        True once no one waits any more; fetchers check it after every sample. Set from any thread, even
        by a finalizer: a plain attribute, without a lock.
    at
        Number of the sample in the task, set before each sample if `tracked`; -1: none, or not known.
    task
        Number of the task, for a worker that is a thread; -1: none.
    rng
        Sample RNG under ``seeding="sample"``, else None; read when a fetcher is opened.
    retried
        Number of calls of the user's functions that were made again because they had failed, since a
        meter has last reported.
    extras
        Metadata of the task's value, for `Done.extras`. Set by the fetcher, taken by the worker.
    slices
        Slices of a trace, to which fetchers add; None if there is no trace.
    parts
        Seconds of parts of tasks, to which fetchers add; None if the run is not observed.
    set_up
        Objects of a stage's functions whose `setup` this worker has called, by the function's number.
    helpers, loop
        Threads (`Fanout`) and event loop (`Loop`) of this worker, from the first fetcher that needs them
        to the end of the worker.
    """

    __slots__ = (
        *("at", "cancelled", "extras", "helpers", "loop", "parts", "retried", "rng", "set_up"),
        *("slices", "task", "tracked"),
    )

    def __init__(self, *, tracked: bool = False) -> None:
        self.tracked = tracked
        self.cancelled = False
        self.rng: SampleRng | None = None
        self.extras: dict[str, Any] | None = None
        self.slices: Slices | None = None
        self.parts: TaskParts | None = None
        self.set_up: dict[int, Any] = {}
        self.helpers: Any = None
        self.loop: Any = None
        self.at = self.task = -1
        self.retried = 0

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

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Return a part of `value` that can be sent, as all of it can't because of `error`; or raise.

        `check` raises an error for a value that can't be sent.
        """
        try:
            raise error
        finally:
            del error  # a traceback whose frame holds its own exception is a cycle

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

    def samples_of(self, index: Any) -> Any:
        """Return the indices of a task's samples, which several workers may fetch, if `divisible`."""
        return index

    @property
    def waits(self) -> bool:
        """True if each sample waits for a store, so that workers share tasks from the first on."""
        return False

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
