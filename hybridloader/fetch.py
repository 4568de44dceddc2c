"""From an index to a batch: what a worker does for one task.

The rules are those of torch's `_MapDatasetFetcher` and `_IterableDatasetFetcher`
(torch/utils/data/_utils/fetch.py, 2.13). Ours exist because a fetcher here can be abandoned between
two samples when its iterator is closed, and because a worker that needs no torch should import none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    private: bool = False

    def with_dataset(self, dataset: Any) -> MapFetch:
        return replace(self, dataset=dataset)

    def open(self, shared_seed: int | None, cancelled: Flag) -> Fetcher:
        dataset, collate_fn = self.dataset, self.collate_fn
        gather = gatherer(dataset, collate_fn) if self.batched else None

        def fetch_batch(indices: Any) -> Any:
            if gather is not None:
                try:
                    return gather(indices)
                except Odd:
                    pass
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
