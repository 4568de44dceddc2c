"""From an index to a batch: what a worker does for one task.

The rules are those of torch's `_MapDatasetFetcher` and `_IterableDatasetFetcher`
(torch/utils/data/_utils/fetch.py, 2.13). Ours exist because a fetcher here can be abandoned between
two samples when its iterator is closed, and because a worker that needs no torch should import none.
Without an `on_error` nothing is caught here: what a sample raises is the answer to its task.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import GeneratorType
from typing import Any, ClassVar

from hybridloader._support.attributes import attribute
from hybridloader._support.datapipes import seed_datapipe
from hybridloader.engine.dataset_state import states_of
from hybridloader.engine.fetcher import Abandoned, Fetch, Fetcher, GivenUp, Spared, TaskContext
from hybridloader.fetching.gather import Odd, gatherer
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.seeding.sample_seeds import key_of


class Apart(list[Any]):
    """The indices of samples that are wanted as they are, for `wanted` to be made of them and others."""

    wanted = 0


@dataclass(frozen=True)
class MapFetch(Fetch):
    """Samples by index, from a dataset with ``[]``, collated.

    Attributes
    ----------
    batched
        Whether an index is a list of indices that make one batch, or the key of one sample.
    private
        Whether every worker needs a copy of the dataset even where memory is shared.
    threads
        Threads, the worker's own among them, that fetch the samples of one batch; see `Fanout`. No
        matter where the dataset makes a batch in one go.
    on_error
        With a policy, an `Outcome` goes beside each result.
    fill
        Whether a batch that came short is sent uncollated, to be filled up from others.
    carries
        Whether the state of a dataset that has one goes with results.
    told_every
        Results of a worker from one with a state to the next, at least; 0: as many as is cheap.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    private: bool = False
    threads: int = 1
    on_error: Policy | None = None
    fill: bool = True
    carries: bool = False
    told_every: int = 0

    def with_dataset(self, dataset: Any) -> MapFetch:
        return replace(self, dataset=dataset)

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        spread: Spread | None = None
        if self.batched and self.threads > 1:
            from hybridloader.fetching.fanout import spread_over

            spread = spread_over(self.threads, context, "sample")
        fetcher: Fetcher
        if self.on_error is not None:
            from hybridloader.fetching.on_error.tolerant_batch import TolerantBatchFetcher

            fetcher = TolerantBatchFetcher(self, self.on_error, context, spread)
        elif self.batched:
            fetcher = BatchFetcher(self, context, spread)
        else:
            fetcher = SampleFetcher(self, context)
        if self.carries:
            fetcher.states = states_of(self.dataset, every=self.told_every)
        return fetcher

    @property
    def idle_threads(self) -> bool:
        """True if it has several threads and no use for them: the dataset makes batches by itself."""
        return self.threads > 1 and self.batched and not one_by_one(self.dataset)


class SampleFetcher(Fetcher):
    """Fetcher of single samples of a map-style dataset."""

    def __init__(self, fetch: MapFetch, context: TaskContext) -> None:
        self._context = context
        self._dataset, self._collate_fn = seeded(fetch, context)

    def fetch(self, index: Any) -> Any:
        if type(index) is GivenUp:
            raise index.error()
        if self._context.tracked:
            self._context.at = 0
        return self._collate_fn(self._dataset[index])

    def key(self, index: Any) -> bytes:
        return key_of_sample(index)


class BatchFetcher(Fetcher):
    """Fetcher of batches of a map-style dataset."""

    def __init__(self, fetch: MapFetch, context: TaskContext, spread: Spread | None) -> None:
        self._context, self._spread = context, spread
        self._gather = gatherer(fetch.dataset, fetch.collate_fn)
        self._dataset, self._collate_fn = seeded(fetch, context)

    def fetch(self, indices: Any) -> Any:
        if self._gather is not None:
            try:
                return self._gather(indices)
            except Odd:
                pass
        if type(indices) is Spared:
            raise next(index for index in indices if type(index) is GivenUp).error()
        dataset, context, spread = self._dataset, self._context, self._spread
        if spread is not None and one_by_one(dataset):
            return self._collate_fn(spread(partial(operator.getitem, dataset), indices))
        try:
            many = getattr(dataset, "__getitems__", None)
        except Exception:  # of a foreign `__getattr__`
            many = attribute(dataset, "__getitems__")
        if many and not (context.tracked and one_by_one(dataset)):
            return self._collate_fn(many(indices))
        samples = []
        for index in numbered(indices, context) if context.tracked else indices:
            samples.append(dataset[index])
            if context.cancelled:
                raise Abandoned
        return self._collate_fn(samples)

    def key(self, index: Any) -> bytes:
        return first_of_batch(index)


