"""Objects that processes share: multiprocessing's locks, values, queues, connections and proxies.

Python pickles them only while it starts a process, because each start must pass a handle of the
operating system: a descriptor, or on Windows a handle made for that one process. The work of a stage
is pickled once for all workers. So that pickle leaves out objects with a handle. They are put into a
table, `Inherited`, which is pickled with the arguments of each process that is started.

Within a process nothing is sent. `Shared` recognizes such objects, so that they are not copied there.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridloader._support import system

_SHARED = frozenset(
    [f"multiprocessing.{name}" for name in ("connection", "heap", "managers", "queues")]
    + [f"multiprocessing.{name}" for name in ("shared_memory", "sharedctypes", "synchronize")]
    + [f"loky.backend.{name}" for name in ("queues", "synchronize")]
)
"""Modules whose classes, and the classes derived from them, make shared objects."""

_HOLDERS = (
    ("multiprocessing.synchronize", "SemLock"),
    ("loky.backend.synchronize", "SemLock"),
    ("multiprocessing.connection", "_ConnectionBase"),
    ("multiprocessing.heap", "Arena"),
    ("multiprocessing.managers", "BaseProxy"),  # holds the key of its manager
    ("socket", "socket"),
)
"""Classes of objects that hold a handle themselves. Other shared objects contain these."""

Reducer = Callable[[Any], Any]

_PLAIN = (
    functools.partial,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
"""Types that multiprocessing registers a reducer for, and that cloudpickle pickles better."""


class Inherited:
    """Table of objects that are passed at the start of each process.

    `blame` makes an error that names the object. With `at_once`, each object is pickled when it is
    taken, to find the one that raises.
    """

    def __init__(
        self, blame: Callable[[Exception], Exception] | None = None, *, at_once: bool = False
    ) -> None:
        self.objects: list[Any] = []
        self.error: Exception | None = None  # the objects could not be made in this process
        self._blame, self._at_once = blame, at_once
        self._holders = (_Descriptor, *_known(_HOLDERS))

    def take(self, thing: Any) -> int | None:
        """Put `thing` into the table and return its number; return None if it holds no handle.

        Raises `pickle.PicklingError` if only a forked process can use that handle.
        """
        if not isinstance(thing, self._holders):
            return None
        semaphore = getattr(thing, "_semlock", None)
        if semaphore is not None and semaphore.name is None and system.FORK:
            # Python refuses it since 3.11.5 and 3.12; before, its use crashes the worker.
            raise pickle.PicklingError(
                "it works in forked processes only. Make it by a context that also serves other "
                "processes, as in multiprocessing.get_context('spawn').Lock()"
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
    """Return the reducer that multiprocessing has registered for `thing`; None if there is none.

    It is None, too, for objects that share nothing and for objects of torch: `memory.packing` shares
    the same tensors, without moving any into shared memory.
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
    # multiprocessing registers a ctypes type as soon as one object of the type is in shared memory.
    if home == "multiprocessing.sharedctypes" and "_wrapper" not in vars(thing):
        return None
    return found


def registered(kind: type) -> Reducer | None:
    """Return the reducer of a class that a program has registered with multiprocessing's pickler."""
    reduction = sys.modules.get("multiprocessing.reduction")
    found = None if reduction is None else reduction.ForkingPickler._extra_reducers.get(kind)
    home = (getattr(found, "__module__", None) or "").partition(".")[0]
    return None if home in ("multiprocessing", "loky", "torch") else found


MAIN = ("__main__", "__mp_main__")
"""Names of the script's module: in the first process, and in one that multiprocessing has spawned."""


def found_by_name(thing: Any) -> bool:
    """Return True if the name of a class or function leads to it."""
    home: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        home = getattr(home, name, None)
    return home is thing


@contextmanager
def as_if_starting() -> Iterator[None]:
    """Make multiprocessing pickle objects on this thread as if it were starting a process.

    Otherwise objects that contain shared ones, such as an event that holds a lock, refuse to be pickled.
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
    """Handle that refuses to be pickled, because its number is valid in this process only."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "a handle was duplicated for a process that has not started yet; use "
            "multiprocessing.reduction.DupFd instead"
        )


class _Descriptor:
    """Descriptor passed at the start of each process, in place of `multiprocessing.reduction.DupFd`."""

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
    """Recognizes the objects that are never copied within a process."""

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


# -- pickler with a reducer function per instance
#
# Its class is made once. A class made for each call would stay in memory until the garbage collector
# runs. On Python 3.13t it would stay forever: classes are immortal there once a thread has started.


@functools.cache
def reducing_pickler(base: Any) -> Any:
    """Return a subclass of `base` whose instances take a function ``reduce`` after the file.

    ``reduce`` returns the reduction of an object, as `reducer_override` does, or None to leave the
    object to `base`.
    """
    otherwise = getattr(base, "reducer_override", lambda pickler, obj: NotImplemented)

    class Reducing(base):  # type: ignore[misc]
        def __init__(self, file: Any, reduce: Callable[[Any], Any], **options: Any) -> None:
            super().__init__(file, **options)
            self._reduce = reduce

        def reducer_override(self, obj: Any) -> Any:
            found = self._reduce(obj)
            return otherwise(self, obj) if found is None else found

    return Reducing
