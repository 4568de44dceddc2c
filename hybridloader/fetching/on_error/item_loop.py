"""The loop over the items of a task, in the worker: each through functions that may fail.

A good item costs the calls of its functions. One that fails is tried again, replaced or given up as the
policy says, and then goes on behind the function that failed, as if each were a stage of its own. What
an item gave before it failed stays, except where it is tried again or replaced: all or nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from hybridloader.engine.fetcher import Abandoned, GivenUp, TaskContext
from hybridloader.fetching.fetch import Spread, numbered
from hybridloader.fetching.on_error.error_handler import ErrorHandler
from hybridloader.fetching.on_error.task_results import TaskResults
from hybridloader.fetching.outcome import Note

Opened = list[tuple[str, Callable[[Any], Any]]]
"""Kinds of steps, and their functions as one worker calls them."""


class ItemLoop:
    """The steps of a piece of work, for one worker.

    Parameters
    ----------
    opened
        Besides the kinds of `Step` there is ``"batch"``: its function gives an `Attempt`.
    handler
        Of what fails.
    context
        Looked at after every item.
    spread
        Shares items out to threads; None: one after the other.
    enter
        Called first with what stands for an item, on the thread that is to work on it; returns the item.
    batch
        Whether the results make one batch; see `TaskResults`.
    """

    def __init__(
        self,
        opened: Opened,
        handler: ErrorHandler,
        context: TaskContext,
        spread: Spread | None = None,
        *,
        enter: Callable[[Any], Any] | None = None,
        batch: bool = False,
    ) -> None:
        self._handler, self._context, self._spread, self._batch = handler, context, spread, batch
        self._steps = [
            (
                kind,
                partial(self._at_once, function)
                if kind == "flat_map" and handler.acts
                else function,
            )
            for kind, function in opened
        ]
        self._enter = enter
        self._maps: list[tuple[int, Callable[[Any], Any]]] = []  # and the step behind each
        if all(kind == "map" for kind, _ in opened):
            self._maps = [(at, function) for at, (_, function) in enumerate(opened, 1)]

    def run(self, items: Iterable[Any], *, spared: bool = False) -> TaskResults:
        """Take the items of a task through the steps.

        Parameters
        ----------
        spared
            Whether some may be `GivenUp`.
        """
        results, context, maps = self.new_results(), self._context, self._maps
        if self._spread is not None:
            for part in self._spread(self.alone, items):
                results.extend(part.values, part.notes)
            return results
        if self._enter is not None:
            items = map(self._enter, items)
        if context.tracked:
            items = numbered(items, context)
        if spared or not maps:
            through = self._begin if spared else self._through
            for item in items:
                through(item, 0, results)
                if context.cancelled:
                    raise Abandoned
            return results
        values, (begin, first), more = results.values, maps[0], maps[1:]
        for item in items:  # the same, as short as can be
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
            try:  # outside of the clause above, so that further errors have no context
                self.failed(item, error, results, at)
            finally:
                del error
            if context.cancelled:
                raise Abandoned
        return results

    def new_results(self) -> TaskResults:
        """Make an empty one."""
        return TaskResults(self._handler, batch=self._batch)

    def alone(self, item: Any) -> TaskResults:
        """Take one item through the steps. On any thread."""
        results = self.new_results()
        self._begin(item if self._enter is None else self._enter(item), 0, results)
        return results

    def _begin(self, item: Any, at: int, results: TaskResults) -> None:
        if type(item) is GivenUp:
            self.failed(item, item.error(), results, at + 1)
        else:
            self._through(item, at, results)

    def failed(self, item: Any, error: Exception, results: TaskResults, at: int = 1) -> None:
        """Go on with `item`, at which the function before step number `at` has raised `error`."""
        try:
            self._each(item, iter(self._rescued(item, error, results, at)), at, results)
        finally:
            del error

    def _rescued(self, item: Any, error: Exception, results: TaskResults, at: int) -> Iterable[Any]:
        """Return what the step gives after all."""
        kind, function = self._steps[at - 1]
        index = item.index if type(item) is GivenUp else item
        try:
            if kind == "batch" and index is item:  # its samples have been tried again already
                results.add_failure(item, error)
                return ()
            return results.rescue(partial(_outputs, kind, function), item, index, error)
        finally:
            del error

    def _through(self, item: Any, at: int, results: TaskResults) -> None:
        """Take `item` through the steps from number `at` on; what comes out is added to `results`."""
        several: Iterator[Any] | None = None
        error: Exception | None = None
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
                    break
                elif not found:
                    return
            except Exception as raised:
                error = raised
                break
        else:
            results.values.append(item)
            return
        if several is not None:
            self._each(item, several, at, results)
            return
        try:
            assert error is not None
            self.failed(item, error, results, at)
        finally:
            del error

    def _each(self, item: Any, several: Iterator[Any], at: int, results: TaskResults) -> None:
        """Take on what a function gave for `item`, as far as it comes."""
        while not self._context.cancelled:
            try:
                one = next(several)
            except StopIteration:
                return
            except Exception as error:
                results.add_failure(item, error)
                return
            self._through(one, at, results)

    def _at_once(self, function: Callable[[Any], Any], item: Any) -> list[Any]:
        """All that `function` gives for an item, so that nothing is given twice."""
        found = []
        for one in function(item):
            found.append(one)
            if self._context.cancelled:
                raise Abandoned
        return found


def _outputs(kind: str, function: Callable[[Any], Any], item: Any) -> Iterable[Any]:
    """Return what a step gives for an item."""
    found = function(item)
    if kind == "flat_map":
        several: Iterable[Any] = found
        return several
    return (found,) if kind == "map" else (item,) if found else ()
