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
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hybridloader.buffers.gather import Odd, gatherer
from hybridloader.datapipes import seed_datapipe
from hybridloader.errors import WorkerDied
from hybridloader.faults.on_error import Policy
from hybridloader.foreign import attribute
from hybridloader.seeds.sample_seeds import key_of
from hybridloader.states.carried import carrying

if TYPE_CHECKING:
    from hybridloader.seeds.draws import Draws


class EndOfShard(Exception):
    """The iterable dataset of this worker has no more to give in this epoch."""


class Abandoned(BaseException):
    """The iterator was closed; nobody waits for this batch. Past every ``except Exception``."""


Fetcher = Callable[[Any], Any]
"""Makes the result of one task.

It has an attribute `position` and a method `skip(count)`, if its results depend on what it did
before. It has a method `close()`, if it reads an iterator: that ends the iterator. It may have a
method `mend(result, check)` for a result that can't be sent: then `check` raises
`ResultNotSendable`.
"""


class Flag:
    """Up once nobody waits any more; looked at after every sample.

    Raised from any thread, even from a finalizer: a plain attribute, no lock.

    Attributes
    ----------
    notes
        Whether somebody wants to know which sample of its task the worker is at, should it die.
    at
        The number of that sample, from 0. Set before each sample by fetchers, if `notes`; -1: none, or
        not known.
    task
        The number of that task, for a worker that is a thread; -1: none.
    draws
        What seeds each sample, under ``seeding="sample"``; looked at when a fetcher is opened.
    """

    __slots__ = ("at", "draws", "task", "up")
    notes = False

    def __init__(self) -> None:
        self.up = False
        self.draws: Draws | None = None
        self.at = self.task = -1


class NotingFlag(Flag):
    """One for which fetchers note which sample they are at."""

    __slots__ = ()
    notes = True


class GivenUp:
    """In the place of an index or an item at which worker after worker has died.

    Attributes
    ----------
    index
        What was there.
    text
        What is to be said of it.
    """

    __slots__ = ("index", "text")

    def __init__(self, index: Any, text: str) -> None:
        self.index, self.text = index, text

    def __reduce__(self) -> Any:
        return GivenUp, (self.index, self.text)

    def error(self) -> WorkerDied:
        return WorkerDied(self.text)


class Spared(list[Any]):
    """The indices of a task of which some are `GivenUp`: told from others by its type."""


class Apart(list[Any]):
    """The indices of samples that are wanted as they are, for `wanted` to be made of them and others."""

    wanted = 0


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
    on_error
        With a policy, results are `Tried` or `Short`.
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

    def open(self, shared_seed: int | None, cancelled: Flag) -> Fetcher:
        fetcher = self._open(cancelled)
        if cancelled.draws is not None:
            first = first_of_batch if self.batched else key_of_sample
            fetcher = cancelled.draws.task(fetcher, first)
        if not self.carries:
            return fetcher
        carrier: Fetcher = carrying(fetcher, self.dataset, every=self.told_every)
        return carrier

    def _open(self, cancelled: Flag) -> Fetcher:
        dataset, collate_fn = self.dataset, self.collate_fn
        spread = self._spread(cancelled) if self.batched and self.threads > 1 else None
        if self.on_error is not None:
            from hybridloader.faults.guarded import GuardedMap

            return noting_the_end(GuardedMap(self, self.on_error, cancelled, spread), cancelled)
        gather = gatherer(dataset, collate_fn) if self.batched else None
        if cancelled.draws is not None:
            dataset = cancelled.draws.view(dataset, whole=not one_by_one(dataset))
            collate_fn = cancelled.draws.collating(collate_fn)
        fetch_one = partial(operator.getitem, dataset)
        notes = cancelled.notes

        def fetch_batch(indices: Any) -> Any:
            if gather is not None:
                try:
                    return gather(indices)
                except Odd:
                    pass
            if type(indices) is Spared:
                raise next(index for index in indices if type(index) is GivenUp).error()
            if spread is not None and one_by_one(dataset):
                return collate_fn(spread(fetch_one, indices))
            many = attribute(dataset, "__getitems__")
            if many and not (notes and one_by_one(dataset)):
                return collate_fn(many(indices))
            samples = []
            for index in numbered(indices, cancelled) if notes else indices:
                samples.append(dataset[index])
                if cancelled.up:
                    raise Abandoned
            return collate_fn(samples)

        def fetch_sample(index: Any) -> Any:
            if type(index) is GivenUp:
                raise index.error()
            if notes:
                cancelled.at = 0
            return collate_fn(dataset[index])

        return noting_the_end(fetch_batch if self.batched else fetch_sample, cancelled)

    def _spread(self, cancelled: Flag) -> Spread:
        """What does a function to the samples of a batch on several threads."""
        from hybridloader.fanout import fanout_of_this_thread

        fanout = fanout_of_this_thread(self.threads)
        return lambda function, indices: fanout.map(function, indices, cancelled, "sample")

    @property
    def idle_threads(self) -> bool:
        """Whether it has several threads and no use for them: the dataset makes batches by itself."""
        return self.threads > 1 and self.batched and not one_by_one(self.dataset)


