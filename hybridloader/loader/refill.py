"""Full batches out of those that came short: how a loader goes on without the samples that failed.

The good samples of a batch that came short wait, in order, for those of the next that comes short. As
soon as they are enough they make one full batch, in the place of the one that completed it; what is left
at the end of the pass makes a last, smaller one. That depends on the order of the batches alone: not on
workers, backend or timing. It asks for no sample again, and never holds as many as a batch.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from hybridloader._support.errors import Failure, TooManyErrors, no_stop
from hybridloader.fetching.on_error.error_budget import ErrorBudget
from hybridloader.fetching.outcome import FailureRecord, Outcome

T = TypeVar("T")


class Refill(Generic[T]):
    """What waits, and when it is enough. Pure."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()

    def add(self, good: Iterable[T], wanted: int) -> list[T] | None:
        """A batch came with `good` samples instead of the `wanted`: a full one, if they are enough now.

        One at most, so fewer wait than the largest batch wanted: a short one brings fewer than it
        wants, and a full one takes as many.
        """
        self._waiting.extend(good)
        if not 0 < wanted <= len(self._waiting):
            return None
        return [self._waiting.popleft() for _ in range(wanted)]

    def rest(self) -> list[T]:
        """What waits at the end."""
        rest = list(self._waiting)
        self._waiting.clear()
        return rest

    def __len__(self) -> int:
        return len(self._waiting)


class _Good(NamedTuple):
    """A sample that waits."""

    index: Any
    sample: Any


class Waiting:
    """What has come and was not yet given to who asks: for whoever must be able to fetch it again.

    Holds no sample, so that it may be kept for longer than these.

    Attributes
    ----------
    samples
        The worker and the index of each that waits, in their order.
    whole
        Whether the last result, a batch that is whole, waits too, because an error was raised first.
    """

    def __init__(self) -> None:
        self.samples: deque[tuple[int | None, Any]] = deque()
        self.whole = False

    def given(self, count: int) -> None:
        """The first so many were given, or it was told why they can't be."""
        for _ in range(count):
            self.samples.popleft()


class FullBatches(Iterator[Any]):
    """The batches of one pass of a loader under a policy.

    Parameters
    ----------
    results
        Values, one after the other.
    last
        Returns who made the last of them, and what became of its samples: of a batch that came with
        nothing to tell, None.
    budget
        Is told what has failed; None if nothing can, because there is no policy.
    collate_fn
        Makes a batch of samples; called by whoever asks.
    drop_last
        Whether a last batch that is not full is dropped.
    copies
        Whether samples that wait are copied, because they lie in memory that workers use again.
    waiting
        Is told what waits.
    """

    def __init__(
        self,
        results: Iterator[Any],
        last: Callable[[], tuple[int | None, Outcome | None]],
        budget: ErrorBudget | None,
        collate_fn: Callable[[Any], Any],
        *,
        drop_last: bool,
        copies: bool,
        waiting: Waiting | None = None,
    ) -> None:
        self._results, self._last, self._budget = results, last, budget
        self._collate_fn, self._drop_last, self._copies = collate_fn, drop_last, copies
        # All the mutable state: what waits, and batches that came with an error that was raised first.
        self._refill: Refill[_Good] = Refill()
        self._ready: deque[tuple[Any, int]] = deque()
        self._waiting = Waiting() if waiting is None else waiting

    def __next__(self) -> Any:
        while not self._ready:
            try:
                found = next(self._results)
            except StopIteration:
                rest = self._refill.rest()
                if self._drop_last or not rest:
                    raise
                self._collate(rest)
                continue
            worker, outcome = self._last()
            if outcome is None:
                return found
            if outcome.short is None and not outcome.failures:
                if self._budget is not None:
                    self._budget.count(outcome.attempted, (), None)
                return found
            try:
                if self._budget is not None:
                    self._budget.count(outcome.attempted, outcome.failures, worker)
            except TooManyErrors:
                self._take(found, outcome, worker)  # for whoever catches it and goes on
                raise
            self._take(found, outcome, worker)
        data, count = self._ready.popleft()
        self._waiting.given(count)
        self._waiting.whole = False
        return data

    def _take(self, found: Any, outcome: Outcome, worker: int | None) -> None:
        if outcome.short is None:
            self._ready.append((found, 0))
            self._waiting.whole = True
            return
        self._waiting.samples.extend((worker, index) for index in outcome.short)
        samples = map(_own, found) if self._copies else found
        good = map(_Good, outcome.short, samples)
        batch = self._refill.add(good, outcome.wanted)
        if batch is not None:
            self._collate(batch)

    def _collate(self, batch: list[_Good]) -> None:
        try:
            data = self._collate_fn([sample for _, sample in batch])
        except Exception as error:
            self._waiting.given(len(batch))
            if self._budget is None:
                raise
            failure = Failure(no_stop(error))
            failures = [FailureRecord(index, n, failure) for n, (index, _) in enumerate(batch)]
            self._budget.count(0, failures, None)  # tried before, one by one
            return
        self._ready.append((data, len(batch)))


def _own(sample: Any) -> Any:
    """A copy of `sample`: waiting may take until the end of the pass, and a worker wants its slots."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # it then keeps a slot busy, and the worker takes another
        return sample
