"""Fetchers of map-style datasets, and the rules by which one is asked for samples.

The rules are those of torch's `_MapDatasetFetcher` (torch/utils/data/_utils/fetch.py, 2.13). Ours
exist because a fetcher here can be abandoned between two samples when its iterator is closed, and
because a worker that needs no torch should import none. An error that a sample raises is the answer to
its task; `fetching.on_error` has the fetchers that catch it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from hybridloader._support.attributes import attribute
from hybridloader.engine.fetcher import Abandoned, Begun, Fetcher, GivenUp, Spared, TaskContext
from hybridloader.engine.slices import SEEN
from hybridloader.fetching.collate import is_default_collate
from hybridloader.fetching.gather import Odd, gatherer
from hybridloader.seeding.sample_rng import Key, SeededDataset


class Spread(Protocol):
    """Threads of a worker that call a function for each of several items."""

    def __call__(self, function: Callable[[Any], Any], items: Any) -> list[Any]:
        """Take part, and return the results."""

    def begin(self, function: Callable[[Any], Any], items: Any, ring: Callable[[], None]) -> Begun:
        """Take no part; `ring` is called when all have ended."""


class SampleFetcher(Fetcher):
    """Fetcher of single samples of a map-style dataset."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], context: TaskContext
    ) -> None:
        self._context = context
        collate_fn = context.timed("collate", seeded_collate(collate_fn, context))
        rng = context.rng
        self._dataset = dataset if rng is None else SeededDataset(rng, dataset)
        self._collate_fn = collate_fn

    def fetch(self, index: Any) -> Any:
        if type(index) is GivenUp:
            raise index.error()
        if self._context.tracked:
            self._context.at = 0
        return self._collate_fn(self._dataset[index])

    def key(self, index: Any) -> Key:
        return partial(key_of_batch, [index], self._context)


class BatchFetcher(Fetcher):
    """Fetcher of batches of a map-style dataset."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        context: TaskContext,
        spread: Spread | None,  # not used if the dataset makes a batch in one call
    ) -> None:
        self._context, self._whole = context, not one_by_one(dataset)
        self._spread = None if self._whole else spread
        self._gather = gatherer(dataset, collate_fn)
        self._collate_fn = context.timed("collate", seeded_collate(collate_fn, context))
        self._rng = rng = context.rng
        self._dataset = self._in_turn = dataset
        if rng is not None:
            self._dataset = SeededDataset(rng, dataset, whole=self._whole)
            self._in_turn = self._dataset if self._whole else rng.seeded_in_turn(dataset)

    def fetch(self, indices: Any) -> Any:
        if self._gather is not None:
            try:
                return self._gather(indices)
            except Odd:
                pass
        if type(indices) is Spared:
            raise next(index for index in indices if type(index) is GivenUp).error()
        dataset, context, spread = self._in_turn, self._context, self._spread
        if spread is not None:
            sample = context.timed("sample", self.sample, SEEN)
            return self.assemble(spread(sample, indices), indices)
        try:
            many = getattr(dataset, "__getitems__", None)
        except Exception:  # of a foreign `__getattr__`
            many = attribute(dataset, "__getitems__")
        rng = self._rng
        # One that only passes the call on is asked for each sample by itself if that is to be known.
        if many and (self._whole or (rng is None and not context.tracked)):
            return self._collate_fn(many(indices))
        samples: list[Any] = []
        if rng is not None:
            indices = rng.enter(indices)
        try:
            for index in numbered(indices, context) if context.tracked else indices:
                samples.append(dataset[index])
                if context.cancelled:
                    raise Abandoned
        finally:
            if rng is not None:
                rng.leave()
        if context.parts is not None and context.parts.looks:
            context.parts.gathered = perf_counter()
        return self._collate_fn(samples)

    def sample(self, index: Any) -> Any:
        return self._dataset[index]

    def begin(self, index: Any, ring: Callable[[], None]) -> Begun:
        assert self._spread is not None
        return self._spread.begin(self._context.timed("sample", self.sample, SEEN), index, ring)

    def assemble(self, samples: list[Any], index: Any) -> Any:
        if self._context.parts is not None and self._context.parts.looks:
            self._context.parts.gathered = perf_counter()
        return self._collate_fn(samples)

    def key(self, index: Any) -> Key:
        return partial(key_of_batch, index, self._context)


def seeded_collate(collate_fn: Callable[[Any], Any], context: TaskContext) -> Callable[[Any], Any]:
    """Return `collate_fn`, seeded for each batch if samples are; default collation draws nothing."""
    rng = context.rng
    if rng is None or is_default_collate(collate_fn):
        return collate_fn
    return rng.seeded_collate(collate_fn)


def key_of_batch(indices: Any, context: TaskContext) -> bytes:
    """Return the key that seeds the collation of a batch: the key of its first sample."""
    assert context.rng is not None
    for index in indices:
        return context.rng.key_of(index.index if type(index) is GivenUp else index)
    return b""


def numbered(items: Iterable[Any], context: TaskContext) -> Iterator[Any]:
    """Yield `items`; `context.at` is the number of the item that was given last."""
    for context.at, item in enumerate(items):
        yield item
    context.at = -1


def one_by_one(dataset: Any) -> bool:
    """Return True if a batch of `dataset` is nothing but ``[dataset[i] for i in indices]``.

    torch's `Subset` and `StackDataset` have a `__getitems__` that is just this if those below have none.
    """
    if not attribute(dataset, "__getitems__"):
        return True
    if "torch" not in sys.modules:
        return False
    from torch.utils.data import StackDataset, Subset

    kind = type(dataset)
    if kind is Subset:
        return one_by_one(dataset.dataset)
    if kind is StackDataset:
        parts = dataset.datasets
        return all(map(one_by_one, parts.values() if isinstance(parts, dict) else parts))
    return False


class Apart(list[Any]):
    """Indices of samples to be sent uncollated: part of a batch that should have `wanted` samples."""

    wanted = 0
