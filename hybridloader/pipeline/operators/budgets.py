"""Batches by a budget, such as a number of tokens, instead of by a number of items.

The order of the items is never changed. What an item costs is computed once, in the thread that
pulls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hybridloader._support import arguments
from hybridloader._support.arguments import is_number
from hybridloader._support.attributes import attribute
from hybridloader._support.caller import warn
from hybridloader._support.errors import no_stop
from hybridloader._support.text import short
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory
from hybridloader.pipeline.operators.base import INFINITE, Context, Length, Operator
from hybridloader.pipeline.operators.collating import SIZE, CollateFn, Collating, check_collation
from hybridloader.pipeline.operators.iterators import OperatorIterator
from hybridloader.pipeline.operators.parameters import check_flags, settle_whole


@dataclass(frozen=True)
class BatchBy(Operator):
    """Batches of as many items, in order, as a budget has room for.

    A batch is given when the next item would not fit, so one item is held back.

    Parameters
    ----------
    cost
        Function from an item to its cost, a number from 0 up, such as ``len`` for tokens.
    budget
        The most that a batch may cost.
    drop_last
        True drops the items that are left at the end.
    padded
        True if a batch costs as if all its items cost as much as the dearest, as it is with
        sequences that are padded to the longest. Else it costs the sum.
    max_size
        Items in a batch at most.
    collate_fn, memory
        See `Batch`; ``Pad()`` pads.
    oversize
        Treatment of an item that alone costs more than `budget`: ``"raise"`` a `ValueError` that names
        it; ``"skip"`` it, which is counted as `skipped` and told in one warning; or give it
        ``"alone"``, in a batch of its own. `TokenBudgetBatchSampler` has the same words.
    """

    cost: Callable[[Any], Any]
    budget: float
    drop_last: bool = False
    padded: bool = False
    max_size: int | None = None
    collate_fn: CollateFn | None = None
    oversize: str = "raise"
    memory: Memory = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        what = "a function from an item to a number (len, say)"
        arguments.function(f"{self.name}: cost", self.cost, what)
        if not is_number(self.budget):
            raise TypeError(f"{self.name}: budget must be a number, not {short(self.budget)}")
        if not 0 < self.budget < math.inf:
            raise ValueError(
                f"{self.name}: budget must be above 0 and finite, not {self.budget}; give what the "
                "items of a batch may cost together"
            )
        check_flags(self, "drop_last", "padded")
        settle_whole(self, "max_size", 1, SIZE, optional=True)
        arguments.one_of(f"{self.name}: oversize", self.oversize, ("raise", "skip", "alone"))
        check_collation(self, self.collate_fn, self.memory)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return BatchByIterator(items, self, Collating(self.collate_fn, self.memory, context.locks))

    def length(self, upstream: Length) -> Length:
        return upstream if upstream in (0, INFINITE) else None


class BatchByIterator(OperatorIterator):
    """Iterator of `BatchBy`; `skipped` counts the items that alone cost more than the budget."""

    def __init__(
        self, items: Iterator[Any], rules: BatchBy, collate: Callable[[list[Any]], Any]
    ) -> None:
        super().__init__(items)
        self._rules, self._collate = rules, collate
        # All the mutable state:
        self.skipped = 0
        self._batch: list[Any] = []
        self._spent: Any = 0  # the sum of its costs, or the largest of them if it will be padded
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        rules, batch, pull = self._rules, self._batch, self._pull
        budget, padded, price = rules.budget, rules.padded, rules.cost
        while True:
            try:
                item = pull()
            except StopIteration:
                self._ended, self._batch = True, []
                if not batch or rules.drop_last:
                    raise
                return self._collate(batch)
            try:
                cost = price(item)
            except StopIteration as error:
                raise no_stop(error, "batch_by: cost") from error
            if type(cost) is not int or cost < 0:
                cost = _number(cost, item)
            if cost > budget and not self._takes(item, cost):
                continue
            if padded:
                spent = cost if cost > self._spent else self._spent
                fits = spent * (len(batch) + 1) <= budget
            else:
                spent = self._spent + cost
                fits = spent <= budget
            if batch and not fits:
                self._batch, self._spent = [item], cost
                return self._collate(batch)
            batch.append(item)
            self._spent = spent
            if len(batch) == rules.max_size:
                self._batch, self._spent = [], 0
                return self._collate(batch)

    def _takes(self, item: Any, cost: Any) -> bool:
        """Tell whether an item that no batch has room for is taken all the same."""
        rules = self._rules
        if rules.oversize == "alone":
            return True
        if rules.oversize == "raise":
            raise ValueError(
                f"batch_by: an item costs {cost}, more than budget={rules.budget}: {short(item)}; raise "
                "the budget, or say oversize='skip' or oversize='alone'"
            )
        self.skipped += 1
        if self.skipped == 1:
            warn(
                f"batch_by skips items that cost more than budget={rules.budget}; the first costs "
                f"{cost}: {short(item)}. The iterator counts them: `skipped`",
            )
        return False

    def close(self) -> None:
        self._ended, self._batch = True, []
        super().close()


def _number(cost: Any, item: Any) -> Any:
    """Return a cost as a number; also one in a tensor or array of no dimension."""
    if not is_number(cost) and attribute(cost, "ndim") == 0:
        cost = cost.item()
    if not is_number(cost):
        raise TypeError(
            f"batch_by: cost must give a number, not {short(cost)}, for the item {short(item)}"
        )
    if not cost >= 0:
        raise ValueError(
            f"batch_by: cost must give a number from 0 up, not {cost}, for the item {short(item)}"
        )
    return cost
