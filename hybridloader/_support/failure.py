"""Transport of an exception from a worker to the consumer.

A user's exception keeps its type and its arguments. A note names the stage, the worker and the task
(Python 3.11 and later show notes below the message). The ``__cause__`` of an exception from another
process holds the worker's traceback as text.
"""

from __future__ import annotations

import copy
import io
import pickle
import types
from typing import Any, NamedTuple

from hybridloader._support.error_handling import (
    add_note,
    described,
    repr_of,
    text_of,
    traceback_of,
)
from hybridloader._support.reducing_pickler import reducing_pickler


class WorkerTraceback(Exception):
    """Traceback of a worker in another process, as text: the ``__cause__`` of its exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Failure:
    """Exception that a worker sends to the consumer.

    Within a process it holds the exception itself. Its pickle holds the exception's type, arguments and
    attributes, and the traceback as text. Some exceptions can't be pickled by their own methods; a
    constructor with several arguments is the common cause. They are rebuilt without a call of the
    constructor, so they arrive with the same type and ``args``. This applies to each nested exception
    too, such as the members of a group.
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
        frozen = _Freezer().freeze(self.exception)
        return _rebuild_failure, (frozen, id(type(self.exception)), self.text)


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


class _Freezer:
    """Pickles exceptions so that they are certain to load again.

    Each nested exception (a member of a group, a cause kept in an attribute) is pickled separately. So
    one that can't be pickled does not change the type of the others.
    """

    def __init__(self) -> None:
        self._freezing: list[BaseException] = []
        self._frozen: dict[int, bytes] = {}

    def freeze(self, exception: BaseException) -> bytes:
        frozen = self._frozen.get(id(exception))
        if frozen is None:
            self._freezing.append(exception)
            frozen = self._frozen[id(exception)] = self._freeze(exception)
            self._freezing.pop()
        return frozen

    def _freeze(self, exception: BaseException) -> bytes:
        kind = type(exception)
        try:
            whole = self._dumps(exception)
            thawed = pickle.loads(whole)
            if type(thawed).__qualname__ == kind.__qualname__ and _alike(thawed, exception):
                return whole
        except Exception:  # a broken __reduce__, __new__ or __init__ may raise anything
            pass
        args = tuple(map(self._sendable, exception.args))
        state = {name: self._sendable(value) for name, value in exception.__dict__.items()}
        try:
            return self._dumps(_Parts(kind, args, state))
        except Exception:  # the class itself can't be pickled: the message holds its name
            message = f"{kind.__module__}.{kind.__qualname__}: {text_of(exception)}"
            return self._dumps(_Parts(RuntimeError, (message,), {}))

    def _sendable(self, value: Any) -> Any:
        try:
            pickle.loads(self._dumps(value))
        except Exception:  # as above
            try:
                return repr(value)
            except Exception:  # a RecursionError, for instance
                return f"<{type(value).__qualname__} that can't be shown>"
        return value

    def _dumps(self, thing: Any) -> bytes:
        """Pickle `thing`, classes by reference if possible: an ``except`` must match them."""
        try:
            return self._dump(thing, pickle.Pickler)
        except Exception:  # as above
            import cloudpickle

            return self._dump(thing, cloudpickle.Pickler)

    def _dump(self, thing: Any, base: Any) -> bytes:
        def reduce(obj: Any) -> Any:
            if not issubclass(type(obj), BaseException) or any(obj is e for e in self._freezing):
                return None
            return _thaw, (self.freeze(obj), id(type(obj)))

        out = io.BytesIO()
        reducing_pickler(base)(out, reduce).dump(thing)
        return out.getvalue()


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
        BaseException.__setattr__(exception, "args", self.args)
        exception.__dict__.update(self.state)
        return exception


def _original(received: type[BaseException], address: int) -> type[BaseException]:
    """Return the class of this process of which `received` is a copy; `received` if there is none.

    A class made in a function is sent by value. The original of a forked worker's class has the same
    address in this process, and an ``except`` clause in this process names that original.
    """
    todo: list[type[BaseException]] = [BaseException]
    while todo:
        kind = todo.pop()
        if id(kind) == address and kind.__name__ == received.__name__:
            return kind
        todo.extend(type.__subclasses__(kind))
    return received


def _thaw(frozen: bytes, address: int) -> BaseException:
    try:
        thawed = pickle.loads(frozen)
        exception: BaseException = thawed.assemble() if type(thawed) is _Parts else thawed
        original = _original(type(exception), address)
        if original is not type(exception):
            BaseException.__setattr__(exception, "__class__", original)
    except Exception as error:  # e.g. a class that this process can't import
        return RuntimeError(f"a worker's exception could not be loaded here: {repr_of(error)}")
    return exception


def _rebuild_failure(frozen: bytes, address: int, text: str) -> Failure:
    failure = Failure(_thaw(frozen, address))
    failure.traceback = text
    return failure
