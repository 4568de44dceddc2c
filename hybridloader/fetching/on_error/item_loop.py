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
from hybridloader.fetching.on_error.error_handler import Guard
from hybridloader.fetching.on_error.task_results import Tally
from hybridloader.fetching.outcome import Note

Opened = list[tuple[str, Callable[[Any], Any]]]
"""Kinds of steps, and their functions as one worker calls them."""


class ItemLoop:
    """The steps of a piece of work, for one worker.

    Parameters
    ----------
    opened
        Besides the kinds of `Step` there is ``"batch"``: its function gives an `Attempt`.
    guard
        Of what fails.
    context
        Looked at after every item.
    spread
        Shares items out to threads; None: one after the other.
    enter
        Called first with what stands for an item, on the thread that is to work on it; returns the item.
    batch
        Whether the results make one batch; see `Tally`.
    """

    def __init__(
        self,
        opened: Opened,
        guard: Guard,
        context: TaskContext,
        spread: Spread | None = None,
        *,
        enter: Callable[[Any], Any] | None = None,
        batch: bool = False,
    ) -> None:
        self._guard, self._context, self._spread, self._batch = guard, context, spread, batch
        self._steps = [
            (
                kind,
                partial(self._at_once, function) if kind == "flat_map" and guard.acts else function,
            )
            for kind, function in opened
        ]
        self._enter = enter
        self._maps: list[tuple[int, Callable[[Any], Any]]] = []  # and the step behind each
        if all(kind == "map" for kind, _ in opened):
            self._maps = [(at, function) for at, (_, function) in enumerate(opened, 1)]

    def run(self, items: Iterable[Any], *, spared: bool = False) -> Tally:
        """Take the items of a task through the steps.

        Parameters
        ----------
        spared
            Whether some may be `GivenUp`.
        """
        tally, context, maps = self.tally(), self._context, self._maps
        if self._spread is not None:
            for part in self._spread(self.alone, items):
                tally.extend(part.results, part.notes)
            return tally
        if self._enter is not None:
            items = map(self._enter, items)
        if context.tracked:
            items = numbered(items, context)
        if spared or not maps:
            through = self._begin if spared else self._through
            for item in items:
                through(item, 0, tally)
                if context.cancelled:
                    raise Abandoned
            return tally
        results, (begin, first), more = tally.results, maps[0], maps[1:]
        for item in items:  # the same, as short as can be
            at = begin
            try:
                item = first(item)
                if more:
                    for at, function in more:  # noqa: B007  # told if it fails
                        item = function(item)
                results.append(item)
            except Exception as raised:
                error = raised
            else:
                if context.cancelled:
                    raise Abandoned
                continue
            try:  # outside of the clause above, so that further errors have no context
                self.failed(item, error, tally, at)
            finally:
                del error
            if context.cancelled:
                raise Abandoned
        return tally

    def tally(self) -> Tally:
        """Make an empty one."""
        return Tally(self._guard, batch=self._batch)

    def alone(self, item: Any) -> Tally:
        """Take one item through the steps. On any thread."""
        tally = self.tally()
        self._begin(item if self._enter is None else self._enter(item), 0, tally)
        return tally

    def _begin(self, item: Any, at: int, tally: Tally) -> None:
        if type(item) is GivenUp:
            self.failed(item, item.error(), tally, at + 1)
        else:
            self._through(item, at, tally)

    def failed(self, item: Any, error: Exception, tally: Tally, at: int = 1) -> None:
        """Go on with `item`, at which the function before step number `at` has raised `error`."""
        try:
            self._each(item, iter(self._rescued(item, error, tally, at)), at, tally)
        finally:
            del error

    def _rescued(self, item: Any, error: Exception, tally: Tally, at: int) -> Iterable[Any]:
        """Return what the step gives after all."""
        kind, function = self._steps[at - 1]
        index = item.index if type(item) is GivenUp else item
        try:
            if kind == "batch" and index is item:  # its samples have been tried again already
                tally.lose(item, error)
                return ()
            return tally.rescue(partial(_outputs, kind, function), item, index, error)
        finally:
            del error

    def _through(self, item: Any, at: int, tally: Tally) -> None:
        """Take `item` through the steps from number `at` on; what comes out is added to `tally`."""
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
                    note = Note(len(tally.results), outcome.tried - whole, outcome.misses)
                    tally.notes.append(note)
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
            tally.results.append(item)
            return
        if several is not None:
            self._each(item, several, at, tally)
            return
        try:
            assert error is not None
            self.failed(item, error, tally, at)
        finally:
            del error

    def _each(self, item: Any, several: Iterator[Any], at: int, tally: Tally) -> None:
        """Take on what a function gave for `item`, as far as it comes."""
        while not self._context.cancelled:
            try:
                one = next(several)
            except StopIteration:
                return
            except Exception as error:
                tally.lose(item, error)
                return
            self._through(one, at, tally)

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
