"""Objects that processes share: multiprocessing's locks, values, queues, connections and proxies.

Python pickles them only while it starts a process, because a handle of the operating system has to
go along with each start: a descriptor, or on Windows a handle made for that one process. The work of a
stage is pickled once for all workers. So objects with a handle are left out of that pickle and put into
a table, `Inherited`, which is pickled with the arguments of every process that is started.

Within a process nothing is sent, and such objects are not copied: `Shared` recognises them.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridloader._support.reducing_pickler import reducing_pickler

_SHARED = frozenset(
    [f"multiprocessing.{name}" for name in ("connection", "heap", "managers", "queues")]
    + [f"multiprocessing.{name}" for name in ("shared_memory", "sharedctypes", "synchronize")]
    + [f"loky.backend.{name}" for name in ("queues", "synchronize")]
)
"""Modules whose classes, and classes derived from these, are of shared objects."""

_HOLDERS = (
    ("multiprocessing.synchronize", "SemLock"),
    ("loky.backend.synchronize", "SemLock"),
    ("multiprocessing.connection", "_ConnectionBase"),
    ("multiprocessing.heap", "Arena"),
    ("multiprocessing.managers", "BaseProxy"),  # holds the key that its manager asks for
    ("socket", "socket"),
)
"""Classes of objects that hold a handle themselves. The others are made of these."""

Reducer = Callable[[Any], Any]

_PLAIN = (
    functools.partial,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
"""Types that multiprocessing was told about, and that cloudpickle sends better."""


class Inherited:
    """Table of objects that go along with the start of each process.

    `blame` makes an error that names the object. If `at_once`, each object is pickled as it is taken, to
    find the one that raises.
    """

    def __init__(
        self, blame: Callable[[Exception], Exception] | None = None, *, at_once: bool = False
    ) -> None:
        self.objects: list[Any] = []
        self.error: Exception | None = None  # the objects could not be made in this process
        self._blame, self._at_once = blame, at_once
        self._holders = (_Descriptor, *_known(_HOLDERS))

    def take(self, thing: Any) -> int | None:
        """Put `thing` into the table and return its number, if it holds a handle.

        Raises `pickle.PicklingError` if no process but a forked one can have that handle.
        """
        if not isinstance(thing, self._holders):
            return None
        semaphore = getattr(thing, "_semlock", None)
        if semaphore is not None and semaphore.name is None and os.name == "posix":
            # Python itself refuses it from 3.11.5 and 3.12 on; before, using it crashes the worker.
            raise pickle.PicklingError(
                "it is made for forked processes alone. Make it by a context that serves others too, "
                "as in multiprocessing.get_context('spawn').Lock()"
            )
        if self._at_once:
            _dumps([thing])
        self.objects.append(thing)
        return len(self.objects) - 1

    def __reduce__(self) -> Any:
        try:
            return _arrive, (_dumps(self.objects),)
        except Exception as error:  # a foreign __reduce__ may raise anything
            if self._blame is None:
                raise
            raise self._blame(error) from error


def _arrive(data: bytes) -> Inherited:
    table = Inherited()
    try:
        table.objects = pickle.loads(data)
    except Exception as error:  # the worker raises it once it has begun
        table.error = error
    return table


def _dumps(objects: list[Any]) -> bytes:
    """Pickle `objects` while a process is being started."""
    import cloudpickle

    def reduce(obj: Any) -> Any:
        way = reducer(obj)
        return None if way is None else way(obj)

    out = io.BytesIO()
    reducing_pickler(cloudpickle.Pickler)(out, reduce, protocol=5).dump(objects)
    return out.getvalue()


def reducer(thing: Any) -> Reducer | None:
    """Return the function by which multiprocessing pickles `thing`; None if it was told of none.

    It is None, too, for objects that share nothing, and for torch's: our own way with tensors
    shares the same ones, and moves none into shared memory.
    """
    reduction = sys.modules.get("multiprocessing.reduction")
    if reduction is None:
        return None
    found: Reducer | None = reduction.ForkingPickler._extra_reducers.get(type(thing))
    if found is None or type(thing) in _PLAIN:
        return None
    home = getattr(found, "__module__", None) or ""
    if home == "multiprocessing.managers" or home.partition(".")[0] == "torch":
        return None
    # The type of a ctypes object is registered as soon as one of its kind lies in shared memory.
    if home == "multiprocessing.sharedctypes" and "_wrapper" not in vars(thing):
        return None
    return found


def reduce_structure(kind: Any) -> Any:
    """Return how to pickle a ctypes structure or union that can't be imported; None for all else.

    One defined in the main script, for instance: cloudpickle can't pickle its field descriptors.
    """
    ctypes = sys.modules.get("ctypes")
    if ctypes is None or not isinstance(kind, (type(ctypes.Structure), type(ctypes.Union))):
        return None
    home: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        home = getattr(home, name, None)
    if home is kind and kind.__module__ not in ("__main__", "__mp_main__"):
        return None
    names = vars(kind)
    core = {name: names[name] for name in _LAYOUT if name in names}
    made = {*core, *_OF_EACH, *(field[0] for field in core.get("_fields_", ()))}
    rest = {name: value for name, value in names.items() if name not in made}
    # In two steps, as its methods may name it themselves.
    return _structure, (kind.__name__, kind.__bases__, core), rest, None, None, _complete


_LAYOUT = ("_pack_", "_layout_", "_align_", "_anonymous_", "_fields_", "__module__", "__qualname__")
_OF_EACH = ("__dict__", "__weakref__")


def _structure(name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
    return types.new_class(name, bases, {}, lambda namespace: namespace.update(names))


def _complete(kind: Any, names: dict[str, Any]) -> None:
    for name, value in names.items():
        setattr(kind, name, value)


@contextmanager
def as_if_starting() -> Iterator[None]:
    """Let objects be pickled on this thread as if a process were being started.

    Then objects that are made of others, such as an event that holds a lock, do not refuse it.
    """
    from multiprocessing import context

    before = context.get_spawning_popen()
    if before is None:
        context.set_spawning_popen(_Start())  # type: ignore[arg-type]
    try:
        yield
    finally:
        context.set_spawning_popen(before)


class _Handle(int):
    """Handle that must not be pickled as the number that it is in this process."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "a handle was duplicated for a process that is not there yet; use "
            "multiprocessing.reduction.DupFd instead"
        )


