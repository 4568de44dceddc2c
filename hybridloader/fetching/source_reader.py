"""Reading of a pipeline's iterable source in a worker: the next items of its own iterator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, ClassVar

from hybridloader._support.errors import ShardLost
from hybridloader.engine.fetcher import Abandoned, EndOfShard, Fetch, Fetcher, TaskContext
from hybridloader.fetching.on_error.error_handler import ErrorHandler, seeded
from hybridloader.fetching.on_error.places import rest_is_lost
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.on_error.task_results import TaskResults, sendable_items
from hybridloader.fetching.on_error.tolerant_shard import TolerantReader
from hybridloader.seeding.sample_rng import SeededIterator, innermost

_READING = 0.01
"""Seconds after which a reader returns what it has, if that is less than it was asked for."""


@dataclass(frozen=True)
class ReadersFetch(Fetch):
    """Next items of the worker's own iterator, as many as the task asks for.

    The `dataset` is an iterable, of which every worker has a copy of its own; or a function that makes
    one, called in the worker. For `on_error` see `WorkFetch`.
    """

    dataset: Any
    on_error: Policy | None = None

    in_turn: ClassVar[bool] = True
    batched = False

    @property
    def private(self) -> bool:
        return hasattr(type(self.dataset), "__iter__")  # a class has it too, and is called

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        def make() -> Iterator[Any]:
            return iter(self.dataset if self.private else self.dataset())

        if context.rng is None:
            return SourceReader(make(), self.on_error, context)
        policy = seeded(self.on_error, context.rng)
        return SourceReader(context.rng.seeded_shard(make, later=True), policy, context)


class SourceReader(TolerantReader):
    """Fetcher of lists of items from one worker's iterator."""

    def __init__(self, items: Iterator[Any], on_error: Policy | None, context: TaskContext) -> None:
        super().__init__(items, context)
        self._handler = ErrorHandler(on_error, context)
        self._tolerant = on_error is not None
        # All the mutable state: an error to be raised where the rest of the items would have been.
        self._lost: ShardLost | None = None
        self._closed = isinstance(items, SeededIterator)  # it has yet to be opened

    def fetch(self, most: int) -> Any:
        if self._closed and isinstance(self._samples, SeededIterator):
            self._closed, self.ended = False, True
            self._samples.open()  # if it raises, that answers this task, and is the end
            self.ended = False
        results = TaskResults(self._handler, what="the next item")
        if self._lost is not None:
            lost, self._lost, self.ended = self._lost, None, True
            results.add_failure(self.position, lost)
            return results.hand_over(self._context)
        if self.ended:
            raise EndOfShard
        self._read(most, results)
        if not (results.values or results.notes):
            raise EndOfShard
        return results.hand_over(self._context)

    def _read(self, most: int, results: TaskResults) -> None:
        """Add items to `results`, up to one that can't be had."""
        values, notes = results.values, results.notes
        until = time.monotonic() + _READING
        while len(values) < most and not (values and time.monotonic() > until):
            try:
                if self._tolerant:
                    self.read(results)
                else:
                    values.append(self.next_sample())
            except StopIteration:
                self.ended = True
                return
            except Exception as error:
                number = self.position - 1
                if not self._tolerant and isinstance(innermost(self._samples), GeneratorType):
                    self._lost = rest_is_lost(f"item {number} of this reader", error)
                results.add_failure(number, error)
            if notes and notes[-1].item is not None:
                return
            if self._context.cancelled:
                raise Abandoned

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        return sendable_items(self._handler, self._context, value, check)
