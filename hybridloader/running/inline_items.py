"""Functions of a pipeline that are called where their results are asked for.

No worker takes part, so a function's error is raised at once, or left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

from hybridloader._support.attributes import close
from hybridloader._support.error_handling import counts_as_item, keeps_number, no_answer
from hybridloader.engine.fetcher import Abandoned, FollowingContext, TaskContext
from hybridloader.engine.meter import TaskParts
from hybridloader.errors import IteratorClosed
from hybridloader.fetching.item_steps import Step
from hybridloader.fetching.on_error.error_budget import ErrorBudget
from hybridloader.fetching.on_error.item_loop import ItemLoop, TaskResults, seeded
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.on_error.result_queue import ResultQueue
from hybridloader.running.ledger import ONE_EACH, Counts, Ledger
from hybridloader.running.operator import OperatorIterator
from hybridloader.seeding.sample_rng import SampleRng, item_key, numbered_item


class InlineItems(OperatorIterator):
    """Results of a function that is called where they are asked for; its `coroutines`, if it is async.

    `left` is cancelled when the run is left, so that a filter that keeps nothing ends.
    """

    coroutines: Any = None

    def __init__(
        self,
        items: Iterator[Any],
        step: Step,
        stage: str,
        left: TaskContext,
        rng: SampleRng | None = None,
        policy: Policy | None = None,
        budget: ErrorBudget | None = None,
        *,
        numbered: bool = False,  # items that are not needed again come as errors that have a number
    ) -> None:
        super().__init__(items)
        self._stage, self._left, self._budget = stage, left, budget
        self._rng = rng  # kept: letting it go ends the seeding
        self.context = context = FollowingContext(left, rng)  # counts what was retried
        if rng is not None:
            # The item first: where there is none, no number is used up.
            numbers = count(rng.first_item)
            pairs: Iterator[Any] = zip(items, numbers, strict=False)
            if numbered:
                pairs = _Pairs(items, numbers)
            self._pull = map(numbered_item, pairs).__next__
            policy = seeded(policy, rng, item_key)
        if context.parts is not None:  # observed: time each function separately
            context.parts = TaskParts() if step.concurrency else None
        opened = step.open(context, policy, of_worker=False)
        self._loop = ItemLoop([opened], policy, context)
        self._kind, self._function = opened
        if step.concurrency:
            self.coroutines: Any = opened[1]
            self._pull = partial(_next_ended, self.coroutines.through(items), stage)
        # A function may return a long or endless iterable, so it is read item by item.
        if self._kind == "batch" or (self._kind == "flat_map" and self._loop.acts):
            self._kind, self._function = "results", self._loop.alone
        self._plain = self._kind == "map" and budget is None
        # All the mutable state: further results of the last item.
        self._several: Iterator[Any] | None = None
        self._item: Any = None  # that these are made of
        self._told = False
        self._queue = ResultQueue(
            budget, lambda item, _: f"In stage {stage!r}, the calling thread, working on {item}."
        )

    def __next__(self) -> Any:
        while True:
            if self._several is not None:
                try:
                    found = next(self._several)
                    if self._budget is not None:
                        self._budget.count(1, (), None)
                    return found
                except StopIteration:
                    self._several = None
                except Exception as raised:
                    self._several, results = None, TaskResults()
                    self._loop.note(self._item, raised, results)
                    self._hand_out(results)
            if self._told:
                for found in self._queue:
                    return found
                self._told = False
            if self._left.cancelled:
                raise _closed(self._stage)
            item = self._pull()
            error: Exception | None = None
            try:
                found = self._function(item)
                if self._plain:
                    return found
                if self._kind == "results":
                    self._hand_out(found)
                    continue
                if self._kind == "flat_map":
                    self._several, self._item = iter(found), item
                    continue
                if self._kind == "filter":
                    if not found:
                        continue
                    found = item
            except Abandoned:
                continue  # `left` is cancelled
            except Exception as raised:
                error = raised
            if error is None:
                if self._budget is not None:
                    self._budget.count(1, (), None)
                return found
            try:
                results = TaskResults()
                self._loop.failed(item, error, results)
                self._hand_out(results)
            except Abandoned:
                pass  # as above
            finally:
                del error

    def log(self, ledger: Ledger, counts: Counts) -> None:
        """Note in `ledger` each item that is taken, and the number of results that it may have."""
        pull = self._pull

        def logged() -> Any:
            try:
                item = pull()
            except Exception as error:
                if counts_as_item(error) and not isinstance(error, StopIteration):
                    ledger.pulled(ONE_EACH)
                raise
            ledger.pulled(counts)
            return item

        self._pull = logged

    def _hand_out(self, results: TaskResults) -> None:
        self._queue.add(results.values, results.notes)
        self._told = True

    def close(self) -> None:
        if self.coroutines is not None:
            self.coroutines.close()
        close(self._items)


class _Pairs(Iterator[Any]):
    """Pairs of an item and its number, which an item that is not needed again has, too."""

    def __init__(self, items: Iterator[Any], numbers: Iterator[int]) -> None:
        self._items, self._numbers = items, numbers

    def __next__(self) -> tuple[Any, int]:
        try:
            return next(self._items), next(self._numbers)
        except Exception as error:
            if keeps_number(error):
                next(self._numbers)
            raise


class LoggedItems(OperatorIterator):
    """Items of functions that may give none or several for one, counted in a ledger."""

    def __init__(self, items: Iterator[Any], ledger: Ledger) -> None:
        super().__init__(items)
        self._ledger = ledger

    def __next__(self) -> Any:
        try:
            found = self._pull()
        except Exception as error:
            self._ledger.given += counts_as_item(error) and not isinstance(error, StopIteration)
            raise
        self._ledger.given += 1
        return found

    def close(self) -> None:
        close(self._items)


def _next_ended(items: Iterator[Any], stage: str) -> Any:
    """Return the next item whose coroutine has ended."""
    try:
        return next(items)
    except Abandoned:
        raise _closed(stage) from None


def _closed(stage: str) -> IteratorClosed:
    return no_answer(IteratorClosed(f"the iterator of stage {stage!r} is closed"))
