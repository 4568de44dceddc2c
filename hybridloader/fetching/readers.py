"""Work of workers: samples by index, or the next ones of a shard, or items through functions.

A description of the work (`MapFetch`, `IterableFetch`, `ReadersFetch`, `WorkFetch`) is sent to workers,
and opens there the fetcher that does it. The rules are those of torch's fetchers
(torch/utils/data/_utils/fetch.py, 2.13). Ours exist because a fetcher here can be abandoned between two
samples when its iterator is closed, and because a worker that needs no torch should import none.

Without a policy an error that a sample raises is the answer to its task. Under one, samples are read by
an `ItemLoop`, and an `Outcome` goes beside each batch.
"""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from time import perf_counter
from types import GeneratorType
from typing import Any, ClassVar

from hybridloader._support.states import load_into
from hybridloader._support.text import brief
from hybridloader._support.torch_env import seed_datapipe
from hybridloader._support.user_objects import add_note, attribute, foreign
from hybridloader.engine.dataset_state import ShardStart, states_of
from hybridloader.engine.messages import (
    Abandoned,
    EndOfShard,
    Fetch,
    Fetcher,
    FollowingContext,
    GivenUp,
    PartlyGivenUp,
    StartedTask,
    TaskContext,
)
from hybridloader.engine.meter import SEEN
from hybridloader.engine.worker import asked_for_info, get_worker_info
from hybridloader.errors import ShardLost
from hybridloader.fetching.collate import NotGatherable, gatherer, is_default_collate
from hybridloader.fetching.item_loop import Fanout, ItemLoop, NoItem, TaskResults, numbered, seeded
from hybridloader.fetching.on_error import (
    Attempt,
    FailureRecord,
    Outcome,
    Policy,
    all_failed,
    nothing_left,
    rest_is_lost,
)
from hybridloader.fetching.shards import NamedShardsIterator, names_of, shares_of
from hybridloader.seeding.sample_rng import (
    SAMPLE,
    Key,
    SampleRng,
    SeededDataset,
    SeededIterator,
    innermost,
    item_key,
    numbered_item,
)

_READING = 0.01
"""Seconds after which a reader returns its items, even if they are fewer than requested."""


# -- descriptions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MapFetch(Fetch):
    """Samples by index, from a dataset with ``[]``, collated."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool  # an index is a list of indices that make one batch, not the key of one sample
    private: bool = False
    threads: int = 1  # see `Fanout`; no effect if the dataset makes a batch in one call
    on_error: Policy | None = None  # with a policy, each result has an `Outcome`
    sends_states: bool = False  # the dataset has a state that is sent with results
    state_every: int = 0  # least number of results between states; 0: as often as is cheap

    def open(self, shared_seed: int | None, context: TaskContext) -> IndexedFetcher:
        fetcher = IndexedFetcher(self, context)
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


@dataclass(frozen=True)
class IterableFetch(Fetch):
    """Next samples of the worker's own iterator over the dataset, collated. See `MapFetch`."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool = False  # drop the last samples of the shard if they don't fill a batch
    datapipe: bool = False
    on_error: Policy | None = None
    state_every: int = 0
    # Rank, number of ranks, and number of workers, if the dataset names its shards:
    share: tuple[int, int, int] | None = None

    in_turn: ClassVar[bool] = True

    @property
    def private(self) -> bool:
        return True

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        dataset = self.dataset
        if self.datapipe and shared_seed is not None:
            dataset = seed_datapipe(dataset, shared_seed)
        make, rng = partial(part_of, dataset, self.share), context.rng
        entered = self.on_error is None
        samples = make() if rng is None else rng.seeded_shard(make, entered=entered)
        shard = ShardFetcher(self, samples, context)
        # Two numbers are cheap. A state with each result lets the rest be divided at any position.
        every, always = self.state_every, self.share is not None
        shard.states = states_of(dataset, innermost(samples), every=every, always=always)
        return shard