Spread = Callable[[Callable[[Any], Any], Any], list[Any]]


def key_of_sample(index: Any) -> bytes:
    """By what the collation of this one sample is seeded."""
    return key_of(index.index if type(index) is GivenUp else index)


def first_of_batch(indices: Any) -> bytes:
    """By what the collation of a batch is seeded: its first sample."""
    return next((key_of_sample(index) for index in indices), b"")


def numbered(items: Iterable[Any], cancelled: Flag) -> Iterator[Any]:
    """`items`, of which `cancelled` notes the number of the one that was given last."""
    for cancelled.at, item in enumerate(items):
        yield item
    cancelled.at = -1


def noting_the_end(fetcher: Fetcher, cancelled: Flag) -> Fetcher:
    """`fetcher`, which is at no sample any more when it is done, however it ends."""
    if not cancelled.notes:
        return fetcher
    return _Noting(fetcher, cancelled)


class _Noting:
    def __init__(self, fetcher: Fetcher, cancelled: Flag) -> None:
        self._fetcher, self._cancelled = fetcher, cancelled

    def __call__(self, index: Any) -> Any:
        try:
            return self._fetcher(index)
        finally:
            self._cancelled.at = -1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fetcher, name)


def one_by_one(dataset: Any) -> bool:
    """Whether a batch of `dataset` is nothing but ``[dataset[i] for i in indices]``.

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
class IterableFetch:
    """The next samples of this worker's own iterator over the dataset, collated.

    Attributes
    ----------
    in_turn
        A sample can be had only behind those before it, and not asked for by itself.
    on_error
        With a policy, results are `Tried` or `Short`.
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

    def open(self, shared_seed: int | None, cancelled: Flag) -> Fetcher:
        dataset = self.dataset
        if self.datapipe and shared_seed is not None:
            dataset = seed_datapipe(dataset, shared_seed)
        draws = cancelled.draws
        seeded = None if draws is None else draws.shard(lambda: iter(dataset))
        samples = iter(dataset) if seeded is None else seeded.wrapped
        read = samples if seeded is None else seeded
        from hybridloader.shard import Shard

        if self.on_error is not None:
            from hybridloader.faults.guarded_shard import GuardedShard

            shard: Shard = GuardedShard(self, self.on_error, read, cancelled)
        else:
            shard = Shard(self, read, cancelled)
        own: Fetcher = shard
        if draws is not None:
            own = draws.task(shard, lambda _: draws.at(shard.position))
        fetcher: Fetcher = carrying(own, dataset, samples, every=self.told_every)
        return fetcher


def skip(samples: Iterator[Any], count: int, cancelled: Flag) -> tuple[int, bool]:
    """Draw `count` samples and drop them: how many there were, and whether that was the end."""
    for done in range(count):
        if cancelled.up:
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
