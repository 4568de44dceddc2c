"""From an index to a batch: what a worker does for one task.

The rules are those of torch's `_MapDatasetFetcher` and `_IterableDatasetFetcher`
(torch/utils/data/_utils/fetch.py, 2.13). Ours exist because a fetcher here can be abandoned between
two samples when its iterator is closed, and because a worker that needs no torch should import none.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from hybridloader.gather import Odd, gatherer


class EndOfShard(Exception):
    """The iterable dataset of this worker has no more to give in this epoch."""


class Abandoned(BaseException):
    """The iterator was closed; nobody waits for this batch. Past every ``except Exception``."""


Fetcher = Callable[[Any], Any]


class Flag:
    """Up once nobody waits any more; looked at after every sample.

    Raised from any thread, even from a finalizer: a plain attribute, no lock.
    """

    __slots__ = ("up",)

    def __init__(self) -> None:
        self.up = False


class Fetch(Protocol):
    """What a stage does to an index, as a description that can be sent to a worker."""

    @property
    def dataset(self) -> Any:
        """What `get_worker_info().dataset` shows."""

    @property
    def private(self) -> bool:
        """Whether every worker must have a copy of its own, also where workers share memory."""

    def with_dataset(self, dataset: Any) -> Fetch:
        """The same work on another copy of the dataset."""

    def open(self, shared_seed: int | None, cancelled: Flag) -> Fetcher:
        """Make the fetcher for one epoch. It may raise `EndOfShard`, once and for all."""


@dataclass(frozen=True)
class MapFetch:
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
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    private: bool = False
    threads: int = 1

    def with_dataset(self, dataset: Any) -> MapFetch:
        return replace(self, dataset=dataset)

    def open(self, shared_seed: int | None, cancelled: Flag) -> Fetcher:
        dataset, collate_fn = self.dataset, self.collate_fn
        gather = gatherer(dataset, collate_fn) if self.batched else None
        fetch_all = self._spread(cancelled) if self.batched and self.threads > 1 else None

        def fetch_batch(indices: Any) -> Any:
            if gather is not None:
                try:
                    return gather(indices)
                except Odd:
                    pass
            if fetch_all is not None and one_by_one(dataset):
                return collate_fn(fetch_all(indices))
            many = getattr(dataset, "__getitems__", None)
            if many:
                return collate_fn(many(indices))
            samples = []
            for index in indices:
                samples.append(dataset[index])
                if cancelled.up:
                    raise Abandoned
            return collate_fn(samples)

        def fetch_sample(index: Any) -> Any:
            return collate_fn(dataset[index])

        return fetch_batch if self.batched else fetch_sample

    def _spread(self, cancelled: Flag) -> Callable[[Any], list[Any]]:
        """What fetches the samples of a batch on several threads."""
        from hybridloader.fanout import fanout_of_this_thread

        fanout = fanout_of_this_thread(self.threads)
        fetch_one = partial(operator.getitem, self.dataset)
        return lambda indices: fanout.map(fetch_one, indices, cancelled, "sample")

    @property
    def idle_threads(self) -> bool:
        """Whether it has several threads and no use for them: the dataset makes batches by itself."""
        return self.threads > 1 and self.batched and not one_by_one(self.dataset)


def one_by_one(dataset: Any) -> bool:
    """Whether a batch of `dataset` is nothing but ``[dataset[i] for i in indices]``.

    torch's `Subset` and `StackDataset` have a `__getitems__` that is just this if those below have none.
    """
    if not getattr(dataset, "__getitems__", None):
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
class IterableFetch:
    """The next samples of this worker's own iterator over the dataset, collated."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool = False
    datapipe: bool = False

    @property
    def private(self) -> bool:
        return True

    def with_dataset(self, dataset: Any) -> IterableFetch:
        return replace(self, dataset=dataset)

    def open(self, shared_seed: int | None, cancelled: Flag) -> Fetcher:
        dataset, collate_fn, drop_last = self.dataset, self.collate_fn, self.drop_last
        if self.datapipe and shared_seed is not None:
            dataset = seed_datapipe(dataset, shared_seed)
        samples = iter(dataset)
        ended = False

        def fetch_batch(indices: Any) -> Any:
            nonlocal ended
            if ended:
                raise EndOfShard
            batch: list[Any] = []
            for _ in indices:
                try:
                    batch.append(next(samples))
                except StopIteration:
                    ended = True
                    break
                if cancelled.up:
                    raise Abandoned
            if not batch or (drop_last and len(batch) < len(indices)):
                raise EndOfShard
            return collate_fn(batch)

        def fetch_sample(index: Any) -> Any:
            try:
                sample = next(samples)
            except StopIteration:
                raise EndOfShard from None
            return collate_fn(sample)

        return fetch_batch if self.batched else fetch_sample


def seed_datapipe(dataset: Any, shared_seed: int) -> Any:
    """Seed the shufflers of an `IterDataPipe` from the seed that all its workers share."""
    import torch
    from torch.utils.data.graph_settings import apply_random_seed

    return apply_random_seed(dataset, torch.Generator().manual_seed(shared_seed))
