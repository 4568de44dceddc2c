"""The steps that a pipeline can be given: a method for each, which makes another pipeline.

Nothing is checked here that an operator checks itself, and nothing runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hybridloader._support.attributes import has
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory
from hybridloader.pipeline.operators.base import Chain, Operator
from hybridloader.pipeline.operators.cache import Cache
from hybridloader.pipeline.operators.fingerprint import fingerprint_of_steps
from hybridloader.pipeline.operators.grouping import Batch, BatchBy, BucketBy, PaddedBatch, Unbatch
from hybridloader.pipeline.operators.join import Branch, Concat, ForkPoint, Interleave, Mix, Zip
from hybridloader.pipeline.operators.order import (
    Enumerate,
    Repeat,
    ShardByRank,
    Shuffle,
    SkipFirst,
    Take,
)
from hybridloader.pipeline.operators.pin import PinMemory, ToDevice
from hybridloader.pipeline.operators.work import Filter, FlatMap, Map, Prefetch

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from hybridloader.pipeline.operators.pin import Ahead
    from hybridloader.pipeline.operators.work import Where


_Steps = TypeVar("_Steps", bound="Steps")


class Steps(Chain):
    """Methods of `Pipeline` that add steps; every method leaves the pipeline as it is."""

    __slots__ = ()

    @abstractmethod
    def _made(self, operators: Sequence[Operator]) -> Self:
        """Return a pipeline of `operators`."""

    def _then(self, operator: Operator) -> Self:
        return self._made((*self.operators, operator))

    # -- work ----------------------------------------------------------------------------------------

    def map(
        self, function: Callable[[Any], Any], *, name: str | None = None, **where: Unpack[Where]
    ) -> Self:
        """`function` of each item.

        Parameters
        ----------
        function
            Takes an item. An object with a method `setup()` is copied for every worker, and `setup` is
            called there once before the first item.
        name
            Name of this stage in errors and tables.
        **where
            See `Placement`: `backend`, `num_workers`, `in_order`, `prefetch`, `buffer_bytes`, `timeout`,
            `worker_init_fn`, `threads_per_worker`, `fuse`, `seeding`, `on_error`, `on_worker_death`,
            `task_timeout`.
        """
        return self._then(Map.placed(function, name, where))

    def flat_map(
        self, function: Callable[[Any], Any], *, name: str | None = None, **where: Unpack[Where]
    ) -> Self:
        """The items of the iterables that `function` returns. See `map`."""
        return self._then(FlatMap.placed(function, name, where))

    def filter(
        self, function: Callable[[Any], Any], *, name: str | None = None, **where: Unpack[Where]
    ) -> Self:
        """The items for which `function` is true. See `map`."""
        return self._then(Filter.placed(function, name, where))

    # -- groups --------------------------------------------------------------------------------------

    def batch(
        self,
        batch_size: int,
        *,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        memory: Memory = DEFAULT_MEMORY,
    ) -> Self:
        """Batches of `batch_size` items; see `Batch`."""
        return self._then(Batch(batch_size, drop_last, collate_fn, memory))

    def unbatch(
        self, columns: bool | None = None, *, split: Callable[[Any], Any] | None = None
    ) -> Self:
        """The samples of batches; see `Unbatch`."""
        return self._then(Unbatch(columns, split))

    def padded_batch(
        self,
        batch_size: int,
        *,
        padding_value: float = 0,
        drop_last: bool = False,
        lengths: bool = False,
        memory: Memory = DEFAULT_MEMORY,
    ) -> Self:
        """Batches of samples of different lengths; see `PaddedBatch`."""
        return self._then(PaddedBatch(batch_size, padding_value, drop_last, lengths, memory))

    def batch_by(
        self,
        cost: Callable[[Any], float],
        budget: float,
        *,
        drop_last: bool = False,
        padded: bool = False,
        max_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        oversize: str = "raise",
        memory: Memory = DEFAULT_MEMORY,
    ) -> Self:
        """Batches that cost at most `budget` together, such as tokens; see `BatchBy`."""
        return self._then(
            BatchBy(cost, budget, drop_last, padded, max_size, collate_fn, oversize, memory)
        )

    def bucket_by(
        self,
        key: Callable[[Any], Any],
        batch_size: int | Mapping[Any, int] | Callable[[Any], int],
        *,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        memory: Memory = DEFAULT_MEMORY,
    ) -> Self:
        """Batches of items with the same key; see `BucketBy`."""
        return self._then(BucketBy(key, batch_size, drop_last, collate_fn, memory))

    # -- order ---------------------------------------------------------------------------------------

    def shuffle(self, buffer_size: int, seed: int | None = None) -> Self:
        """The items in another order, as far as a buffer allows; see `Shuffle`."""
        return self._then(Shuffle(buffer_size, seed))

    def take(self, count: int) -> Self:
        """The first `count` items."""
        return self._then(Take(count))

    def skip(self, count: int) -> Self:
        """All but the first `count` items."""
        return self._then(SkipFirst(count))

    def enumerate(self, start: int = 0) -> Self:
        """``(number, item)`` for each item."""
        return self._then(Enumerate(start))

    def repeat(self, times: int | None = None) -> Self:
        """All of this `times` times, or for ever; each time is an epoch of its own."""
        return self._then(Repeat(times))

    def shard(self, num_replicas: int | None = None, rank: int | None = None) -> Self:
        """Every `num_replicas`-th item, from number `rank` on.

        None takes what torch.distributed says. It comes before the `map` stages that it follows, so
        that no work is thrown away.
        """
        return self._then(ShardByRank(num_replicas, rank))

    def cache(self, path: Any = None, *, fingerprint: str | None = None) -> Self:
        """Keep the items of the first whole pass, in memory or in a file; see `Cache`.

        Parameters
        ----------
        path
            Path of the file.
        fingerprint
            Your own description of the contents; a file with another one is refused. None takes the
            steps before, with their arguments, their attributes, and a sample of the data.
        """
        if fingerprint is None:
            fingerprint = "" if path is None else fingerprint_of_steps(self)
        return self._then(Cache(path, fingerprint=fingerprint))

    def prefetch(self, count: int) -> Self:
        """Keep `count` items at hand, made by a thread of their own."""
        return self._then(Prefetch(count))

    # -- several pipelines ---------------------------------------------------------------------------

    def zip(self, *others: Self, strict: bool = True) -> Self:
        """Tuples of one item from each; also as ``Pipeline.zip(a, b)``."""
        parts = _pipelines("zip", self, others)
        return parts[0]._made([Zip(parts, strict)])

    def concat(self, *others: Self) -> Self:
        """All items of this, then all of the next."""
        parts = _pipelines("concat", self, others)
        return parts[0]._made([Concat(parts)])

    def mix(
        self,
        *others: Self,
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop: str = "all",
    ) -> Self:
        """Items of all, drawn by weight; see `Mix`."""
        weights = None if weights is None else tuple(weights)
        parts = _pipelines("mix", self, others)
        return parts[0]._made([Mix(parts, weights, seed, stop)])

    def interleave(self, *others: Self, block: int = 1) -> Self:
        """`block` items of each in turn, until all have ended."""
        parts = _pipelines("interleave", self, others)
        return parts[0]._made([Interleave(parts, block)])

    def fork(self, count: int = 2) -> tuple[Self, ...]:
        """`count` pipelines that all give the items of this one, which runs once.

        Join all of them again, as in ``Pipeline.zip(a.map(f), b.map(g))``.
        """
        fork = ForkPoint(self, count)
        return tuple(self._made([Branch(fork, number)]) for number in range(count))

    # -- the end -------------------------------------------------------------------------------------

    def pin_memory(self, device: Any = None, **ahead: Unpack[Ahead]) -> Self:
        """Batches in page-locked memory, made so by a thread of its own; see `PinMemory`."""
        return self._then(PinMemory(device, **ahead))

    def to(self, device: Any, **ahead: Unpack[Ahead]) -> Self:
        """Batches on a device, copied there ahead by a thread of its own; see `ToDevice`.

        ``"cpu"`` changes nothing.
        """
        step = ToDevice(device, **ahead)
        return self if str(device).partition(":")[0] == "cpu" else self._then(step)

    def apply(self, step: Operator | Callable[[Self], Self]) -> Self:
        """An operator of your own, or what a function makes of this pipeline."""
        if isinstance(step, Operator):
            return self._then(step)
        if not callable(step) or isinstance(step, type):
            raise TypeError(f"apply takes an Operator or a function of a Pipeline, not {step!r}")
        made: object = step(self)
        if not isinstance(made, Steps):
            raise TypeError(f"apply: {step!r} returned {made!r}, which is not a Pipeline")
        return cast("Self", made)


def _pipelines(what: str, first: _Steps, others: Sequence[_Steps]) -> tuple[_Steps, ...]:
    pipelines: tuple[Any, ...] = (first, *others)
    for pipeline in pipelines:
        if not isinstance(pipeline, Steps):
            hint = "; make one with Pipeline.from_iterable" if has(pipeline, "__iter__") else ""
            raise TypeError(f"{what} joins pipelines, not {pipeline!r}{hint}")
    return pipelines
