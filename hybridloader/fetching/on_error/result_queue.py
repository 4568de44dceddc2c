"""Results of a pipeline's stage as they are handed out, each error in the place of its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybridloader._support.user_objects import Raised
from hybridloader.fetching.on_error.error_budget import ErrorBudget
from hybridloader.fetching.outcome import Note


class ResultQueue(Iterator[Any]):
    """Results of tasks, and the notes and errors between them.

    It continues after an error, and ends whenever nothing is waiting. Without a `budget` errors are
    raised, and nothing is counted. `where` describes where an item failed at a worker.
    """

    def __init__(self, budget: ErrorBudget | None, where: Callable[[str, int | None], str]) -> None:
        self._budget, self._where = budget, where
        # All the mutable state:
        self.results: deque[Any] = deque()  # the caller may pop from it while `between` is empty
        # Notes and errors, each with its position among all results so far, and the worker.
        self.between: deque[tuple[int, Note | Raised, int | None]] = deque()
        self._added = 0  # results so far

    def add(self, results: Sequence[Any], notes: Sequence[Note], worker: int | None = None) -> int:
        """Add the results of `worker`; return how many come out, as results or as errors."""
        added = self._added
        self.between.extend((added + note.position, note, worker) for note in notes)
        self.results.extend(results)
        self._added = added + len(results)
        return len(results) + sum(
            note.item is not None and not self._may_skip(note) for note in notes
        )

    def gone_of(self, notes: Sequence[Note]) -> list[int]:
        """Return the numbers, among the values and notes of a task, of the notes that take no place."""
        return [
            note.position + number
            for number, note in enumerate(notes)
            if not self._takes_place(note)
        ]

    def left_out_of(self, notes: Sequence[Note]) -> list[int]:
        """Return the numbers of the items that take no place, among all items of a task."""
        failed = [note for note in notes if note.item is not None]
        return [
            note.position + number
            for number, note in enumerate(failed)
            if not self._takes_place(note)
        ]

    def _takes_place(self, note: Note) -> bool:
        kept = self._budget is not None and self._budget.gaps
        return note.item is not None and (kept or not self._may_skip(note))

    def fail(self, error: Exception) -> None:
        """Add an error that is raised in the place of one result, after all others."""
        self.between.append((self._added, Raised(error), None))

    @property
    def gone(self) -> bool:
        """True if the next entry takes no place: it is counted, or left out with its place."""
        if not (self.between and self._due):
            return False
        note = self.between[0][1]
        if isinstance(note, Raised):
            return False
        return not self._takes_place(note)

    @property
    def places(self) -> int:
        """Number of the entries that wait and take a place."""
        return len(self.results) + sum(
            isinstance(entry, Raised) or self._takes_place(entry) for _, entry, _ in self.between
        )

    @property
    def _due(self) -> bool:
        return self.between[0][0] <= self._added - len(self.results)

    def __bool__(self) -> bool:
        return bool(self.results or self.between)

    def __next__(self) -> Any:
        while self.between and self._due:
            self.settle()
        if not self.results:
            raise StopIteration
        if self._budget is not None:
            self._budget.count(1, (), None)
        return self.results.popleft()

    def settle(self) -> None:
        """Count the next entry, which is no result, or raise it."""
        _, note, worker = self.between.popleft()
        if isinstance(note, Raised):
            note.throw()
        if note.item is None:
            if self._budget is not None:
                self._budget.count(note.attempted, note.failures, worker)
        elif self._budget is not None and self._may_skip(note):
            self._budget.leave_out(note.failures[0], worker)
        else:
            where = self._where(note.item, worker)
            Raised(note.failures[0].failure.to_exception(where)).throw()

    def _may_skip(self, note: Note) -> bool:
        return self._budget is not None and self._budget.may_skip(note.failures[0].failure)
