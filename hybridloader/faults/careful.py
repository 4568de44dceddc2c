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
from hybridloader.faults.outcomes import Noted, bad, whole_or_damaged
from hybridloader.faults.tried import Tried
from hybridloader.fetch import Abandoned, Fetcher, Flag, GivenUp, numbered

Opened = list[tuple[str, Callable[[Any], Any]]]
"""Kinds of steps, and their functions as one worker calls them."""


class Careful:
    """The steps of a stage, for one worker.

    Parameters
    ----------
    opened
        Besides the kinds of `Step` there is ``"batch"``: its function gives `Tried` or `Short`.
    guard
        Around each call.
    cancelled
        Looked at after every item.

    Attributes
    ----------
    needed
        Whether this does anything that the short ways do not.
    """

    def __init__(self, opened: Opened, guard: Guard, cancelled: Flag) -> None:
        self.needed = guard.acts or any(kind == "batch" for kind, _ in opened)
        self._guard, self._cancelled = guard, cancelled
        self._opened = [
            (kind, self._at_once(function) if kind == "flat_map" and guard.acts else function)
            for kind, function in opened
        ]

    def __call__(self, items: list[Any]) -> Any:
        cancelled = self._cancelled
        results: list[Any] = []
        for item in numbered(items, cancelled) if cancelled.notes else items:
            self._pass(item, 0, results)
            if cancelled.up:
                raise Abandoned
        return whole_or_damaged(results)

    def spread(self, threads: int) -> Fetcher:
        """The same, the items of a task shared out to threads."""
        fanout = fanout_of_this_thread(threads)

        def work(items: list[Any]) -> Any:
            found = fanout.map(self.alone, items, self._cancelled)
            return whole_or_damaged(list(chain.from_iterable(found)))

        return work

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
                if self._cancelled.up:
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
                whole = type(found) is Tried
                results.append(Noted(found.tried - whole, found.misses))  # it counts as one itself
                if not whole:
                    return
                item = found.data
            else:
                item = found
        else:
            results.append(item)
            return
        while not self._cancelled.up:
            try:
                one = next(several)
            except StopIteration:
                return
            except Exception as error:
                results.append(bad(error, name))
                return
            self._pass(one, at, results)
