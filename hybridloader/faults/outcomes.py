"""What becomes of an item of a pipeline that fails: what stands in its place until it is handed out.

An item whose function raises spoils neither its task nor its neighbours. Nothing is decided here: what
is `Bad` is raised or skipped where results are handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridloader.errors import Failure, no_stop
from hybridloader.faults.tried import Miss
from hybridloader.shown import brief


class Bad:
    """An exception in the place of what an item would have given.

    Attributes
    ----------
    failure
        The exception on its way.
    item
        The item, in short.
    index
        The item, if it is a number or a text; else None.
    """

    __slots__ = ("failure", "index", "item")

    def __init__(self, failure: Failure, item: str, index: Any = None) -> None:
        self.failure, self.item, self.index = failure, item, index

    def __reduce__(self) -> Any:
        return Bad, (self.failure, self.item, self.index)

    def miss(self) -> Miss:
        """As what was left out."""
        return Miss(self.item if self.index is None else self.index, 0, self.failure)


class Damaged:
    """The results of a task, some of them `Bad` or `Noted`. No list, so nobody takes it for whole."""

    __slots__ = ("outcomes",)

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes = outcomes

    def __reduce__(self) -> Any:
        return Damaged, (self.outcomes,)


class Noted:
    """Among the outcomes of a task: no item, only what is to be counted.

    Attributes
    ----------
    tried
        Samples, those of `misses` among them.
    misses
        Those that were left out or replaced.
    """

    __slots__ = ("misses", "tried")

    def __init__(self, tried: int, misses: Sequence[Miss]) -> None:
        self.tried, self.misses = tried, misses

    def __reduce__(self) -> Any:
        return Noted, (self.tried, self.misses)


def whole_or_damaged(results: list[Any]) -> Any:
    """The results of a task, told apart if some are no items."""
    odd = any(type(result) in (Bad, Noted) for result in results)
    return Damaged(results) if odd else results


def bad(error: Exception, item: Any, number: int | None = None) -> Bad:
    """What takes the place of the results of `item`, which is known by a number if it is none itself."""
    index = item if type(item) in (int, str) and number is None else number
    error = no_stop(error, "a function of a pipeline")
    return Bad(Failure(error), brief(item), index)


def mended(value: Any, check: Callable[[Any], Any]) -> Damaged:
    """The results of a task of which some can't be sent, which `check` tells by raising."""
    results = []
    for outcome in value.outcomes if type(value) is Damaged else value:
        try:
            check(outcome)
        except Exception as error:
            outcome = bad(error, outcome)
        results.append(outcome)
    return Damaged(results)