def part_of(dataset: Any, share: tuple[int, int, int] | None) -> Iterator[Any]:
    """Return an iterator over this worker's part of the shards that `dataset` names, for an epoch.

    Without a `share` it is the iterator of the dataset.
    """
    if share is None:
        return iter(dataset)
    rank, ranks, workers = share
    mine = shares_of(names_of(dataset), rank, ranks)
    if workers:  # without workers, the caller may be a worker of another loader
        info = get_worker_info()
        assert info is not None
        mine = shares_of(mine, info.id, workers)
    return NamedShardsIterator(dataset, [(name, 0, False) for name in mine])


@dataclass(frozen=True)
class ReadersFetch(Fetch):
    """Next items of the worker's own iterator, as many as the task asks for.

    The `dataset` is an iterable, of which every worker has a copy; or a function that makes one, called
    in the worker. For `on_error` see `WorkFetch`.
    """

    dataset: Any
    on_error: Policy | None = None
    # As in `IterableFetch`, but `starts` have the parts, so this divides only a whole epoch:
    share: tuple[int, int, int] | None = None

    in_turn: ClassVar[bool] = True
    batched = False

    @property
    def private(self) -> bool:
        return hasattr(type(self.dataset), "__iter__")  # a class has `__iter__` too, and is called

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        def make() -> Iterator[Any]:
            is_made_here = self.share is None and not self.private
            return part_of(self.dataset() if is_made_here else self.dataset, self.share)

        rng = context.rng
        items = make() if rng is None else rng.seeded_shard(make)
        dataset = self.dataset if self.private else None
        return SourceFetcher(items, self.on_error, context, dataset)


# -- what a loader's fetchers have in common -------------------------------------------------------


class LoaderFetcher(Fetcher):
    """Base of the fetchers of a loader, which collate samples."""

    def __init__(
        self,
        work: MapFetch | IterableFetch,
        context: TaskContext,
        read: Callable[[Any], Any],  # reads one sample
        *,
        helpers: Fanout | None = None,
    ) -> None:
        self._context, self.rng = context, context.rng
        self._batched, self.tolerant = work.batched, work.on_error is not None
        collate_fn = work.collate_fn
        if self.rng is not None and not is_default_collate(collate_fn):  # which draws nothing
            collate_fn = self.rng.seeded_collate(collate_fn)
        self._collate_fn = context.timed("collate", collate_fn)
        self._loop: ItemLoop | None = None
        if work.on_error is not None:
            policy = seeded(work.on_error, self.rng)
            self._loop = ItemLoop([("map", read)], policy, context, helpers, batch=True)

    def _answer(self, attempt: Attempt) -> Any:
        self._context.add("outcome", attempt[1])
        return attempt[0]

    def _batch(self, asked: Sequence[Any], results: TaskResults) -> Attempt:
        """Return the good samples as a batch."""
        failures = results.failures
        if failures and not results.values:
            return nothing_left(failures)
        return self._collated(asked, results.values, failures)

    def _collated(
        self, asked: Sequence[Any], samples: Any, failures: list[FailureRecord]
    ) -> Attempt:
        """Return `samples` as a batch; if they can't be collated, all of them have failed."""
        try:
            return self._collate(samples), Outcome(len(asked), failures)
        except Exception as error:
            if self._loop is None or not self._loop.skips:
                raise
            return all_failed(asked, foreign(error), failures)

    def _collate(self, samples: Any) -> Any:
        return self._collate_fn(samples if self._batched else samples[0])


# -- by index --------------------------------------------------------------------------------------


