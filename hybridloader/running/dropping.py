"""Dropping of items that come a second time when a run is resumed, on the thread that pulls them.

Where only some of the next items are needed again, those between them are left out with their places. An
error counts as an item, since it was raised in the place of one. Fewer items than are to be dropped are
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybridloader._support.attributes import attribute, close
from hybridloader._support.error_handling import counts_as_item, keeps_number, no_answer
from hybridloader.engine.feed import is_forwarded
from hybridloader.engine.fetcher import TaskContext
from hybridloader.errors import IteratorClosed, StateError
from hybridloader.fetching.on_error.places import not_needed
from hybridloader.running.operator import Needed, OperatorIterator


class Dropping(OperatorIterator):
    """An iterator without its first `count` items, of which `done` were dropped.

    `slack` of these need not be there: of a batch that was the last, none knows its size.
    """

    def __init__(
        self, items: Iterator[Any], count: int, slack: int, left: TaskContext, name: str
    ) -> None:
        super().__init__(items)
        self.items, self.count, self._slack = items, count, slack
        self._left, self._name = left, name
        self._pull_now: Callable[[], Any] = attribute(items, "next_nowait", items.__next__)
        # All the mutable state:
        self.done = 0
        self._opened: Iterator[Any] = iter(())  # rest of several items that arrived as one
        self._used_up = True  # whether `_opened` is

    def __next__(self) -> Any:
        return self._next(self._pull)

    def next_nowait(self) -> Any:
        """Return the next item if it is there. Raises `NotReady` if it is not."""
        return self._next(self._pull_now)

    def _next(self, pull: Callable[[], Any]) -> Any:
        if self.done < self.count:
            self._drop(pull)
        if not self._used_up:
            for item in self._opened:
                return item
            self._used_up = True
        return pull()

    def _drop(self, pull: Callable[[], Any]) -> None:
        while self.done < self.count:
            if self._left.cancelled:
                raise no_answer(IteratorClosed("this epoch was ended early"))
            try:
                item = pull()
            except StopIteration:
                missing, self.count = self.count - self.done, self.done
                if missing <= self._slack:
                    raise
                raise no_answer(
                    StateError(
                        f"the state is after item {self.done + missing} of {self._name!r}, which ended "
                        f"after item {self.done}: its items differ from those when the state was taken"
                    )
                ) from None
            except Exception as error:
                if not counts_as_item(error):
                    raise
                # It was raised before, at the same position.
                self.done += 1
                continue
            if is_forwarded(item):
                self._drop_unopened(item)
            else:
                self.done += 1

    def _drop_unopened(self, several: Any) -> None:
        left = self.count - self.done
        if several.count <= left:
            self.done += several.count
            several.discard()
            return
        self._opened, self._used_up = iter(several.open()[left:]), False
        self.done = self.count

    def close(self) -> None:
        self._opened = iter(())
        close(self.items)


class LeavingOut(OperatorIterator):
    """Items from number `at` on; errors in the places of those that are not `needed`."""

    def __init__(self, items: Iterator[Any], at: int, needed: Needed) -> None:
        super().__init__(items)
        self.items, self._numbers, self._until = items, frozenset(needed.numbers), needed.until
        # All the mutable state:
        self._at = at
        self._opened: Iterator[Any] = iter(())  # rest of several items that arrived as one

    def __next__(self) -> Any:
        if self._at >= self._until:
            for item in self._opened:
                return item
            return self._pull()
        number = self._at
        try:
            item = self._next()
        except Exception as error:
            self._at += counts_as_item(error) and not isinstance(error, StopIteration)
            raise
        self._at += 1
        if number not in self._numbers:
            raise not_needed()
        return item

    def _next(self) -> Any:
        """Return the next item, also of several that come unopened."""
        while True:
            for item in self._opened:
                return item
            item = self._pull()
            if not is_forwarded(item):
                return item
            self._opened = iter(item.open())


class Withholding(OperatorIterator):
    """Items from number `at` on; errors in the places of those that another rank has had.

    `source_of` returns the number of the source's item of which an item that came is made. Of the first
    ones, the loop has received the numbers in `had`.
    """

    def __init__(
        self, items: Iterator[Any], at: int, source_of: Callable[[int], int], had: Sequence[int]
    ) -> None:
        super().__init__(items)
        self.items, self._source_of, self._had = items, source_of, had
        # All the mutable state:
        self._at = at
        self._source, self._count = -1, 0  # number of the source's item, and items of it that came
        self._opened: Iterator[Any] = iter(())  # rest of several items that arrived as one

    def __next__(self) -> Any:
        while True:
            for item in self._opened:
                return self._given(item)
            try:
                item = self._pull()
            except Exception as error:
                self._at += counts_as_item(error) and not isinstance(error, StopIteration)
                raise
            if not is_forwarded(item):
                return self._given(item)
            self._opened = iter(item.open())

    def _given(self, item: Any) -> Any:
        if self._source >= len(self._had):
            return item
        source, self._at = self._source_of(self._at), self._at + 1
        if source != self._source:
            self._source, self._count = source, 0
        self._count += 1
        if source < len(self._had) and self._count <= self._had[source]:
            raise not_needed()
        return item

    def close(self) -> None:
        self._opened = iter(())
        close(self.items)


class Withheld(Iterator[Any]):
    """Items of a run without the places of those that another rank has had; each is noted."""

    def __init__(self, items: Iterator[Any], note: Callable[[], None]) -> None:
        self._items, self._note = items, note
        self._pull_now: Callable[[], Any] = attribute(items, "next_nowait", items.__next__)

    def __next__(self) -> Any:
        return self._next(self._items.__next__)

    def next_nowait(self) -> Any:
        """Return the next item if it is there. Raises `NotReady` if it is not."""
        return self._next(self._pull_now)

    def _next(self, pull: Callable[[], Any]) -> Any:
        while True:
            try:
                return pull()
            except Exception as error:
                if not keeps_number(error):
                    raise
            self._note()

    def close(self) -> None:
        """Close the items."""
        close(self._items)
