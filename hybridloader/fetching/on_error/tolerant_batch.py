"""The fetcher of map-style datasets under a policy of `on_error`, in the worker.

It differs from that in `fetch` only where something has failed. What must be counted goes
beside the result.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hybridloader._support.attributes import attribute
from hybridloader._support.errors import no_stop
from hybridloader.engine.fetcher import Abandoned, Fetcher, GivenUp, Spared, TaskContext
from hybridloader.fetching.fetch import (
    Apart,
    MapFetch,
    Spread,
    first_of_batch,
    key_of_sample,
    one_by_one,
)
from hybridloader.fetching.gather import Odd, gatherer
from hybridloader.fetching.on_error.error_handler import ErrorHandler, seeded
from hybridloader.fetching.on_error.item_loop import ItemLoop
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.on_error.task_results import TaskResults
from hybridloader.fetching.outcome import (
    Attempt,
    FailureRecord,
    Outcome,
    all_lost,
    outcome_of,
    short,
)


class TolerantBatchFetcher(Fetcher):
    """The fetcher of a `MapFetch` under a policy.

    Parameters
    ----------
    fetch
        What to do.
    policy
        If it skips, what is left of a batch is given as it is, or, unless ``fetch.fill``, collated.
    context
        Looked at after every sample.
    spread
        Does a function to the samples of a batch on several threads; None: one after the other.
    """

    def __init__(
        self, fetch: MapFetch, policy: Policy, context: TaskContext, spread: Spread | None
    ) -> None:
        self._dataset, self._collate_fn = fetch.dataset, fetch.collate_fn
        self._batched, self._fill, self._context = fetch.batched, fetch.fill, context
        self._gather = gatherer(fetch.dataset, fetch.collate_fn) if fetch.batched else None
        one = _one_of(fetch.dataset)
        rng = context.rng
        if rng is not None:
            self._dataset = rng.seeded_dataset(fetch.dataset, whole=not one_by_one(fetch.dataset))
            one, self._collate_fn = rng.seeded(one), rng.seeded_collate(fetch.collate_fn)
        self._skips = (handler := ErrorHandler(seeded(policy, rng), context)).skips
        spread = spread if one_by_one(self._dataset) else None
        self._loop = ItemLoop([("map", one)], handler, context, spread, batch=True)
        # All the mutable state: what the last task was for.
        self._indices: Sequence[Any] = ()

    def fetch(self, index: Any) -> Any:
        self._indices = index if self._batched else [index]
        value, outcome = self.attempt(index)
        self._context.add("outcome", outcome)
        return value

    def key(self, index: Any) -> bytes:
        return first_of_batch(index) if self._batched else key_of_sample(index)

    def attempt(self, index: Any) -> Attempt:
        """Return the value of a task and what became of its samples. On any thread."""
        if not self._batched:
            results = self._loop.run([index], spared=True)
            if not results.values:
                return short([], [], results.failures, 1)
            return self._collated([index], results.values[0], results.failures)
        if type(index) is Apart:
            results = self._loop.new_results()
            for one in index:  # not numbered: if one kills, none is known to be it
                found = self._loop.alone(one)
                results.extend(found.values, found.notes)
                if self._context.cancelled:
                    raise Abandoned
            return short(_left(index, results), results.values, results.failures, index.wanted)
        whole = self._as_a_whole(index)
        if whole is not None:
            return whole
        results = self._loop.run(index, spared=type(index) is Spared)
        samples = results.values
        if not results.notes:
            return self._collated(index, samples, [])
        indices, failures = _left(index, results), results.failures
        if len(samples) < len(index) and (self._fill or not samples):
            return short(indices, samples, failures, len(index))
        return self._collated(indices, samples, failures)

    def _as_a_whole(self, indices: Any) -> Attempt | None:
        """The batch in one go; None where that can't be had, or has failed."""
        if self._gather is not None:
            try:
                return self._gather(indices), Outcome(len(indices))
            except Odd:
                pass
        if one_by_one(self._dataset) or any(type(index) is GivenUp for index in indices):
            return None
        try:
            samples = self._dataset.__getitems__(indices)
        except Exception:  # which of them it was, they tell when they are asked for alone
            return None
        return self._collated(indices, samples, [])

    def _collated(
        self, indices: Sequence[Any], samples: Any, failures: list[FailureRecord]
    ) -> Attempt:
        """`samples`, as a batch; if that can't be made, the whole of it is lost."""
        attempted = len(indices)
        if failures:
            attempted += sum(not failed.replaced for failed in failures)
        try:
            return self._collate_fn(samples), Outcome(attempted, failures)
        except Exception as error:
            if not self._skips:
                raise
            return all_lost(indices, no_stop(error), failures, attempted)

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Leave out the samples that can't be sent, or the batch; see `Fetcher.mend`."""
        outcome = outcome_of(self._context)
        if not self._skips:
            super().mend(value, error, check)
        if outcome.short is None:  # nothing was lost of it before
            value, outcome = all_lost(self._indices, error, (), len(self._indices))
        else:
            results = self._loop.new_results()
            for index, sample in zip(outcome.short, value, strict=True):
                try:
                    check(sample)
                    results.values.append(sample)
                except Exception as last:
                    results.add_failure(index, last)
            indices, failures = (
                _left(outcome.short, results),
                [*outcome.failures, *results.failures],
            )
            value, outcome = short(indices, results.values, failures, outcome.wanted)
        self._context.add("outcome", outcome)
        return value


def _left(asked: Sequence[Any], results: TaskResults) -> list[Any]:
    """The indices of the samples that are there."""
    lost = [failed.position for failed in results.failures if not failed.replaced]
    gone = {place + before for before, place in enumerate(lost)}
    return [index for place, index in enumerate(asked) if place not in gone]


def _one_of(dataset: Any) -> Callable[[Any], Any]:
    """What gives a single sample: ``dataset[index]``, or, if it has none, a batch of one."""
    own = getattr(type(dataset), "__getitem__", None)
    if own is not None and "torch" in sys.modules:
        from torch.utils.data import Dataset

        if own is Dataset.__getitem__:  # it is there only to raise NotImplementedError
            own = None
    if own is None and attribute(dataset, "__getitems__"):
        return lambda index: next(iter(dataset.__getitems__([index])))
    return partial(operator.getitem, dataset)