class IndexedFetcher(LoaderFetcher):
    """Fetcher of batches, or single samples, of a map-style dataset."""

    def __init__(self, work: MapFetch, context: TaskContext) -> None:
        dataset, rng, batched = work.dataset, context.rng, work.batched
        self._whole = batched and not one_by_one(dataset)
        self._helpers: Fanout | None = None
        if batched and work.threads > 1 and not self._whole:
            self._helpers = Fanout.of(context, work.threads)
        one = _one_of(dataset)
        read = one if rng is None else rng.seeded(one)
        super().__init__(work, context, read, helpers=self._helpers)
        self._gather = gatherer(dataset, work.collate_fn) if batched else None
        self._dataset = self._in_turn = dataset
        if rng is not None:
            self._dataset = SeededDataset(rng, dataset, whole=self._whole)
            if self._whole or not rng.seeds_in_turn:
                self._in_turn = self._dataset
        # A `__getitems__` that only forwards the call can't attribute errors to samples, so samples
        # are read one by one if the sample must be known.
        self._many: Any = None
        if self._whole or (batched and rng is None and not context.tracked):
            self._many = attribute(self._in_turn, "__getitems__")

    def fetch(self, index: Any) -> Any:
        if self._loop is not None:
            return self._answer(self.attempt(index))
        if not self._batched:
            if type(index) is GivenUp:
                raise index.error()
            if self._context.tracked:
                self._context.at = 0
            return self._collate_fn(self._dataset[index])
        if self._gather is not None:
            try:
                return self._gather(index)
            except NotGatherable:
                pass
        dataset, context, rng = self._in_turn, self._context, self.rng
        if type(index) is PartlyGivenUp:
            raise next(one for one in index if type(one) is GivenUp).error()
        if self._helpers is not None:
            sample = context.timed("sample", self.sample, SEEN)
            return self.assemble(self._helpers.map(sample, index, context, "sample"), index)
        if self._many is not None:
            return self._collate_fn(self._many(index))
        samples: list[Any] = []
        indices, one = index if rng is None else rng.enter(index), None
        try:
            for one in numbered(indices, context) if context.tracked else indices:
                samples.append(dataset[one])
                if context.cancelled:
                    raise Abandoned
        except Exception as error:
            if one is not None:
                _add_index(error, one)
            raise
        finally:
            if rng is not None:
                rng.leave()
        if context.parts is not None and context.parts.looks:
            context.parts.gathered = perf_counter()
        return self._collate_fn(samples)

    def attempt(self, index: Any) -> Attempt:
        """Return the value of a task and the outcome of its samples. On any thread."""
        assert self._loop is not None
        asked = index if self._batched else [index]
        spared = type(index) in (PartlyGivenUp, GivenUp)
        whole = None if spared or not self._batched else self._as_a_whole(index)
        if whole is not None:
            return whole
        return self._batch(asked, self._loop.run(asked, spared=spared))

    def _as_a_whole(self, indices: Any) -> Attempt | None:
        """Return the batch made in one call; None where that can't be done, or has failed."""
        if self._gather is not None:
            try:
                return self._gather(indices), Outcome(len(indices))
            except NotGatherable:
                pass
        if not self._whole:
            return None
        try:
            samples = self._dataset.__getitems__(indices)
        except Exception:  # reading the samples one by one finds the one that failed
            return None
        return self._collated(indices, samples, [])

    def sample(self, index: Any) -> Any:
        if self._loop is not None:
            return self._loop.alone(index)
        try:
            return self._dataset[index]
        except Exception as error:
            _add_index(error, index)
            raise

    def begin(self, index: Any, ring: Callable[[], None]) -> StartedTask:
        assert self._helpers is not None
        sample = self._context.timed("sample", self.sample, SEEN)
        return self._helpers.begin(sample, index, self._context, "sample", ring)

    def assemble(self, samples: list[Any], index: Any) -> Any:
        made = self.made_of(samples, index)
        return made if self._loop is None else self._answer(made)

    def made_of(self, samples: list[Any], index: Any) -> Any:
        """Return the batch of fetched samples, under a policy an `Attempt`. On any thread."""
        if self._loop is None:
            return self._collate(samples)
        return self._batch(index, self._loop.joined(samples))

    def _collate(self, samples: Any) -> Any:
        if self._context.parts is not None and self._context.parts.looks:
            self._context.parts.gathered = perf_counter()
        return super()._collate(samples)

    def key(self, index: Any) -> Key:
        return partial(_key_of_batch, index if self._batched else [index], self._context)


def _add_index(error: Exception, index: Any) -> None:
    add_note(error, f"The dataset was asked for index {brief(index)}.")


def _key_of_batch(indices: Any, context: TaskContext) -> bytes:
    """Return the key that seeds the collation of a batch: the key of its first sample."""
    assert context.rng is not None
    for index in indices:
        return context.rng.key_of(index.index if type(index) is GivenUp else index)
    return b""


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


