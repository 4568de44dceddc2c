"""Objects and exceptions of users: datasets, samplers, items, functions, and the errors of these.

Methods of such a class may raise anything: ``__getattr__`` for an unknown name (``class Config(dict):
__getattr__ = dict.__getitem__`` raises `KeyError`), ``__str__``, ``__repr__``, ``__reduce__``, the
``__setattr__`` of a frozen dataclass. So all code that looks for an attribute of a user's object, or
prints, annotates, copies or sends a user's exception, uses the functions here.
"""

from __future__ import annotations

import copy
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from itertools import islice
from typing import Any, Generic, NamedTuple, NoReturn, TypeGuard, TypeVar

from hybridloader.errors import IteratorClosed, StateError, WorkerDied

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_MISSING = object()


class Fallback(Generic[T]):
    """Read-only property that an object's own attribute of the same name replaces, as with a method.

    It serves names that torch does not use and that a user's subclass may use.
    """

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read, self.__doc__ = read, read.__doc__

    def __get__(self, thing: Any, kind: type | None = None) -> T:
        return self if thing is None else self._read(thing)  # type: ignore[return-value]


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """Return ``getattr(thing, name, default)``, whatever its ``__getattr__`` raises.

    An error is raised only if the class defines the attribute, as a property for instance.
    """
    try:
        return getattr(thing, name, default)
    except Exception:  # a foreign __getattr__ may raise any type
        if any(name in vars(kind) for kind in type(thing).__mro__):
            raise
        return default


def has(thing: Any, name: str) -> bool:
    """Return ``hasattr(thing, name)``, whatever its ``__getattr__`` raises; see `attribute`."""
    return attribute(thing, name, _MISSING) is not _MISSING


def own_attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes stored in the object, slots included. Runs no code of its class."""
    found: dict[str, Any] = {}
    for kind in type(thing).__mro__:
        for name, member in list(vars(kind).items()):
            slot = type(member) is types.MemberDescriptorType
            if not slot and (name != "__dict__" or type(member) is not types.GetSetDescriptorType):
                continue
            try:
                value = member.__get__(thing)
            except AttributeError:  # a slot that is not set
                continue
            if name != "__dict__":
                found[name] = value
            elif type(value) is dict:
                found.update(value)
    return found


def is_container(thing: Any) -> bool:
    """True for a list, a dict, an array, a tensor: to read from it runs no code of the user."""
    kind = type(thing)
    known = kind.__module__ in ("builtins", "array", "collections", "numpy", "torch")
    return known and hasattr(kind, "__iter__")


def length_of(thing: Any) -> int | None:
    """Return ``len(thing)``; None if it has no length or raises `NotImplementedError`."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def close(thing: Any) -> None:
    """Call ``close`` of `thing` if it has one; most iterators hold no resource and have none."""
    shut = attribute(thing, "close")
    if shut is not None:
        shut()


# -- exceptions


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or a substitute if that raises."""
    return _safely(str, error)


def repr_of(error: BaseException) -> str:
    """Return ``repr(error)``, or a substitute if that raises."""
    return _safely(repr, error)


def _safely(shown: Callable[[Any], str], thing: Any) -> str:
    try:
        return shown(thing)
    except Exception as second:
        return f"<{type(thing).__name__}, whose text raised {type(second).__name__}>"


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


# -- errors between the items of an iterator


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
    """Return True if `error` gets a number where items are numbered; a `StopIteration` is no item."""
    return not isinstance(error, StopIteration) and takes_a_place(error)


def is_ours(error: BaseException, kinds: type[E] | tuple[type[E], ...]) -> TypeGuard[E]:
    """Return True if `error` is one of `kinds` and an iterator marked it with `no_answer`."""
    return isinstance(error, kinds) and not takes_a_place(error)


# -- transport of an exception from a worker to the consumer
#
# A user's exception keeps its type and its arguments. A note names the stage, the worker and the task.
# The ``__cause__`` of an exception from another process has the worker's traceback as text.


class WorkerTraceback(Exception):
    """Traceback of a worker in another process, as text: the ``__cause__`` of its exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Failure:
    """Exception that a worker sends to the consumer.

    Within a process it holds the exception itself. Its pickle holds the exception's type, arguments and
    attributes, and the traceback as text. Some exceptions can't be pickled by their own methods; a
    constructor with several arguments is the common cause. They are rebuilt without a call of the
    constructor, so they arrive with the same type and ``args``.
    """

    def __init__(self, exception: BaseException) -> None:
        self.exception = exception
        self.traceback: str | None = None

    def to_exception(self, note: str) -> BaseException:
        """Return the exception, once. `note` names its stage and worker, and is added unless empty.

        The failure drops the exception. The failure is in a frame of the traceback that the exception
        gets when raised, so a reference from it would be a cycle that keeps the whole iterator alive.
        """
        exception = self.exception
        del self.exception
        if self.traceback is not None:
            cause = WorkerTraceback(f"{note}\n{self.traceback}")
            BaseException.__setattr__(exception, "__cause__", cause)
        if note:
            add_note(exception, note)
        return exception

    @property
    def text(self) -> str:
        """Traceback as text."""
        return self.traceback or traceback_of(self.exception)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_failure, (_frozen(self.exception), self.text)


