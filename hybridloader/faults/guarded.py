"""The fetcher of map-style datasets under a policy of `on_error`, in the worker.

It differs from that in `fetch` only where something has failed. What must be counted travels with
the result.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hybridloader.buffers.gather import Odd, gatherer
from hybridloader.errors import no_stop
from hybridloader.faults.guard import Guard, Swapped, miss_of, why
from hybridloader.faults.on_error import Policy
from hybridloader.faults.tried import Miss, Short, Tried
from hybridloader.fetch import (
    Abandoned,
    Apart,
    Flag,
    GivenUp,
    MapFetch,
    Spared,
    Spread,
    numbered,
    one_by_one,
)
from hybridloader.foreign import attribute


class _Lost:
    """In the place of a sample that could not be had, because of `error`."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class GuardedMap:
    """The fetcher of a `MapFetch` under a policy.

    Parameters
    ----------
    fetch
        What to do.
    policy
        If it skips, what is left of a batch is `Short`, or, unless ``fetch.fill``, collated.
    cancelled
        Looked at after every sample.
    spread
        Does a function to the samples of a batch on several threads; None: one after the other.
    """

    def __init__(
        self, fetch: MapFetch, policy: Policy, cancelled: Flag, spread: Spread | None
    ) -> None:
        self._dataset, self._collate_fn = fetch.dataset, fetch.collate_fn
        self._batched, self._fill = fetch.batched, fetch.fill
        self._cancelled, self._spread = cancelled, spread
        self._guard = Guard(policy, cancelled)
        self._gather = gatherer(fetch.dataset, fetch.collate_fn) if fetch.batched else None
        self._one = _one_of(fetch.dataset)
        if cancelled.draws is not None:
            draws = cancelled.draws
            self._dataset = draws.view(fetch.dataset, whole=not one_by_one(fetch.dataset))
            self._one, self._collate_fn = draws.seeded(self._one), draws.collating(fetch.collate_fn)
            self._guard = Guard(draws.policy(policy), cancelled)
        # All the mutable state: what the last task was for.
        self._indices: Sequence[Any] = ()

    def __call__(self, index: Any) -> Tried | Short:
        self._indices = index if self._batched else [index]
        if not self._batched:
            if self._cancelled.notes:
                self._cancelled.at = 0
            return self._checked(self._sample(index))
        if type(index) is Apart:
            found = []
            for one in index:
                found.append(self._sample(one))
                if self._cancelled.up:
                    raise Abandoned
            return Short(*self._parted(found), index.wanted)
        whole = self._as_a_whole(index)
        if whole is not None:
            return whole
        if self._spread is not None and one_by_one(self._dataset):
            return self._sorted(self._spread(self._sample, index))
        return self._one_after_the_other(index)

    def _one_after_the_other(self, indices: Any) -> Tried | Short:
        # `_sample` for each would do, but would add a third of a microsecond to every good one.
        fetch_one, cancelled = self._one, self._cancelled
        spared = type(indices) is Spared
        found: list[Any] = []
        whole = not spared
        for index in numbered(indices, cancelled) if cancelled.notes else indices:
            error: Exception | None = None
            if spared and type(index) is GivenUp:
                error = index.error()
            else:
                try:
                    found.append(fetch_one(index))
                except Exception as raised:
                    error = raised
            if error is not None:
                whole = False
                try:
                    found.append(self._rescued(index, error))
                finally:
                    del error
            if cancelled.up:
                raise Abandoned
        return self._collated(found, []) if whole else self._sorted(found)

    def _rescued(self, index: Any, error: Exception) -> Any:
        guard = self._guard
        try:
            if type(index) is GivenUp:
                return guard.give_up(index.index, error)
            return guard.rescue(self._one, index, index, no_stop(error))
        except Exception as last:
            if not guard.skips:
                raise
            return _Lost(last)
        finally:
            del error

    def _as_a_whole(self, indices: Any) -> Tried | Short | None:
        """The batch in one go; None where that can't be had, or has failed."""
        if self._gather is not None:
            try:
                return Tried(self._gather(indices), len(indices))
            except Odd:
                pass
        if one_by_one(self._dataset) or any(type(index) is GivenUp for index in indices):
            return None
        try:
            samples = self._dataset.__getitems__(indices)
        except Exception:  # which of them it was, they tell when they are asked for alone
            return None
        return self._collated(samples, [])

    def _sample(self, index: Any) -> Any:
        try:
            return self._guard(self._one, index)
        except Exception as error:
            if not self._guard.skips:
                raise
            return _Lost(error)

    def _checked(self, found: Any) -> Tried | Short:
        """One sample that is no batch."""
        (index,) = self._indices
        if type(found) is _Lost:
            return Short([], [], [miss_of(index, 0, found.error)], 1)
        misses = []
        if type(found) is Swapped:
            misses.append(miss_of(index, 0, found.error, replaced=True))
            found = found.value
        return self._collated(found, misses)

    def _sorted(self, found: list[Any]) -> Tried | Short:
        """The samples of a batch, of which some may be lost or swapped."""
        indices, samples, misses = self._parted(found)
        if len(samples) < len(found) and (self._fill or not samples):
            return Short(indices, samples, misses, len(found))
        return self._collated(samples, misses)

    def _parted(self, found: list[Any]) -> tuple[list[Any], list[Any], list[Miss]]:
        """The indices and samples that are there, and what is missing."""
        indices: list[Any] = []
        samples: list[Any] = []
        misses: list[Miss] = []
        for position, (index, sample) in enumerate(zip(self._indices, found, strict=True)):
            if type(sample) is _Lost:
                misses.append(miss_of(index, position, sample.error))
                continue
            if type(sample) is Swapped:
                misses.append(miss_of(index, position, sample.error, replaced=True))
                sample = sample.value
            indices.append(index)
            samples.append(sample)
        return indices, samples, misses

    def _collated(self, samples: Any, misses: list[Miss]) -> Tried | Short:
        """`samples`, as a batch; if that can't be made, the whole of it is lost."""
        try:
            return Tried(self._collate_fn(samples), len(self._indices), misses)
        except Exception as error:
            if not self._guard.skips:
                raise
            return self._all_lost(no_stop(error), misses)

    def mend(self, result: Tried | Short, check: Callable[[Any], Any]) -> Tried | Short:
        """What can be sent of a result that can't, which `check` tells by raising."""
        if not self._guard.skips:
            check(result.data if isinstance(result, Tried) else result)
        if isinstance(result, Short):
            return _sendable(result, check)
        return self._all_lost(why(result.data, check), result.misses)

    def _all_lost(self, error: Exception, misses: Sequence[Miss]) -> Short:
        """A batch that can't be had: those that were lost before, and the others because of `error`."""
        known = {miss.position: miss for miss in misses}
        for position, index in enumerate(self._indices):
            if position not in known:
                known[position] = miss_of(index, position, error)
        return Short([], [], [known[n] for n in sorted(known)], len(self._indices))


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


def _sendable(short: Short, check: Callable[[Any], Any]) -> Short:
    """Without the samples that can't be sent."""
    indices, samples, misses = [], [], list(short.misses)
    for position, (index, sample) in enumerate(zip(short.indices, short.samples, strict=True)):
        try:
            check(sample)
        except Exception as error:
            misses.append(miss_of(index, position, error))
            continue
        indices.append(index)
        samples.append(sample)
    return Short(indices, samples, misses, short.wanted)