def _one_of(dataset: Any) -> Callable[[Any], Any]:
    """Return the function of a single sample: ``dataset[index]``, or, without that, a batch of one."""
    own = getattr(type(dataset), "__getitem__", None)
    if own is not None and "torch" in sys.modules:
        from torch.utils.data import Dataset

        if own is Dataset.__getitem__:  # a stub that raises NotImplementedError
            own = None
    if own is None and attribute(dataset, "__getitems__"):
        return lambda index: next(iter(dataset.__getitems__([index])))
    return partial(operator.getitem, dataset)


# -- of a shard ------------------------------------------------------------------------------------


class ShardReader(Fetcher):
    """Base of the fetchers that read a worker's own iterator, its shard, for one epoch.

    It can start after samples that others have delivered, by reading them once more or from a state,
    and never decides where that is. An iterator may raise and be asked again. A generator may not, and
    its error is never taken for the end of its shard.
    """

    unit = "sample"
    """Name of a sample in errors."""

    def __init__(self, samples: Iterator[Any], context: TaskContext, *, under_policy: bool) -> None:
        self._samples, self._context, self._under_policy = samples, context, under_policy
        # All the mutable state:
        self.position = 0  # calls of next() that returned a sample or raised an error
        self.ended = False
        self._lost: ShardLost | None = None  # raised where the next sample would have been returned

    def _next(self, number: int) -> Any:
        """Return the next sample, number `number` unless that has failed; raise `NoItem` at the end."""
        if self.ended:
            raise NoItem
        try:
            sample = next(self._samples)
        except StopIteration:
            self.ended = True
            raise NoItem from None
        except Exception as error:
            self.position += 1
            if isinstance(innermost(self._samples), GeneratorType):
                self._lost = rest_is_lost(f"{self.unit} {number} of this worker's shard", error)
                self._lost.__cause__ = error
                if self._under_policy:
                    self.ended = True
                    raise NoItem from None
            raise
        self.position += 1
        return sample

    def _read(
        self, loop: ItemLoop, most: int, seconds: float | None = None
    ) -> tuple[list[int], TaskResults]:
        """Read up to `most` samples; return the numbers of those that were read, and the results.

        With `seconds`, stop after that time, if there is any, and at the first one that can't be had.
        """
        asked, results = list[int](), TaskResults()
        values, notes = results.values, results.notes
        until = None if seconds is None else time.monotonic() + seconds

        def numbers() -> Iterator[int]:
            while len(values) < most:
                if until is not None and (
                    (values and time.monotonic() > until) or (notes and notes[-1].item is not None)
                ):
                    return
                asked.append(self.position)
                yield self.position

        if not self.ended:
            try:
                loop.run(numbers(), numbers=False, results=results)
            except NoItem:
                asked.pop()
        return asked, results

    def resume(self, start: ShardStart) -> None:
        if start.iterator is not None:
            users = innermost(self._samples)
            load_into(users, pickle.loads(start.iterator.kept), "the iterator over the dataset")
        self.position, self.ended = start.position, start.ended
        if isinstance(self._samples, SeededIterator):
            self._samples.number = start.position
        self.skip(start.skip)

    def skip(self, count: int) -> None:
        """Drop samples up to number `count`. Errors are dropped too: their first reader raised them."""
        while self.position < count and not (self.ended or self._context.cancelled):
            try:
                next(self._samples)
            except StopIteration:
                self.ended = True
                return
            except Exception:
                pass
            self.position += 1

    def close(self) -> None:
        """Let the iterator go, as torch's fetcher does.

        A generator that no other object holds ends at this, its `finally` and `with` blocks too. One
        that the dataset keeps continues in the next epoch: `iter()` of a generator is that generator.
        """
        self._samples, self.ended = iter(()), True


