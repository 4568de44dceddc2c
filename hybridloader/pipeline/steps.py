"""The steps that a pipeline can be given: a method for each, which makes another pipeline.

Most methods are made of an operator, and have its parameters and its description. Nothing is checked
here that an operator checks itself, and nothing runs.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from hybridloader.devices.pinning import AHEAD, BUFFER_BYTES
from hybridloader.pipeline.operators.batches import Batch, BatchBy, BucketBy, PaddedBatch, Unbatch
from hybridloader.pipeline.operators.cache import Cache, fingerprint_of_steps, ranks_of_steps
from hybridloader.pipeline.operators.joins import (
    Branch,
    Concat,
    Interleave,
    Mix,
    TeePoint,
    Weights,
    Zip,
)
from hybridloader.pipeline.operators.order import (
    Enumerate,
    Repeat,
    ShardByRank,
    Shuffle,
    SkipFirst,
    Take,
)
from hybridloader.pipeline.operators.pack import Pack
from hybridloader.pipeline.operators.work import Filter, FlatMap, Map, PinMemory, Prefetch, ToDevice
from hybridloader.running.operator import Chain, Operator
from hybridloader.running.placement import in_keywords

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from hybridloader.running.placement import Where


_Steps = TypeVar("_Steps", bound="Steps")
_P = ParamSpec("_P")


def _step(name: str, kind: Callable[_P, Operator]) -> Callable[Concatenate[_Steps, _P], _Steps]:
    """Make the method that adds an operator of `kind`."""

    def method(self: _Steps, /, *args: _P.args, **kwargs: _P.kwargs) -> _Steps:
        return self._then(kind(*args, **kwargs))

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(kind).parameters.values()
    method.__name__, method.__qualname__, method.__doc__ = name, f"Steps.{name}", kind.__doc__
    method.__signature__ = inspect.Signature([own, *parameters], return_annotation="Self")  # type: ignore[attr-defined]
    return method


class Steps(Chain):
    """Methods of `Pipeline` that add steps; every method leaves the pipeline as it is."""

    __slots__ = ()

    @abstractmethod
    def _made(self, operators: Sequence[Operator]) -> Self:
        """Return a pipeline of `operators`."""

    def _then(self, operator: Operator) -> Self:
        return self._made((*self.operators, operator))

    # -- work ----------------------------------------------------------------------------------------

    @in_keywords
    def map(
        self, function: Callable[[Any], Any], *, name: str | None = None, **where: Unpack[Where]
    ) -> Self:
        """`function` of each item.

        Parameters
        ----------
        function
            Function of one item. An object with a method `setup()` is copied for every worker, which
            calls `setup` once, before the first item. If it is an ``async def``, each worker runs
            `concurrency` coroutines at a time, and their results are the items.
        name
            Name of this stage in errors and tables.
        **where
            Backend, workers and options of the step; `hybridloader.pipeline.Placement` describes them.
        """
        return self._then(Map.of(function, name, where))

    @in_keywords
    def flat_map(
        self, function: Callable[[Any], Any], *, name: str | None = None, **where: Unpack[Where]
    ) -> Self:
        """The items of the iterables that `function` returns. See `map`."""
        return self._then(FlatMap.of(function, name, where))

    @in_keywords
    def filter(
        self, function: Callable[[Any], Any], *, name: str | None = None, **where: Unpack[Where]
    ) -> Self:
        """The items for which `function` is true. See `map`."""
        return self._then(Filter.of(function, name, where))

    # -- groups --------------------------------------------------------------------------------------

    batch = _step("batch", Batch)
    unbatch = _step("unbatch", Unbatch)
    padded_batch = _step("padded_batch", PaddedBatch)
    batch_by = _step("batch_by", BatchBy)
    bucket_by = _step("bucket_by", BucketBy)
    pack = _step("pack", Pack)

    # -- order ---------------------------------------------------------------------------------------

    shuffle = _step("shuffle", Shuffle)
    take = _step("take", Take)
    skip = _step("skip", SkipFirst)
    enumerate = _step("enumerate", Enumerate)
    repeat = _step("repeat", Repeat)
    shard = _step("shard", ShardByRank)
    prefetch = _step("prefetch", Prefetch)

    def cache(self, path: Any = None, *, fingerprint: str | None = None) -> Self:
        """Keep the items of the first complete epoch, in memory or in a file; see `Cache`.

        Parameters
        ----------
        path
            Path of the file.
        fingerprint
            Your description of the contents; a file with another description is refused. None describes
            the steps before this one: their names, and the reprs of their arguments and of the data.
        """
        if fingerprint is None:
            fingerprint = "" if path is None else fingerprint_of_steps(self)
        ranks = None if path is None else partial(ranks_of_steps, self)
        return self._then(Cache(path, fingerprint=fingerprint, ranks=ranks))

    # -- several pipelines ---------------------------------------------------------------------------

    # The operator comes first: it refuses what is no pipeline, `self` too, as in ``Pipeline.zip(3, b)``.

    def zip(self, *others: Self, strict: bool = True) -> Self:
        """Tuples of one item from each; also as ``Pipeline.zip(a, b)``."""
        join = Zip((self, *others), strict)
        return self._made([join])

    def concat(self, *others: Self) -> Self:
        """All items of this pipeline, then all of the next one."""
        join = Concat((self, *others))
        return self._made([join])

    def mix(
        self,
        *others: Self,
        weights: Weights = None,
        seed: int | None = None,
        stop: str = "all",
    ) -> Self:
        """Items of several pipelines, drawn by weight; see `Mix`."""
        join = Mix((self, *others), weights, seed, stop)
        return self._made([join])

    def interleave(self, *others: Self, block_length: int = 1) -> Self:
        """`block_length` items of each in turn, until all have ended."""
        join = Interleave((self, *others), block_length)
        return self._made([join])

    def tee(self, count: int = 2) -> tuple[Self, ...]:
        """`count` pipelines that each return the items of this one, which runs once.

        Join all of them again, as in ``Pipeline.zip(a.map(f), b.map(g))``.
        """
        point = TeePoint(self, count)
        return tuple(self._made([Branch(point, number)]) for number in range(count))

    # -- the end -------------------------------------------------------------------------------------

    pin_memory = _step("pin_memory", PinMemory)

    def to(
        self, device: Any, *, batches_ahead: int = AHEAD, buffer_bytes: int = BUFFER_BYTES
    ) -> Self:
        """Batches on a device, to which a thread copies them before your loop asks; see `ToDevice`.

        ``"cpu"`` changes nothing.
        """
        step = ToDevice(device, batches_ahead=batches_ahead, buffer_bytes=buffer_bytes)
        return self if str(device).partition(":")[0] == "cpu" else self._then(step)

    def apply(self, step: Operator | Callable[[Self], Self]) -> Self:
        """Add your operator, or return the pipeline that a function makes of this one."""
        if isinstance(step, Operator):
            return self._then(step)
        if not callable(step) or isinstance(step, type):
            raise TypeError(f"apply takes an Operator or a function of a Pipeline, not {step!r}")
        made: object = step(self)
        if not isinstance(made, Steps):
            raise TypeError(f"apply: {step!r} returned {made!r}, which is not a Pipeline")
        return cast("Self", made)
