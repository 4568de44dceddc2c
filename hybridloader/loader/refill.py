"""Full batches made of short ones: a loader continues without the samples that failed.

The good samples of a short batch wait, in order, for those of the next short batch. Once there are
enough, they make one full batch, in the place of the batch that completed it. The rest at the end of the
epoch makes a last, smaller batch. The result only depends on the order of the batches, not on workers,
backend or timing. No sample is fetched again, and fewer samples wait than a batch has.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from hybridloader._support.user_objects import Failure, foreign
from hybridloader.errors import TooManyErrors
from hybridloader.fetching.on_error import ErrorBudget, FailureRecord, Outcome

T = TypeVar("T")


class Refill(Generic[T]):
    """Queue of good samples, which leave it a batch at a time."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()

    def add(self, good: Iterable[T], wanted: int) -> list[T] | None:
        """Add the `good` samples of a batch of `wanted`; return a full batch if there are enough now.

        One batch is enough to return: a short batch adds fewer samples than `wanted`, and a full batch
        removes as many. So fewer samples wait than the largest batch has.
        """
        self._waiting.extend(good)
        if not 0 < wanted <= len(self._waiting):
            return None
        return [self._waiting.popleft() for _ in range(wanted)]

    def rest(self) -> list[T]:
        """Remove and return all waiting samples."""
        rest = list(self._waiting)
        self._waiting.clear()
        return rest

    def __len__(self) -> int:
        return len(self._waiting)


class WaitingSamples:
    """Indices of samples that were received but not yet returned, for a state.

    It refers to no sample, so it may outlive the samples.
    """

    def __init__(self) -> None:
        self.samples: deque[tuple[int | None, Any]] = deque()
        """Worker and index of each waiting sample, in order."""
        self.whole = False
        """True if the last result, a whole batch, waits too, because an error was raised first."""

    def handed_out(self, count: int) -> None:
        """Remove the first `count` samples: they were returned, or their error was raised."""
        for _ in range(count):
            self.samples.popleft()


class FullBatches(Iterator[Any]):
    """Batches of one epoch of a loader whose `results` may be short.

    `last` returns the worker of the last result and the outcome of its samples, if it has one. `budget`
    counts failures; it is None without an error policy. With `copies`, waiting samples are copied,
    because workers reuse their memory. `waiting` keeps their indices for a state.
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
        waiting: WaitingSamples | None = None,
    ) -> None:
        self._results, self._last, self._budget = results, last, budget
        self._collate_fn, self._drop_last, self._copies = collate_fn, drop_last, copies
        # All the mutable state:
        self._refill: Refill[tuple[Any, Any]] = Refill()  # index and sample
        self._ready: deque[tuple[Any, int]] = (
            deque()
        )  # batches, and how many waiting samples each has
        self._waiting = WaitingSamples() if waiting is None else waiting

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
                self._take(
                    found, outcome, worker
                )  # for a caller that catches the error and continues
                raise
            self._take(found, outcome, worker)
        data, count = self._ready.popleft()
        self._waiting.handed_out(count)
        self._waiting.whole = False
        return data

    def _take(self, found: Any, outcome: Outcome, worker: int | None) -> None:
        if outcome.short is None:
            self._ready.append((found, 0))
            self._waiting.whole = True
            return
        self._waiting.samples.extend((worker, index) for index in outcome.short)
        samples = map(_own, found) if self._copies else found
        batch = self._refill.add(zip(outcome.short, samples, strict=False), outcome.wanted)
        if batch is not None:
            self._collate(batch)

    def _collate(self, batch: list[tuple[Any, Any]]) -> None:
        try:
            data = self._collate_fn([sample for _, sample in batch])
        except Exception as error:
            self._waiting.handed_out(len(batch))
            if self._budget is None:
                raise
            failure = Failure(foreign(error))
            failures = [FailureRecord(index, n, failure) for n, (index, _) in enumerate(batch)]
            self._budget.count(0, failures, None)  # attempts were counted before, one by one
            return
        self._ready.append((data, len(batch)))


def _own(sample: Any) -> Any:
    """Copy `sample`: it may wait until the end of the epoch, and the worker needs its slots."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # it keeps its slot, and the worker uses another one
        return sample