class ShardFetcher(ShardReader, LoaderFetcher):
    """Fetcher of an iterable dataset. The index of a sample is its number in the shard."""

    def __init__(self, work: IterableFetch, samples: Iterator[Any], context: TaskContext) -> None:
        ShardReader.__init__(self, samples, context, under_policy=work.on_error is not None)
        LoaderFetcher.__init__(self, work, context, self._next)
        self._drop_last = work.drop_last

    def fetch(self, indices: Any) -> Any:
        wanted = len(indices) if self._batched else 1
        if self._loop is not None:
            asked, results = self._read(self._loop, wanted)
            if results.values and not (self._drop_last and len(results.values) < wanted):
                return self._answer(self._batch(asked, results))
            if results.notes:
                return self._answer(nothing_left(results.failures))
            if self._lost is not None:
                error, self._lost = self._lost, None
                raise error
            raise EndOfShard
        if self.ended:
            raise EndOfShard
        batch: list[Any] = []
        samples, context, rng = self._samples, self._context, self.rng
        places: Iterable[Any] = range(wanted)
        if rng is not None:
            first = self.position
            places = rng.enter(list(places), lambda place: rng.shard_key(first + place))
        try:
            for _ in places:
                batch.append(next(samples))
                if context.cancelled:
                    raise Abandoned
        except StopIteration:
            self.ended = True
        except Exception:
            self.position += 1
            raise
        finally:
            self.position += len(batch)
            if rng is not None:
                rng.leave()
            # An error of `collate_fn` holds this frame, which must not hold the iterator.
            del samples
        if not batch or (self._drop_last and len(batch) < wanted):
            raise EndOfShard
        return self._collate_fn(batch if self._batched else batch[0])

    def key(self, index: Any) -> bytes:
        return b"" if self.rng is None else self.rng.shard_key(self.position)


class SourceFetcher(ShardReader):
    """Fetcher of lists of items from one worker's iterator, of a pipeline's source."""

    unit = "item"

    def __init__(
        self,
        items: Iterator[Any],
        on_error: Policy | None,
        context: TaskContext,
        dataset: Any,  # None if a function makes the iterable
    ) -> None:
        super().__init__(items, context, under_policy=on_error is not None)
        policy = seeded(on_error, context.rng)
        self._loop = ItemLoop([("map", self._next)], policy, context, what="the next item")
        samples = innermost(items)
        # Its position follows from the starts of its shards.
        if isinstance(samples, NamedShardsIterator):
            samples.entered = []
        else:
            self.states = states_of(dataset, samples)

    def fetch(self, most: int) -> Any:
        first, asked = self.position, list[int]()
        if self._lost is None:
            asked, results = self._read(self._loop, most, _READING)
        else:  # the previous task returned the error before this one
            results, self.ended = TaskResults(), True
        if self._lost is not None and self.ended:
            lost, self._lost = self._lost, None
            self._loop.note(self.position, lost, results)
            asked.append(self.position)
        if not (results.values or results.notes):
            raise EndOfShard
        if self._under_policy and self.position - first != len(results.values):
            self._context.add("ends", [*asked[1:], self.position])
        samples = innermost(self._samples)
        if isinstance(samples, NamedShardsIterator):
            if samples.entered:
                before = self.position - samples.count
                self._context.add("shards", [(before + count, at) for count, at in samples.entered])
                samples.entered = []
        elif first == 0 and results.values and not asked_for_info():
            with suppress(Exception):  # an item that can't be pickled is not compared
                packed = pickle.dumps(results.values[0], 5)
                self._context.add("first", blake2b(packed, digest_size=16).digest())
        return results.hand_over(self._context)


# -- work of a pipeline's stage: the items of a task go through the user's functions, one after the other
#
# Several functions in a row are one piece of work, so an item crosses to a worker once for all of them.
# An error of one item takes its place; the other items of the task are not affected.


def is_async(function: Any) -> bool:
    """Return True if `function` is an ``async def``, or an object whose call is one."""
    for callee in (function, attribute(type(function), "__call__")):
        # Since Python 3.12 it calls `__getattr__` of the object, which may raise anything.
        with suppress(Exception):
            if inspect.iscoroutinefunction(callee):
                return True
    return False


