"""The work of a stage where items may be tried again, replaced or given up: one after the other.

The same as the short ways in `work`, with a guard around every call of a user's function. What an item
gave before it failed stays, except where it is tried again or replaced: then it is all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from hybridloader.fanout import fanout_of_this_thread
from hybridloader.faults.guard import Guard, Swapped
from hybridloader.faults.outcomes import Noted, bad, mended, whole_or_damaged
from hybridloader.fetch import GivenUp, numbered
from hybridloader.fetcher import Abandoned, Fetcher, TaskContext

Opened = list[tuple[str, Callable[[Any], Any]]]
"""Kinds of steps, and their functions as one worker calls them."""


class Careful(Fetcher):
    """The steps of a stage, for one worker.

    Parameters
    ----------
    opened
        Besides the kinds of `Step` there is ``"batch"``: its function gives an `Attempt`.
    guard
        Around each call.
    context
        Looked at after every item.

    Attributes
    ----------
    needed
        Whether this does anything that the short ways do not.
    """

    def __init__(self, opened: Opened, guard: Guard, context: TaskContext) -> None:
        self.needed = guard.acts or any(kind == "batch" for kind, _ in opened)
        self._guard, self._context = guard, context
        self._opened = [
            (kind, self._at_once(function) if kind == "flat_map" and guard.acts else function)
            for kind, function in opened
        ]

    def fetch(self, items: list[Any]) -> Any:
        context = self._context
        results: list[Any] = []
        for item in numbered(items, context) if context.tracked else items:
            self._pass(item, 0, results)
            if context.cancelled:
                raise Abandoned
        return whole_or_damaged(results)

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Leave out the results that can't be sent; see `Fetcher.mend`."""
        return mended(value, check)

    def alone(self, item: Any) -> list[Any]:
        """The outcomes of one item."""
        results: list[Any] = []
        self._pass(item, 0, results)
        return results

    def _at_once(self, function: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
        """All that `function` gives for an item, so that nothing is given twice."""

        def collect(item: Any) -> list[Any]:
            found = []
            for one in function(item):
                found.append(one)
                if self._context.cancelled:
                    raise Abandoned
            return found

        return collect

    def _pass(self, item: Any, at: int, results: list[Any]) -> None:
        """Take `item` through the steps from number `at` on; what comes out is added to `results`.

        An exception takes the place of what that one step would have given, and so does a
        replacement: what other steps made of other items stays, as if each were a stage of its own.
        """
        while at < len(self._opened):
            kind, function = self._opened[at]
            at += 1
            name = item.index if type(item) is GivenUp else item
            try:
                if type(item) is GivenUp or (kind != "batch" and self._guard.acts):
                    found = self._guard(function, item)
                else:
                    found = function(item)
                if kind == "flat_map" and type(found) is not Swapped:
                    several = iter(found)
                    break
                if kind == "filter" and type(found) is not Swapped:
                    if not found:
                        return
                    continue
            except Exception as error:
                results.append(bad(error, name))
                return
            if type(found) is Swapped:
                miss = bad(found.error, name).miss()
                results.append(Noted(0, [miss._replace(replaced=True)]))
                item = found.value
            elif kind == "batch":
                item, outcome = found
                whole = outcome.short is None
                results.append(
                    Noted(outcome.tried - whole, outcome.misses)
                )  # it counts as one itself
                if not whole:
                    return
            else:
                item = found
        else:
            results.append(item)
            return
        while not self._context.cancelled:
            try:
                one = next(several)
            except StopIteration:
                return
            except Exception as error:
                results.append(bad(error, name))
                return
            self._pass(one, at, results)


class SpreadCareful(Fetcher):
    """The same, the items of a task shared out to threads."""

    def __init__(self, careful: Careful, threads: int, context: TaskContext) -> None:
        self._careful, self._context = careful, context
        self._fanout = fanout_of_this_thread(threads)

    def fetch(self, items: list[Any]) -> Any:
        found = self._fanout.map(self._careful.alone, items, self._context)
        return whole_or_damaged(list(chain.from_iterable(found)))

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Leave out the results that can't be sent; see `Fetcher.mend`."""
        return mended(value, check)