class _Descriptor:
    """Descriptor that goes along with the start of each process: `multiprocessing.reduction.DupFd`."""

    def __init__(self, handle: int) -> None:
        self._number = int(handle)

    def __reduce__(self) -> Any:
        from multiprocessing import reduction

        return _taken, (reduction.DupFd(self._number),)


def _taken(duplicate: Any) -> Any:
    return duplicate


class _Start:
    """Substitute for the process that is being started."""

    duplicate_for_child = _Handle
    DupFd = _Descriptor


class Shared:
    """Recognises the objects that are never copied within a process."""

    def __init__(self) -> None:
        self._sockets = _known((("socket", "socket"),))
        self._kinds: dict[type, bool] = {}

    def __contains__(self, thing: Any) -> bool:
        kind = type(thing)
        shared = self._kinds.get(kind)
        if shared is None:
            shared = any(base.__module__ in _SHARED for base in kind.__mro__)
            self._kinds[kind] = shared = shared or issubclass(kind, self._sockets)
        return (
            shared or getattr(reducer(thing), "__module__", None) == "multiprocessing.sharedctypes"
        )


def _known(names: tuple[tuple[str, str], ...]) -> tuple[type, ...]:
    modules = ((sys.modules.get(module), name) for module, name in names)
    return tuple(getattr(module, name) for module, name in modules if module is not None)