def twin(exception: Exception) -> Exception:
    """Return another exception of the same type, arguments, attributes, notes, cause and traceback.

    A worker that answers many tasks with one error sends copies of it. An exception that the consumer
    raises collects the consumer's frames in its traceback, and a worker thread must not keep these
    alive. If the class can't be copied, the result is a `RuntimeError` with its name and text.
    """
    kind, args = type(exception), exception.args
    try:  # copy.copy, because OSError and others keep more than their arguments
        other: Any = copy.copy(exception)
        same = type(other) is kind and [*map(id, other.args)] == [*map(id, args)]
    except Exception:  # a constructor that does not accept `args`
        same = False
    if not same:
        try:
            other = _Parts(kind, args, exception.__dict__).assemble()
        except Exception:  # a built-in class that checks its arguments
            other = RuntimeError(described(exception))
    if type(notes := other.__dict__.get("__notes__")) is list:
        other.__dict__["__notes__"] = list(notes)  # the consumer adds its own
    for name in ("__cause__", "__context__", "__suppress_context__", "__traceback__"):
        BaseException.__setattr__(other, name, getattr(exception, name))
    return other  # type: ignore[no-any-return]


def _frozen(exception: BaseException) -> bytes:
    """Pickle an exception, or as much of it as is certain to load again."""
    kind = type(exception)
    try:
        whole = _dumps(exception)
        thawed = pickle.loads(whole)
        if type(thawed).__qualname__ == kind.__qualname__ and _alike(thawed, exception):
            return whole
    except Exception:  # a broken __reduce__, __new__ or __init__ may raise anything
        pass
    args = tuple(map(_sendable, exception.args))
    parts = _Parts(kind, args, {k: _sendable(value) for k, value in exception.__dict__.items()})
    try:
        parts.assemble()
        return _dumps(parts)
    except Exception:  # it checks its arguments, or can't be pickled itself: the text has its name
        message = f"{kind.__module__}.{kind.__qualname__}: {text_of(exception)}"
        return _dumps(_Parts(RuntimeError, (message,), {}))


def _sendable(value: Any) -> Any:
    try:
        pickle.loads(_dumps(value))
    except Exception:  # as above
        return _safely(repr, value)
    return value


def _dumps(thing: Any) -> bytes:
    """Pickle `thing`, classes by reference if possible: an ``except`` must match them."""
    try:
        return pickle.dumps(thing)
    except Exception:  # as above
        import cloudpickle

        whole: bytes = cloudpickle.dumps(thing)
        return whole


def _alike(found: BaseException, sent: BaseException) -> bool:
    """Return True if both have the same arguments; values that aren't plain compare by type alone."""
    plain = (str, bytes, int, bool, type(None))
    first, second = found.args, sent.args
    return len(first) == len(second) and all(
        type(a) is type(b) and (a == b or type(a) not in plain)
        for a, b in zip(first, second, strict=True)
    )


class _Parts(NamedTuple):
    """Parts of an exception that can't be pickled whole."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    def assemble(self) -> BaseException:
        # Use `__new__` of the built-in base class: one written in Python may require other arguments.
        home = next(
            base
            for base in self.kind.__mro__
            if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
        )
        exception: BaseException = home.__new__(self.kind, *self.args)
        # `OSError.__new__` leaves them out if the class has an `__init__`; a class may hide `args`.
        BaseException.args.__set__(exception, self.args)  # type: ignore[attr-defined]
        exception.__dict__.update(self.state)
        return exception


def _rebuild_failure(frozen: bytes, text: str) -> Failure:
    try:
        thawed = pickle.loads(frozen)
        exception: BaseException = thawed.assemble() if type(thawed) is _Parts else thawed
    except Exception as error:  # e.g. a class that this process can't import
        words = f"a worker's exception could not be loaded here: {repr_of(error)}"
        exception = RuntimeError(words)
    failure = Failure(exception)
    failure.traceback = text
    return failure


# -- sizes of values in bytes, as far as they can be seen


def size_of(value: Any, most: int | None = None) -> int:
    """Return the bytes of the tensors, arrays and strings in `value`, through containers.

    At most `most` elements of each container are looked at, and the others count as these; None: all.

    An `nbytes` is believed. Anything else counts as its object alone, and so does an object that can't
    be looked into: it is no item's fault that it is to be weighed.
    """
    try:
        found = attribute(value, "nbytes")
        if isinstance(found, int):
            return found
        parts: Collection[Any]
        if isinstance(value, dict):
            parts = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = value
        elif is_dataclass(value) and not isinstance(value, type):
            parts = own_attributes(value).values()
        else:
            return sys.getsizeof(value)
        count, looked = len(parts), len(parts) if most is None else min(most, len(parts))
        size = sum(size_of(part, most) for part in islice(parts, looked))
        return (size * count // looked if looked else 0) + sys.getsizeof(value)
    except Exception:  # an `nbytes` that raises, a list that holds itself
        return object.__sizeof__(value)
