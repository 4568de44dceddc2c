"""Results of one task: the good values in a list, and beside it notes on the samples that failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hybridloader._support.errors import foreign
from hybridloader._support.failure import Failure
from hybridloader._support.text import brief
from hybridloader.engine.fetcher import GivenUp, TaskContext
from hybridloader.fetching.on_error.error_handler import ErrorHandler
from hybridloader.fetching.outcome import FailureRecord, Note


class TaskResults:
    """Values of one task until now, and notes on its failures.

    If the values make one `batch`, an error is raised here, unless the policy skips. Else it is noted,
    to be raised or left out in its place when the values are handed out.
    """

    __slots__ = ("_batch", "_ended", "_handler", "_surplus", "_what", "notes", "uneven", "values")

    def __init__(
        self,
        handler: ErrorHandler,
        *,
        batch: bool = False,
        what: str | None = None,  # name of every item, for errors; None: the item itself, in short
    ) -> None:
        self._handler, self._batch, self._what = handler, batch, what
        self.values: list[Any] = []
        self.notes: list[Note] = []
        self.uneven: list[tuple[int, int]] = []
        """Numbers of those items of the task that have other than one value or note, and how many."""
        self._ended = self._surplus = (
            0  # values and notes of items that are through; see `end_item`
        )

    def end_item(self) -> None:
        """Note that all values and notes of one more item of the task are there."""
        units = len(self.values) + len(self.notes)
        own = units - self._ended
        if own != 1:
            self.uneven.append((self._ended - self._surplus, own))
            self._surplus += own - 1
        self._ended = units

    def end_items(self) -> None:
        """Note that all items whose values and notes are there had one of these each."""
        self._ended = len(self.values) + len(self.notes)

    @property
    def failures(self) -> list[FailureRecord]:
        return [failed for note in self.notes for failed in note.failures]

    def rescue(
        self,
        function: Callable[[Any], Iterable[Any]],
        argument: Any,
        index: Any,
        error: Exception,
    ) -> Iterable[Any]:
        """Return the values that ``function(argument)``, which has raised `error`, gives after all.

        A failure is noted under `index`.
        """
        if not self._batch:
            error = foreign(error, "a function of a pipeline")
        try:
            found, replaced = self._handler.rescue(function, argument, index, foreign(error))
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
        """Note that `index` has failed, and whether another value was put in its place."""
        place, item = len(self.values), None
        if type(index) is GivenUp:
            index = index.index
        if not self._batch:
            error = foreign(error, "a function of a pipeline")
            shown = brief(index if self._what is None else self._what)
            index = index if type(index) in (int, str) else shown
            item = None if replaced else shown
        failed = FailureRecord(index, place, Failure(error), replaced)
        self.notes.append(Note(place, 0 if replaced else 1, [failed], item))

    def add_sendable(self, pairs: Iterable[tuple[Any, Any]], check: Callable[[Any], Any]) -> None:
        """Add the value of each pair of an index and a value; one that `check` refuses has failed."""
        for index, value in pairs:
            try:
                check(value)
                self.values.append(value)
            except Exception as error:
                self.add_failure(index, error)

    def extend(self, other: TaskResults) -> None:
        before = len(self.values)
        self.values.extend(other.values)
        for note in other.notes:
            failures = [
                failed._replace(position=before + failed.position) for failed in note.failures
            ]
            self.notes.append(note._replace(position=before + note.position, failures=failures))

    def hand_over(self, context: TaskContext) -> list[Any]:
        """Return the value of the task, and put the notes beside it."""
        if self.notes:
            context.add("notes", self.notes)
        if self.uneven:
            context.add("uneven", self.uneven)
        return self.values


def sendable_items(
    handler: ErrorHandler, context: TaskContext, items: list[Any], check: Callable[[Any], Any]
) -> list[Any]:
    """Return those of a task's `items` that `check` lets be sent, with notes on the others."""
    results, extras = TaskResults(handler), context.take_extras() or {}
    notes, results.uneven = deque(extras.get("notes", ())), extras.get("uneven", [])
    for place, item in enumerate(items):
        while notes and notes[0].position <= place:
            results.notes.append(notes.popleft()._replace(position=len(results.values)))
        results.add_sendable([(item, item)], check)
    results.notes.extend(note._replace(position=len(results.values)) for note in notes)
    return results.hand_over(context)
