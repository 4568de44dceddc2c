"""What a worker does that reads an iterable source of a pipeline: the next items of its own iterator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import GeneratorType
from typing import Any, ClassVar

from hybridloader._support.errors import ShardLost
from hybridloader.engine.fetcher import Abandoned, EndOfShard, Fetch, Fetcher, TaskContext
from hybridloader.fetching.fetch import end, skip
from hybridloader.fetching.on_error.error_handler import ErrorHandler, seeded
from hybridloader.fetching.on_error.places import rest_is_lost
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.on_error.task_results import ItemsFetcher, TaskResults
from hybridloader.fetching.on_error.tolerant_shard import TolerantIterator
from hybridloader.seeding.sample_rng import innermost

_READING = 0.01
"""Seconds after which a reader gives what it has, if that is less than it was asked for."""


class ReadersFetch(Fetch):
    """The work of a reader: the next items of its own iterator, as many as it is asked for.

    Parameters
    ----------
    source
        An iterable, of which every worker has a copy of its own; or a function that makes one, called in
        the worker.
    on_error
        Repeats and replaces here; what is to be skipped is told, as without a policy.
    """

    in_turn: ClassVar[bool] = True
    batched = False

    def __init__(self, source: Any, on_error: Policy | None = None) -> None:
        self._source, self._on_error = source, on_error

    @property
    def dataset(self) -> Any:
        return self._source

    @property
    def private(self) -> bool:
        return hasattr(type(self._source), "__iter__")  # a class has it too, and is called

    def with_dataset(self, dataset: Any) -> ReadersFetch:
        return ReadersFetch(dataset, self._on_error)

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        def make() -> Iterator[Any]:
            return iter(self._source if self.private else self._source())

        if context.rng is None:
            return Reader(make(), self._on_error, context)
        policy = seeded(self._on_error, context.rng)
        return Reader(context.rng.seeded_shard(make, later=True), policy, context)


class Reader(ItemsFetcher):
    """One pass of one reader over its part.

    Attributes
    ----------
    position
        How often the iterator was asked for an item and had not ended; also where it has raised.
    """

    def __init__(self, items: Iterator[Any], on_error: Policy | None, context: TaskContext) -> None:
        super().__init__(ErrorHandler(None, context), context)
        self._items = items
        self._tolerant: TolerantIterator | None = None  # with a policy, it counts
        if on_error is not None:
            self._tolerant = TolerantIterator(items, on_error, context, self)
            self._handler = self._tolerant.handler
        # All the mutable state:
        self.position = 0
        self._ended = False
        self._lost: ShardLost | None = (
            None  # to be raised where the rest of the items would have been
        )

    def fetch(self, most: int) -> Any:
        results = TaskResults(self._handler, what="the next item")
        if self._lost is not None:
            lost, self._lost, self._ended = self._lost, None, True
            results.add_failure(self.position, lost)
            return results.told(self._context)
        if self._ended:
            raise EndOfShard
        try:
            self._read(most, results)
        finally:
            if self._tolerant is None:
                self.position += len(results.values) + len(results.notes)
        if not (results.values or results.notes):
            raise EndOfShard
        return results.told(self._context)

    def _read(self, most: int, results: TaskResults) -> None:
        """Add items to `results`, up to one that is lost."""
        values, notes, draw = results.values, results.notes, self._items.__next__
        until = time.monotonic() + _READING
        while len(values) < most and not (values and time.monotonic() > until):
            try:
                if self._tolerant is None:
                    values.append(draw())
                else:
                    self._tolerant.draw(results)
            except StopIteration:
                self._ended = True
                return
            except Exception as error:
                number = self.position + (len(values) if self._tolerant is None else -1)
                if self._tolerant is None and isinstance(innermost(self._items), GeneratorType):
                    self._lost = rest_is_lost(f"item {number} of this reader", error)
                results.add_failure(number, error)
            if notes and notes[-1].item is not None:
                return
            if self._context.cancelled:
                raise Abandoned

    def close(self) -> None:
        """End the iterator: nothing more will be read."""
        items, self._items, self._ended = self._items, iter(()), True
        if self._tolerant is not None:
            self._tolerant.close()
        end(innermost(items))

    def skip(self, count: int) -> None:
        """Go on behind `count` items, which another worker has delivered. What they raise is known."""
        self.position, self._ended = skip(self._items, count, self._context)
