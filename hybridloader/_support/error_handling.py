"""Handling of exceptions: of those that foreign code raised, and of marks on those of iterators.

A method of a foreign exception may raise: its ``__str__``, its ``__repr__``, a ``__getattr__`` that does
not know ``__notes__``, the ``__setattr__`` of a frozen dataclass. So all code that prints, annotates or
copies a foreign exception uses the functions here, which raise nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard, TypeVar

from hybridloader.errors import IteratorClosed, NotReady, StateError, WorkerDied, WorkerTimeout

E = TypeVar("E", bound=BaseException)


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or a substitute if that raises."""
    return _safely(str, error)


def repr_of(error: BaseException) -> str:
    """Return ``repr(error)``, or a substitute if that raises."""
    return _safely(repr, error)


def _safely(shown: Callable[[Any], str], error: BaseException) -> str:
    try:
        return shown(error)
    except Exception as second:
        return f"<{type(error).__name__}, whose text raised {type(second).__name__}>"


def described(error: BaseException) -> str:
    """Return the type and the text of an exception."""
    return f"{type(error).__name__}: {text_of(error)}"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception as text, without its causes if these can't be shown."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        stack = traceback.format_tb(error.__traceback__)
        return "".join(["Traceback (most recent call last):\n", *stack, f"{described(error)}\n"])


def show(error: BaseException) -> None:
    """Print the traceback of an exception that can't be raised anywhere."""
    print(traceback_of(error), end="", file=sys.stderr)


def add_note(error: BaseException, note: str) -> None:
    """Call ``error.add_note(note)``, also on Python 3.10, and only once for the same note."""
    notes = error.__dict__.setdefault("__notes__", [])
    if type(notes) is list and note not in [other for other in notes if type(other) is str]:
        notes.append(note)


class Raised:
    """Error in a queue of items."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def throw(self) -> NoReturn:
        """Raise the error, once, and drop it: this frame is in its traceback, which makes a cycle."""
        error = self.error
        del self.error
        try:
            raise error
        finally:
            del error


def foreign(error: Exception, what: str = "the dataset, or a function,") -> Exception:
    """Return `error`, which foreign code has raised, as an ordinary error that ends no iterator.

    A `StopIteration` becomes a `RuntimeError` (PEP 479). An error from a hybridloader iterator that the
    foreign code uses loses its mark (`no_answer`).
    """
    if isinstance(error, StopIteration):
        leak = RuntimeError(f"{what} raised StopIteration")
        leak.__cause__ = error
        return leak.with_traceback(error.__traceback__)
    if not takes_a_place(error):
        mark(error, None)
    return error


# -- marks of errors that an iterator raises from next() ----------------------------------------------

_PLACE = "_hybridloader_place"
"""Attribute of an exception: only attributes stay with it through threads and users' functions."""

ENDS = (IteratorClosed, WorkerDied, StateError)
"""Errors after which a hybridloader iterator returns no more items."""

NO_ITEM = (NotReady, WorkerTimeout)
"""Errors that a hybridloader iterator raises in addition to its items; it remains usable."""


def mark(error: BaseException, place: str | None) -> None:
    """Mark the place of an error in a stream of items; None: it replaces one item."""
    error.__dict__[_PLACE] = place


def place_of(error: BaseException) -> str | None:
    """Return the mark of an error."""
    place: str | None = error.__dict__.get(_PLACE)
    return place


def keeps_number(error: BaseException) -> bool:
    """Return True if `error` counts as an item for functions seeded by item numbers.

    Such an error replaces an item that a resumed run does not make again. Other errors get no number.
    """
    return place_of(error) == "not needed"


def no_answer(error: E) -> E:
    """Mark `error`, which this package made, as raised in addition to the items; return it.

    The same item may still follow, or none at all. The type alone does not show this: a user's function
    may raise an error of any type, and may itself use a loader.
    """
    mark(error, "beside")
    return error


def takes_a_place(error: BaseException) -> bool:
    """Return True if `error` was raised where an item would have been returned."""
    return place_of(error) != "beside"


def counts_as_item(error: BaseException) -> bool:
    """Return True if `error` gets a number where items are numbered."""
    return not is_ours(error, (*ENDS, *NO_ITEM))


def is_ours(error: BaseException, kinds: type[E] | tuple[type[E], ...]) -> TypeGuard[E]:
    """Return True if `error` is one of `kinds` and an iterator marked it with `no_answer`."""
    return isinstance(error, kinds) and not takes_a_place(error)
