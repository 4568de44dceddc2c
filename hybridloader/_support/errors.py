"""Exceptions that hybridloader raises, and handling of exceptions that foreign code has raised.

The class of a foreign exception may define anything: a ``__str__`` that raises, a ``__getattr__`` that
does not know ``__notes__``, a property ``__class__``, which `isinstance` asks. So all code that tests,
words, annotates or copies an exception that is not ours uses the functions here, which raise nothing.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any, NoReturn, TypeGuard, TypeVar

E = TypeVar("E", bound=BaseException)


class HybridLoaderError(Exception):
    """Base class of all errors of this package."""


class BackendUnavailable(HybridLoaderError, ValueError):
    """The backend is unknown, is not installed, or can't serve on this machine or in this process."""


class ForkUnsafe(BackendUnavailable):
    """A fork that was asked for by name would harm a library that is in use."""


class ShippingError(HybridLoaderError, TypeError):
    """Something that must be sent to a worker can't be pickled; the message names the attribute."""


class CacheError(HybridLoaderError, ValueError):
    """A cache file is damaged, or is not of this pipeline; the message says what to do."""


class StateError(HybridLoaderError, ValueError):
    """The state of a run can't be taken, or is not of this pipeline; the message names the field."""


class SourceError(HybridLoaderError, ValueError):
    """The data of a source are bad, and will be when asked again; the message names file and member."""


class StoreError(HybridLoaderError, OSError):
    """A store of files did not serve a request, which may pass; the message names the file."""


class DamagedMessage(HybridLoaderError, ValueError):
    """A message from another process can't have been written by it; nothing of it was used."""


class ResultNotSendable(HybridLoaderError, TypeError):
    """A worker made a result that can't be pickled, so that it can't be sent back."""


class WorkerDied(HybridLoaderError, RuntimeError):
    """A worker ended without being asked to. A `RuntimeError`, as with torch's loader."""


class WorkerTimeout(HybridLoaderError, RuntimeError, TimeoutError):
    """No result came within `timeout` seconds. A `RuntimeError`, as with torch's loader.

    The iterator stays usable: calling ``next()`` again goes on waiting for the same batch.
    """


class TaskTimeout(WorkerTimeout):
    """A worker took longer than `task_timeout` seconds for one task. The iterator is closed by it."""


class TooManyErrors(HybridLoaderError, RuntimeError):
    """More samples failed than the budget of `on_error` allows; the message ends with a table of them.

    The iterator stays usable, and raises this again at the next sample that fails.
    """


class ShardLost(HybridLoaderError, RuntimeError):
    """The iterator over an iterable source ended with an error: the rest of its shard is lost."""


class IteratorClosed(HybridLoaderError, RuntimeError):
    """The iterator was closed while, or before, it was asked for its next item."""


class NotReady(HybridLoaderError):
    """There is no item yet, and the call was not to wait. Ask again."""


class IllegalTransition(HybridLoaderError, RuntimeError):
    """A state machine was asked for a transition that its table does not hold. Nothing was changed."""


_PARTS = vars(BaseException)


def part(error: BaseException, name: str) -> Any:
    """Return ``args``, ``__dict__``, ``__cause__`` or the like, whatever the class of `error` is."""
    return _PARTS[name].__get__(error)


def set_part(error: BaseException, name: str, value: Any) -> None:
    """Set such a part of an exception."""
    _PARTS[name].__set__(error, value)


def is_a(error: BaseException, kinds: type[E] | tuple[type[E], ...]) -> TypeGuard[E]:
    """Return ``isinstance(error, kinds)``, as an ``except`` clause finds it."""
    return issubclass(type(error), kinds)


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or a text in its place."""
    try:
        return str(error)
    except Exception as second:
        return f"<no text: its __str__ raised {type(second).__name__}>"


def repr_of(error: BaseException) -> str:
    """Return ``repr(error)``, or a text in its place."""
    try:
        return repr(error)
    except Exception as second:
        return f"<{type(error).__name__}, whose __repr__ raised {type(second).__name__}>"


def described(error: BaseException) -> str:
    """Return the type and the text of an exception."""
    return f"{type(error).__name__}: {text_of(error)}"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception as text, without its causes if these can't be shown."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        stack = traceback.format_tb(part(error, "__traceback__"))
        return "".join(["Traceback (most recent call last):\n", *stack, f"{described(error)}\n"])


def show(error: BaseException) -> None:
    """Print the traceback of an exception that nobody can be given."""
    print(traceback_of(error), end="", file=sys.stderr)


def add_note(error: BaseException, note: str) -> None:
    """Call ``error.add_note(note)``, also on Python 3.10, and only once for the same note."""
    notes = part(error, "__dict__").setdefault("__notes__", [])
    if type(notes) is list and note not in [other for other in notes if type(other) is str]:
        notes.append(note)


class Raised:
    """Error in a queue, in the place of an item."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def throw(self) -> NoReturn:
        """Raise the error, once, and drop it: in a frame of its own traceback it would make a cycle."""
        error = self.error
        del self.error
        try:
            raise error
        finally:
            del error


def foreign(error: Exception, what: str = "the dataset, or a function,") -> Exception:
    """Return `error`, which foreign code has raised, as an error like any other: it ends no iterator.

    A `StopIteration` becomes a `RuntimeError` (PEP 479). An error that an iterator of ours has raised
    within that code loses its mark (`no_answer`).
    """
    if is_a(error, StopIteration):
        leak = RuntimeError(f"{what} raised StopIteration")
        leak.__cause__ = error
        return leak.with_traceback(part(error, "__traceback__"))
    if not takes_a_place(error):
        mark(error, None)
    return error


# -- errors that are raised where an item was asked for -----------------------------------------------

_PLACE = "_hybridloader_place"
"""Attribute of an exception: nothing else goes with it through threads and the steps of users."""

ENDS = (IteratorClosed, WorkerDied, StateError)
"""Errors of an iterator of ours after which nothing more will come."""

NO_ITEM = (NotReady, WorkerTimeout)
"""Errors of an iterator of ours that are not raised in the place of an item, and end nothing."""


def mark(error: BaseException, place: str | None) -> None:
    """Mark where in a stream of items an error stands; None: in the place of one item."""
    part(error, "__dict__")[_PLACE] = place


def place_of(error: BaseException) -> str | None:
    """Return the mark of an error."""
    place: str | None = part(error, "__dict__").get(_PLACE)
    return place


def keeps_number(error: BaseException) -> bool:
    """Return True if functions that are seeded by the numbers of their items give one to `error`.

    It is raised in the place of an item that a resumed run does not make again. Other errors get none.
    """
    return place_of(error) == "not needed"


def no_answer(error: E) -> E:
    """Mark `error`, a new one of ours, as raised instead of an answer; return it.

    The same item may still come, or none at all. The type alone does not show this: a user's function
    may raise an error of any type, and may itself use a loader.
    """
    mark(error, "beside")
    return error


def takes_a_place(error: BaseException) -> bool:
    """Return True if `error` was raised where an item would have been returned."""
    return place_of(error) != "beside"


def counts_as_item(error: BaseException) -> bool:
    """Return True if whoever numbers items gives a number to `error`."""
    return not is_ours(error, (*ENDS, *NO_ITEM))


def is_ours(error: BaseException, kinds: type[E] | tuple[type[E], ...]) -> TypeGuard[E]:
    """Return True if `error` is of `kinds` and an iterator of ours raised it instead of an answer."""
    return is_a(error, kinds) and not takes_a_place(error)
