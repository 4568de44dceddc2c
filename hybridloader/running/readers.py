"""What a worker does that reads an iterable source of a pipeline: the next items of its own iterator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, ClassVar

from hybridloader.errors import ShardLost
from hybridloader.faults.guard import Swapped
from hybridloader.faults.guarded_shard import GuardedIterator
from hybridloader.faults.on_error import Policy
from hybridloader.faults.outcomes import Damaged, Noted, bad, mended, whole_or_damaged
from hybridloader.faults.places import rest_is_lost
from hybridloader.fetch import end, skip
from hybridloader.fetcher import Abandoned, EndOfShard, Fetch, Fetcher, TaskContext
from hybridloader.seeds.draws import innermost

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
        Repeats and replaces here; what is to be skipped is `Bad`, as without a policy.
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

        if context.draws is None:
            return Reader(make(), self._on_error, context)
        policy = context.draws.policy(self._on_error)
        return Reader(context.draws.shard(make, later=True), policy, context)


class Reader(Fetcher):
    """One pass of one reader over its part.

    Attributes
    ----------
    position
        How often the iterator was asked for an item and had not ended; also where it has raised.
    """

    def __init__(self, items: Iterator[Any], on_error: Policy | None, context: TaskContext) -> None:
        self._items, self._context = items, context
        self._draw: Callable[[], Any] = items.__next__
        self._plain = on_error is None  # else the source counts
        self._guarded: GuardedIterator | None = None
        if on_error is not None:
            self._guarded = GuardedIterator(items, on_error, context, self)
            self._draw = self._guarded.draw
        # All the mutable state:
        self.position = 0
        self._ended = False
        self._lost: ShardLost | None = (
            None  # to be raised where the rest of the items would have been
        )

    def fetch(self, most: int) -> Any:
        if self._lost is not None:
            lost, self._lost, self._ended = self._lost, None, True
            return Damaged([bad(lost, "the next item", self.position)])
        if self._ended:
            raise EndOfShard
        results: list[Any] = []
        try:
            return self._read(most, results)
        finally:
            if self._plain:
                self.position += len(results)

    def _read(self, most: int, results: list[Any]) -> Any:
        until = time.monotonic() + _READING
        while len(results) < most and not (results and time.monotonic() > until):
            number = self.position
            try:
                item = self._draw()
            except StopIteration:
                self._ended = True
                break
            except Exception as error:
                number += len(results) if self._plain else 0
                if self._plain and isinstance(innermost(self._items), GeneratorType):
                    self._lost = rest_is_lost(f"item {number} of this reader", error)
                results.append(bad(error, "the next item", number))
                return Damaged(results)
            if type(item) is Swapped:
                miss = bad(item.error, "the next item", number).miss()
                results.append(Noted(0, [miss._replace(replaced=True)]))
                item = item.value
            results.append(item)
            if self._context.cancelled:
                raise Abandoned
        if not results:
            raise EndOfShard
        return results if self._plain else whole_or_damaged(results)

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Leave out the items that can't be sent; see `Fetcher.mend`."""
        return mended(value, check)

    def close(self) -> None:
        """End the iterator: nothing more will be read."""
        items, self._items, self._ended = self._items, iter(()), True
        self._draw = self._items.__next__
        if self._guarded is not None:
            self._guarded.close()
        end(innermost(items))

    def skip(self, count: int) -> None:
        """Go on behind `count` items, which another worker has delivered. What they raise is known."""
        self.position, self._ended = skip(self._items, count, self._context)
