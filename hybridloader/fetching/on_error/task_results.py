"""Good results of one task in a list, and beside it a note on each sample that has failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hybridloader._support.errors import Failure, no_stop
from hybridloader._support.text import brief
from hybridloader.engine.fetcher import Fetcher, GivenUp, TaskContext
from hybridloader.fetching.on_error.error_handler import ErrorHandler
from hybridloader.fetching.outcome import FailureRecord, Note


class TaskResults:
    """Results of one task as they come, and notes on what does not.

    Parameters
    ----------
    handler
        Tries again, or replaces.
    batch
        Whether the results make one batch: what can't be helped is raised, unless it is to be left out.
        Else it is noted, to be raised or left out in its place when the others are handed out.
    what
        What every item is called; None: by itself.

    Attributes
    ----------
    values, notes
        Until now.
    """

    __slots__ = ("_batch", "_handler", "_what", "notes", "values")

    def __init__(
        self, handler: ErrorHandler, *, batch: bool = False, what: str | None = None
    ) -> None:
        self._handler, self._batch, self._what = handler, batch, what
        self.values: list[Any] = []
        self.notes: list[Note] = []

    @property
    def failures(self) -> list[FailureRecord]:
        """Failures, in order."""
        return [failed for note in self.notes for failed in note.failures]

    def rescue(
        self,
        function: Callable[[Any], Iterable[Any]],
        argument: Any,
        index: Any,
        error: Exception,
    ) -> Iterable[Any]:
        """Return what ``function(argument)``, which has raised `error`, gives after all.

        Parameters
        ----------
        function
            Gives several values.
        index
            What `argument` is known by.
        """
        if not self._batch:
            error = no_stop(error, "a function of a pipeline")
        try:
            found, replaced = self._handler.rescue(function, argument, index, no_stop(error))
        except Exception as last:
            if self._batch and not self._handler.skips:
                raise
            self.add_failure(index, last)
            return ()
        finally:
            del error
        if replaced is None:
            several: Iterable[Any] = found
            return several
        self.add_failure(index, replaced, replaced=True)
        return (found,)

    def add_failure(self, index: Any, error: Exception, *, replaced: bool = False) -> None:
        """Note that the result of `index` can't be had, or that another was put in its place."""
        place, item = len(self.values), None
        if type(index) is GivenUp:
            index = index.index
        if not self._batch:
            error = no_stop(error, "a function of a pipeline")
            shown = brief(index if self._what is None else self._what)
            index = index if type(index) in (int, str) else shown
            item = None if replaced else shown
        failed = FailureRecord(index, place, Failure(error), replaced)
        self.notes.append(Note(place, 0 if replaced else 1, [failed], item))

    def extend(self, results: Iterable[Any], notes: Iterable[Note]) -> None:
        """Take in results that follow, and the notes on them."""
        before = len(self.values)
        self.values.extend(results)
        for note in notes:
            failures = [
                failed._replace(position=before + failed.position) for failed in note.failures
            ]
            self.notes.append(note._replace(position=before + note.position, failures=failures))

    def told(self, context: TaskContext) -> list[Any]:
        """Return the value of the task; the notes go beside it."""
        if self.notes:
            context.add("notes", self.notes)
        return self.values


class ItemsFetcher(Fetcher):
    """A fetcher whose values are lists of items.

    Parameters
    ----------
    handler
        Of each item.
    context
        Takes the notes.
    """

    def __init__(self, handler: ErrorHandler, context: TaskContext) -> None:
        self._handler, self._context = handler, context

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Leave out the items that can't be sent; see `Fetcher.mend`."""
        results, context = TaskResults(self._handler), self._context
        notes = deque((context.take_extras() or {}).get("notes", ()))
        for place, item in enumerate(value):
            while notes and notes[0].position <= place:
                results.notes.append(notes.popleft()._replace(position=len(results.values)))
            try:
                check(item)
                results.values.append(item)
            except Exception as last:
                results.add_failure(item, last)
        results.notes.extend(note._replace(position=len(results.values)) for note in notes)
        return results.told(context)
