"""Fetcher of a map-style dataset under an error policy, in the worker.

It differs from the fetchers of `fetching.samples` only where a sample has failed.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hybridloader._support.attributes import attribute
from hybridloader._support.errors import foreign
from hybridloader.engine.fetcher import Abandoned, GivenUp, Spared, TaskContext
from hybridloader.fetching.gather import Odd
from hybridloader.fetching.on_error.error_handler import ErrorHandler, seeded
from hybridloader.fetching.on_error.item_loop import ItemLoop
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.on_error.task_results import TaskResults
from hybridloader.fetching.outcome import Attempt, FailureRecord, Outcome, all_failed, short_batch
from hybridloader.fetching.samples import Apart, BatchFetcher, Spread
from hybridloader.seeding.sample_rng import Key


class TolerantBatchFetcher(BatchFetcher):
    """Fetcher of batches, or single samples, that puts an `Outcome` beside each value."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        policy: Policy,
        context: TaskContext,
        spread: Spread | None,
        *,
        batched: bool,
        fill: bool,
    ) -> None:
        super().__init__(dataset, collate_fn, context, spread)
        self._batched, self._fill = batched, fill
        one = _one_of(dataset) if context.rng is None else context.rng.seeded(_one_of(dataset))
        handler = ErrorHandler(seeded(policy, context.rng), context)
        self._skips = handler.skips
        self._loop = ItemLoop([("map", one)], handler, context, self._spread, batch=True)
        # All the mutable state: the indices of the last task.
        self._indices: Sequence[Any] = ()

    def fetch(self, index: Any) -> Any:
        self._indices = index if self._batched else [index]
        value, outcome = self.attempt(index)
        self._context.add("outcome", outcome)
        return value

    def key(self, index: Any) -> Key:
        return super().key(index if self._batched else [index])

    def attempt(self, index: Any) -> Attempt:
        """Return the value of a task and the outcome of its samples. On any thread."""
        if not self._batched:
            results = self._loop.run([index], spared=True)
            if not results.values:
                return short_batch([], [], results.failures, 1)
            return self._collated([index], results.values[0], results.failures)
        if type(index) is Apart:
            results = self._loop.new_results()
            for one in index:  # not numbered: if one kills, none is known to be it
                results.extend(self._loop.alone(one))
                if self._context.cancelled:
                    raise Abandoned
            return short_batch(
                _left(index, results), results.values, results.failures, index.wanted
            )
        whole = self._as_a_whole(index)
        if whole is not None:
            return whole
        return self._joined(index, self._loop.run(index, spared=type(index) is Spared))

    def sample(self, index: Any) -> TaskResults:
        return self._loop.alone(index)

    def assemble(self, samples: list[TaskResults], index: Any) -> Any:
        self._indices = index
        value, outcome = self._joined(index, self._loop.joined(samples))
        self._context.add("outcome", outcome)
        return value

    def _joined(self, asked: Sequence[Any], results: TaskResults) -> Attempt:
        """Return the good samples as a batch, or uncollated if they are to be filled up."""
        samples = results.values
        if not results.notes:
            return self._collated(asked, samples, [])
        indices, failures = _left(asked, results), results.failures
        if len(samples) < len(asked) and (self._fill or not samples):
            return short_batch(indices, samples, failures, len(asked))
        return self._collated(indices, samples, failures)

    def _as_a_whole(self, indices: Any) -> Attempt | None:
        """Return the batch made in one call; None where that can't be done, or has failed."""
        if self._gather is not None:
            try:
                return self._gather(indices), Outcome(len(indices))
            except Odd:
                pass
        if not self._whole or any(type(index) is GivenUp for index in indices):
            return None
        try:
            samples = self._dataset.__getitems__(indices)
        except Exception:  # which sample it was shows when each is asked for alone
            return None
        return self._collated(indices, samples, [])

    def _collated(
        self, indices: Sequence[Any], samples: Any, failures: list[FailureRecord]
    ) -> Attempt:
        """Return `samples` as a batch; if they can't be collated, all of them have failed."""
        attempted = len(indices)
        if failures:
            attempted += sum(not failed.replaced for failed in failures)
        try:
            return super().assemble(samples, indices), Outcome(attempted, failures)
        except Exception as error:
            if not self._skips:
                raise
            return all_failed(indices, foreign(error), failures, attempted)

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        if not self._skips:
            super().mend(value, error, check)
        assert self._context.extras is not None
        outcome: Outcome = self._context.extras["outcome"]
        if outcome.short is None:  # nothing of it had failed before
            value, outcome = all_failed(self._indices, error, (), len(self._indices))
        else:
            results = self._loop.new_results()
            results.add_sendable(zip(outcome.short, value, strict=True), check)
            failures = [*outcome.failures, *results.failures]
            indices = _left(outcome.short, results)
            value, outcome = short_batch(indices, results.values, failures, outcome.wanted)
        self._context.add("outcome", outcome)
        return value


def _left(asked: Sequence[Any], results: TaskResults) -> list[Any]:
    """Return the indices of the good samples."""
    failed = [failed.position for failed in results.failures if not failed.replaced]
    gone = {place + before for before, place in enumerate(failed)}
    return [index for place, index in enumerate(asked) if place not in gone]


def _one_of(dataset: Any) -> Callable[[Any], Any]:
    """Return the function of a single sample: ``dataset[index]``, or, without that, a batch of one."""
    own = getattr(type(dataset), "__getitem__", None)
    if own is not None and "torch" in sys.modules:
        from torch.utils.data import Dataset

        if own is Dataset.__getitem__:  # it is there only to raise NotImplementedError
            own = None
    if own is None and attribute(dataset, "__getitems__"):
        return lambda index: next(iter(dataset.__getitems__([index])))
    return partial(operator.getitem, dataset)