@dataclass(frozen=True)
class Step:
    """One function of a piece of work."""

    kind: str  # "map": returns one result, "flat_map": several, "filter": whether to keep the item
    function: Any  # the user's function, or a `MapFetch` that is opened in the worker
    concurrency: int = 0  # coroutines at a time, for an `async def`
    name: str = ""  # of its slices in a trace

    def open(
        self,
        context: TaskContext,
        on_error: Policy | None = None,
        number: int = 0,
        *,
        of_worker: bool = True,
    ) -> tuple[str, Callable[[Any], Any]]:
        """Return the kind, and the function as this worker calls it: function `number` of its stage.

        A step that runs where its items are asked for is not `of_worker`, also if that is in one.

        An object with a method `setup` is copied (not deeply) and set up, so that every worker, also
        one that is a thread, has its own, from one epoch to the next. If its call is an ``async def``,
        it is set up for each epoch, at whose end its `aclose` is awaited.
        """
        function = self.function
        rng = None if context.rng is None else context.rng.for_function(number)
        if isinstance(function, MapFetch):
            fetcher = self.fetcher(context, rng, on_error)
            kind, fetch = self.kind, fetcher.fetch
            if fetcher.tolerant:
                kind, fetch = "batch", fetcher.attempt
            function = context.timed(self.name, fetch, SEEN)
            if rng is None:
                return kind, function
            return kind, lambda item: rng.task(fetcher.key, function, item)
        setup, aclose = attribute(function, "setup"), None
        if callable(setup) and not isinstance(function, type):
            made = context.set_up.get(number)
            if made is None:
                made = copy.copy(function)
                made.setup()
                if not self.concurrency:
                    context.set_up[number] = made
            function, aclose = made, attribute(made, "aclose")
        if rng is not None and rng.by_function:
            function = rng.seeded_by_item(self.kind, function)
        if self.concurrency:
            from hybridloader.fetching.coroutines import Coroutines

            limit = self.concurrency
            return self.kind, Coroutines(function, limit, context, aclose, of_worker=of_worker)
        return self.kind, context.timed(self.name, function, SEEN)

    def fetcher(
        self, context: TaskContext, rng: SampleRng | None, on_error: Policy | None
    ) -> IndexedFetcher:
        """Return the fetcher of a `MapFetch`, under a policy where a single sample of an item fails."""
        fetch: MapFetch = self.function
        if context.tracked or rng is not None:
            context = FollowingContext(context, rng)  # `at` is the number of the item
        if fetch.batched and on_error is not None:
            fetch = replace(fetch, on_error=on_error)
        return fetch.open(None, context)


@dataclass(frozen=True)
class WorkFetch(Fetch):
    """Work of a stage: a list of items in, a list of results out."""

    steps: tuple[Step, ...]  # at least one
    threads: int = 1  # of each worker
    on_error: Policy | None = None  # it retries and replaces here; skips are only noted
    entries: Any = None  # of torch's collate map, for fresh workers: see `with_entries`
    listed: ClassVar[bool] = True

    @property
    def dataset(self) -> Any:
        return next((fetch.dataset for fetch in self._fetches), None)

    @property
    def private(self) -> bool:
        return any(fetch.private for fetch in self._fetches)

    @property
    def _fetches(self) -> list[MapFetch]:
        return [step.function for step in self.steps if isinstance(step.function, MapFetch)]

    @property
    def coroutines(self) -> int:  # type: ignore[override]  # a field in the base class
        return self.steps[0].concurrency

    @property
    def spreads(self) -> bool:
        return not self.coroutines

    @property
    def divisible(self) -> bool:
        """True if its first step makes batches of a dataset's samples."""
        first = self.steps[0].function
        return isinstance(first, MapFetch) and first.divisible

    @property
    def overlaps(self) -> bool:
        return self.threads > 1 or self.coroutines > 1

    def with_dataset(self, dataset: Any) -> WorkFetch:
        steps = tuple(
            replace(step, function=step.function.with_dataset(dataset))
            if isinstance(step.function, MapFetch)
            else step
            for step in self.steps
        )
        return replace(self, steps=steps)

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        return ItemsFetcher(self, context)


