"""Descriptions of a loader's work: samples of a dataset, by index or from an iterator, collated.

A description is sent to workers, and opens there the fetcher that does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from hybridloader._support.datapipes import seed_datapipe
from hybridloader.engine.dataset_state import states_of
from hybridloader.engine.fetcher import Fetch, Fetcher, TaskContext
from hybridloader.fetching.gather import gatherer
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.samples import BatchFetcher, SampleFetcher, Spread, one_by_one
from hybridloader.fetching.shard import ShardFetcher
from hybridloader.seeding.sample_rng import innermost


@dataclass(frozen=True)
class MapFetch(Fetch):
    """Samples by index, from a dataset with ``[]``, collated."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool  # an index is a list of indices that make one batch, not the key of one sample
    private: bool = False
    threads: int = 1  # see `Fanout`; without effect where the dataset makes a batch in one call
    on_error: Policy | None = None  # with a policy, an `Outcome` goes beside each result
    fill: bool = True  # a batch that came short is sent uncollated, to be filled up from others
    sends_states: bool = False  # the dataset has a state that goes with results
    state_every: int = 0  # results between two with a state, at least; 0: as often as is cheap

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        spread: Spread | None = None
        if self.batched and self.threads > 1:
            from hybridloader.fetching.fanout import spread_over

            spread = spread_over(self.threads, context, "sample")
        fetcher: Fetcher
        if self.on_error is not None:
            from hybridloader.fetching.on_error.tolerant_batch import TolerantBatchFetcher

            fetcher = TolerantBatchFetcher(
                self.dataset,
                self.collate_fn,
                self.on_error,
                context,
                spread,
                batched=self.batched,
                fill=self.fill,
            )
        elif self.batched:
            fetcher = BatchFetcher(self.dataset, self.collate_fn, context, spread)
        else:
            fetcher = SampleFetcher(self.dataset, self.collate_fn, context)
        if self.sends_states:
            fetcher.states = states_of(self.dataset, every=self.state_every)
        return fetcher

    @property
    def divisible(self) -> bool:
        return self.spreads and not (self.private or self.sends_states)

    @property
    def spreads(self) -> bool:
        return (
            self.batched
            and one_by_one(self.dataset)
            and gatherer(self.dataset, self.collate_fn) is None
        )

    @property
    def idle_threads(self) -> bool:
        """True if several threads were asked for, but the dataset makes a batch in one call."""
        return self.threads > 1 and self.batched and not one_by_one(self.dataset)


@dataclass(frozen=True)
class IterableFetch(Fetch):
    """Next samples of the worker's own iterator over the dataset, collated. See `MapFetch`."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool = False  # drop samples at the end of the shard that are no full batch
    datapipe: bool = False
    on_error: Policy | None = None
    join: bool = False  # send these samples uncollated, to be joined to those of other shards
    state_every: int = 0

    in_turn: ClassVar[bool] = True

    @property
    def private(self) -> bool:
        return True

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        dataset = self.dataset
        if self.datapipe and shared_seed is not None:
            dataset = seed_datapipe(dataset, shared_seed)
        samples: Any
        if context.rng is None:
            samples = wrapped = iter(dataset)
        else:
            entered = self.on_error is None
            samples = context.rng.seeded_shard(lambda: iter(dataset), entered=entered)
            wrapped = innermost(samples)
        make: Any = ShardFetcher
        if self.on_error is not None:
            from hybridloader.fetching.on_error.tolerant_shard import TolerantShardFetcher

            make = partial(TolerantShardFetcher, self.on_error)
        shard: ShardFetcher = make(
            samples,
            context,
            context.timed("collate", self.collate_fn),
            batched=self.batched,
            drop_last=self.drop_last,
            join=self.join,
        )
        shard.states = states_of(dataset, wrapped, every=self.state_every)
        return shard
