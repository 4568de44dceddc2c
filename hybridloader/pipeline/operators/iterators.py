"""Base classes of the iterators of operators, which pull the iterators before them and close them.

The iterator of an operator has all its mutable state in plain attributes. It never runs a thread, and
never pulls an item before it is asked for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from hybridloader._support.attributes import close
from hybridloader._support.errors import Raised
from hybridloader.fetching.on_error.places import takes_a_place

if TYPE_CHECKING:
    from hybridloader.pipeline.operators.base import Chain, Context


def close_all(iterators: list[Iterator[Any]]) -> None:
    """Close every one of them, also when closing another fails; raises the first failure."""
    first: Raised | None = None
    for iterator in iterators:
        try:
            close(iterator)
        except BaseException as error:
            first = first or Raised(error)
    if first is not None:
        first.throw()


def nothing() -> NoReturn:
    """Raise `StopIteration`: the ``__next__`` of an iterator that has ended."""
    raise StopIteration


class OperatorIterator(Iterator[Any]):
    """Base of the iterators over one other, which is closed with this."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        # A bound method: a call of one written in Python takes 40 ns less than `next(items)`.
        self._pull: Callable[[], Any] = items.__next__

    def __next__(self) -> Any:
        try:
            return self._pull()
        except StopIteration:
            self._end()
            raise

    def _end(self) -> None:
        """Note that the iterator before has ended; it is not asked again."""
        self._pull = nothing

    def _failed(self, error: Exception) -> bool:
        """Note an error of `_pull`; tell whether it was raised in the place of an item."""
        if isinstance(error, StopIteration):
            self._end()
            return False
        return takes_a_place(error)

    def close(self) -> None:
        """Give up the rest, and close the iterator before. Idempotent."""
        self._end()
        # Called from here: a function between would double the nested calls of a long chain.
        shut = getattr(self._items, "close", None)
        if shut is not None:
            shut()


def open_all(pipelines: tuple[Chain, ...], context: Context) -> list[Iterator[Any]]:
    """Open all of `pipelines`; if one can't be opened, close the others."""
    found: list[Iterator[Any]] = []
    try:
        for pipeline in pipelines:
            found.append(context.open(pipeline, context.start))
    except BaseException:
        close_all(found)
        raise
    return found


class JoinIterator(Iterator[Any]):
    """Base of the iterators over several others, which are closed with this."""

    def __init__(self, branches: list[Iterator[Any]]) -> None:
        self._opened = branches

    def close(self) -> None:
        """Close them all. Idempotent."""
        close_all(self._opened)