class ItemsFetcher(Fetcher):
    """Fetcher of a `WorkFetch`.

    Where items are seeded, the number of an item in the stage's input seeds its steps: each of them
    (`SampleRng.seeded_by_item`), or all of them together.
    """

    def __init__(self, work: WorkFetch, context: TaskContext) -> None:
        self._context, self._rng, policy = context, context.rng, work.on_error
        self._opened = [
            step.open(context, policy, number) for number, step in enumerate(work.steps)
        ]
        by_function = self._rng is not None and self._rng.by_function
        self._by_item = self._rng is not None and not by_function
        self._policy = seeded(policy, self._rng, item_key) if by_function else policy
        self._enter = numbered_item if by_function else None
        self._helpers = Fanout.of(context, work.threads) if work.threads > 1 else None
        self._loop = ItemLoop(self._opened, self._policy, context, self._helpers, enter=self._enter)
        self._alone = self._alone_in(self._loop)
        self._coroutines: Any = self._opened[0][1] if work.coroutines else None
        self._batches: IndexedFetcher | None = None
        self._samples: Any = None  # of the task that is assembled
        if work.divisible:
            part = None if self._rng is None else self._rng.for_function(0)
            self._divide(work.steps[0].fetcher(context, part, policy))

    def _divide(self, batches: IndexedFetcher) -> None:
        """Prepare for tasks that are one batch each, whose samples `batches` fetches."""
        self._batches = batches
        made = ("batch" if batches.tolerant else "map", self._made)
        later = self._opened[1:]
        # Without later steps nothing draws by the number of the item.
        enter = self._enter if later else None
        loop = ItemLoop([made, *later], self._policy, self._context, enter=enter)
        self._rest = self._alone_in(loop) if later else loop.alone

    def fetch(self, items: list[Any]) -> Any:
        spared, rng = type(items) is PartlyGivenUp, self._rng
        if rng is not None and self._by_item:
            if self._helpers is not None:
                parts = self._helpers.map(self._alone, self._numbered(items), self._context)
                return self._loop.joined(parts).hand_over(self._context)
            first = rng.first_item
            walk = rng.enter(items, lambda place: b"%d" % (first + place))
            try:
                results = self._loop.run(walk, spared=spared)
            finally:
                rng.leave()
            return results.hand_over(self._context)
        items = self._numbered(items)
        if self._coroutines is not None:
            items = self._coroutines.through(items)
        return self._loop.run(items, spared=spared).hand_over(self._context)

    def _numbered(self, items: list[Any]) -> list[Any]:
        rng = self._rng
        return items if rng is None else list(zip(items, count(rng.first_item)))

    def _alone_in(self, loop: ItemLoop) -> Callable[[Any], TaskResults]:
        """Return `ItemLoop.alone` for the items of `_numbered`. For any thread."""
        rng = self._rng
        if rng is None or not self._by_item:
            return loop.alone
        return lambda pair: rng.call(SAMPLE, b"%d" % pair[1], loop.alone, pair[0])

    def begin(self, items: Any, ring: Callable[[], None]) -> StartedTask:
        if self._helpers is None:
            begun: StartedTask = self._coroutines.begin(items)
            return begun
        return self._helpers.begin(self._alone, self._numbered(items), self._context, "item", ring)

    def wake(self) -> None:
        if self._coroutines is not None:
            self._coroutines.wake()

    def sample(self, index: Any) -> Any:
        assert self._batches is not None
        return self._batches.sample(index)

    def assemble(self, samples: Any, index: Any) -> Any:
        if self._helpers is not None:
            return self._loop.joined(samples).hand_over(self._context)
        if self._coroutines is not None:
            return self._loop.run(samples).hand_over(self._context)
        self._samples = samples
        results = self._rest((self._numbered(index) if self._opened[1:] else index)[0])
        results.end_item()
        return results.hand_over(self._context)

    def _made(self, index: Any) -> Any:
        """Return the batch of the samples of the task that is assembled."""
        batches, samples, self._samples = self._batches, self._samples, None
        assert batches is not None
        if batches.rng is None:
            return batches.made_of(samples, index)
        return batches.rng.task(batches.key, partial(batches.made_of, samples), index)

    def close(self) -> None:
        if self._coroutines is not None:
            self._coroutines.close()
