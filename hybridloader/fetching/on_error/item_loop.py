"""Loop over the items of a task, in the worker: each goes through functions that may fail.

A good item costs the calls of its functions. One that fails is retried, replaced or given up as the
policy says, and then goes on behind the function that failed, as if each were a stage of its own. The
results of an item before its failure stay, except where it is retried or replaced: all or nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from hybridloader.engine.fetcher import Abandoned, GivenUp, TaskContext
from hybridloader.fetching.on_error.error_handler import ErrorHandler
from hybridloader.fetching.on_error.task_results import TaskResults
from hybridloader.fetching.outcome import Note
from hybridloader.fetching.samples import Spread, numbered

Opened = list[tuple[str, Callable[[Any], Any]]]
"""Kinds of steps, and their functions as one worker calls them."""


class ItemLoop:
    """Takes items through steps, in one worker.

    Besides the kinds of `Step` there is ``"batch"``: its function returns an `Attempt`.
    """

    def __init__(
        self,
        opened: Opened,
        handler: ErrorHandler,
        context: TaskContext,  # its `cancelled` is looked at after every item
        spread: Spread | None = None,  # None: items are taken one after the other
        *,
        # Called first with each element of a task, on the thread that works on it; returns the item:
        enter: Callable[[Any], Any] | None = None,
        batch: bool = False,  # the results make one batch; see `TaskResults`
    ) -> None:
        self._context, self._spread, self._enter = context, spread, enter
        self.new_results = partial(TaskResults, handler, batch=batch)
        self._steps = [
            (
                kind,
                partial(self._at_once, function)
                if kind == "flat_map" and handler.acts
                else function,
            )
            for kind, function in opened
        ]
        self._maps: list[tuple[int, Callable[[Any], Any]]] = []  # and the step behind each
        if all(kind == "map" for kind, _ in opened):
            self._maps = [(at, function) for at, (_, function) in enumerate(opened, 1)]

    def run(self, items: Iterable[Any], *, spared: bool = False) -> TaskResults:
        """Take the items of a task through the steps; with `spared`, some may be `GivenUp`."""
        if self._spread is not None:
            return self.joined(self._spread(self.alone, items))
        results, context, maps = self.new_results(), self._context, self._maps
        if self._enter is not None:
            items = map(self._enter, items)
        if context.tracked:
            items = numbered(items, context)
        if spared or not maps:
            through = self._begin if spared else self._through
            for item in items:
                through(item, results)
                results.end_item()
                if context.cancelled:
                    raise Abandoned
            return results
        values, (begin, first), more = results.values, maps[0], maps[1:]
        for item in items:  # maps only, with no call of ours for an item
            at = begin
            try:
                item = first(item)
                if more:
                    for at, function in more:  # noqa: B007  # told if it fails
                        item = function(item)
                values.append(item)
            except Exception as raised:
                error = raised
            else:
                if context.cancelled:
                    raise Abandoned
                continue
            results.end_items()
            try:  # outside of the clause above, so that further errors have no context
                self.failed(item, error, results, at)
            finally:
                del error
            results.end_item()
            if context.cancelled:
                raise Abandoned
        return results

    def joined(self, parts: Iterable[TaskResults]) -> TaskResults:
        """Return the results of a task whose items went `alone`."""
        results = self.new_results()
        for part in parts:
            results.extend(part)
            results.end_item()
        return results

    def alone(self, item: Any) -> TaskResults:
        """Take one item through the steps. On any thread."""
        results = self.new_results()
        self._begin(item if self._enter is None else self._enter(item), results)
        return results

    def _begin(self, item: Any, results: TaskResults) -> None:
        if type(item) is GivenUp:
            self.failed(item, item.error(), results)
        else:
            self._through(item, results)

    def failed(self, item: Any, error: Exception, results: TaskResults, at: int = 1) -> None:
        """Go on with `item`, at which the function before step number `at` has raised `error`."""
        kind, function = self._steps[at - 1]
        try:
            if kind == "batch" and type(item) is not GivenUp:  # its samples have been retried
                results.add_failure(item, error)
                return
            index = item.index if type(item) is GivenUp else item
            found = results.rescue(partial(_outputs, kind, function), item, index, error)
            self._each(item, iter(found), at, results)
        finally:
            del error

    def _through(self, item: Any, results: TaskResults, at: int = 0) -> None:
        """Take `item` through the steps from number `at` on, and add the outcome to `results`."""
        several: Iterator[Any]
        while at < len(self._steps):
            kind, function = self._steps[at]
            at += 1
            try:
                found = function(item)
                if kind == "map":
                    item = found
                elif kind == "batch":
                    item, outcome = found
                    whole = outcome.short is None  # it counts as one itself
                    note = Note(len(results.values), outcome.attempted - whole, outcome.failures)
                    results.notes.append(note)
                    if not whole:
                        return
                elif kind == "flat_map":
                    several = iter(found)
                elif not found:
                    return
            except Exception as raised:
                error = raised
            else:
                if kind == "flat_map":
                    self._each(item, several, at, results)
                    return
                continue
            try:  # outside of the clause above, as in `run`
                self.failed(item, error, results, at)
            finally:
                del error
            return
        results.values.append(item)

    def _each(self, item: Any, several: Iterator[Any], at: int, results: TaskResults) -> None:
        """Take each of the values that a function gave for `item` on, until one raises."""
        while not self._context.cancelled:
            try:
                one = next(several)
            except StopIteration:
                return
            except Exception as error:
                results.add_failure(item, error)
                return
            self._through(one, results, at)

    def _at_once(self, function: Callable[[Any], Any], item: Any) -> list[Any]:
        """Return all values that `function` gives for an item, so that no value is given twice."""
        found = []
        for one in function(item):
            found.append(one)
            if self._context.cancelled:
                raise Abandoned
        return found


def _outputs(kind: str, function: Callable[[Any], Any], item: Any) -> Iterable[Any]:
    """Return the values that a step gives for an item."""
    found = function(item)
    if kind == "flat_map":
        several: Iterable[Any] = found
        return several
    return (found,) if kind == "map" else (item,) if found else ()