def seeded(fetch: MapFetch, context: TaskContext) -> tuple[Any, Callable[[Any], Any]]:
    """Dataset and collation of `fetch`, seeded by what `context` says."""
    dataset, rng = fetch.dataset, context.rng
    if rng is None:
        return dataset, fetch.collate_fn
    whole = fetch.batched and not one_by_one(dataset)
    return rng.seeded_dataset(dataset, whole=whole), rng.seeded_collate(fetch.collate_fn)


Spread = Callable[[Callable[[Any], Any], Any], list[Any]]


def key_of_sample(index: Any) -> bytes:
    """By what the collation of this one sample is seeded."""
    return key_of(index.index if type(index) is GivenUp else index)


def first_of_batch(indices: Any) -> bytes:
    """By what the collation of a batch is seeded: its first sample."""
    return next((key_of_sample(index) for index in indices), b"")


def numbered(items: Iterable[Any], context: TaskContext) -> Iterator[Any]:
    """`items`, of which `context` notes the number of the one that was given last."""
    for context.at, item in enumerate(items):
        yield item
    context.at = -1


def one_by_one(dataset: Any) -> bool:
    """True if a batch of `dataset` is nothing but ``[dataset[i] for i in indices]``.

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


@dataclass(frozen=True)
class IterableFetch(Fetch):
    """The next samples of this worker's own iterator over the dataset, collated.

    Attributes
    ----------
    in_turn
        A sample can be had only behind those before it, and not asked for by itself.
    on_error
        With a policy, an `Outcome` goes beside each result.
    join
        Whether the last samples of the shard, if they are no full batch, are sent uncollated, to be
        joined to those of other shards.
    told_every
        Results of a worker from one with a state to the next, at least; 0: as many as is cheap.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool = False
    datapipe: bool = False
    on_error: Policy | None = None
    join: bool = False
    told_every: int = 0

    in_turn: ClassVar[bool] = True

    @property
    def private(self) -> bool:
        return True

    def with_dataset(self, dataset: Any) -> IterableFetch:
        return replace(self, dataset=dataset)

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        dataset = self.dataset
        if self.datapipe and shared_seed is not None:
            dataset = seed_datapipe(dataset, shared_seed)
        rng = context.rng
        seeded = None if rng is None else rng.seeded_shard(lambda: iter(dataset))
        samples = iter(dataset) if seeded is None else seeded.wrapped
        read = samples if seeded is None else seeded
        from hybridloader.fetching.shard import ShardFetcher

        shard: ShardFetcher
        if self.on_error is not None:
            from hybridloader.fetching.on_error.tolerant_shard import TolerantShardFetcher

            shard = TolerantShardFetcher(self, self.on_error, read, context)
        else:
            shard = ShardFetcher(self, read, context)
        shard.states = states_of(dataset, samples, every=self.told_every)
        return shard


def skip(samples: Iterator[Any], count: int, context: TaskContext) -> tuple[int, bool]:
    """Draw `count` samples and drop them: how many there were, and whether that was the end."""
    for done in range(count):
        if context.cancelled:
            return done, False
        try:
            next(samples)
        except StopIteration:
            return done, True
        except Exception:  # told by the worker that was here before
            pass
    return count, False


def end(samples: Any) -> None:
    """Close an iterator that is a generator, so that its `finally` and `with` blocks end now.

    Other iterators are not closed: only their author knows what their `close` would do.
    """
    if isinstance(samples, GeneratorType) and not samples.gi_running:
        samples.close()
