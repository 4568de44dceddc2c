"""`PerWorker`: an object that must be opened in each worker, such as a database or a file of HDF5."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast

from hybridloader._support import system
from hybridloader._support.text import brief, function, one_of
from hybridloader._support.user_objects import close as close_if_it_can
from hybridloader.engine.worker import at_end_of_worker, get_worker_info

T = TypeVar("T")

_inherited: list[Any] = []
"""Handles that a fork copied, kept forever: their destructors would close them."""


class PerWorker(Generic[T]):
    """A handle that each worker opens for itself, when it first asks for it.

    Calling this object returns the handle. The handle is closed when the worker ends, or by `close`. A
    forked process opens another handle, and so does a process to which this object is sent; only `open`
    is sent there. A copy within one process is this object itself. Outside of workers, the thread (or
    process) keeps its handle until `close`, or until this object is deleted.

    Parameters
    ----------
    open
        Function without parameters that opens the handle, such as ``partial(sqlite3.connect, path)``.
        For fresh processes it must be picklable (by cloudpickle).
    close
        Function that closes it. Default: its `close()`, if it has one.
    per
        ``"thread"``: each thread has a handle. ``"process"``: threads share one, as with an environment
        of LMDB, which must not be opened twice in a process.
    on_fork
        Treatment of a handle that a fork has copied into a process. ``"leave"`` (default) never uses it
        again, because its library might talk to a server, or unlock a file, for the process that opened
        it. ``"close"`` closes it before another one is opened there, as LMDB requires.

    Examples
    --------
    >>> import sqlite3
    >>> from functools import partial
    >>> database = PerWorker(partial(sqlite3.connect, ":memory:"))
    >>> database().execute("select 6 * 7").fetchone()
    (42,)
    >>> database() is database()
    True
    >>> database.close()
    """

    def __init__(
        self,
        open: Callable[[], T],
        *,
        close: Callable[[T], Any] | None = None,
        per: Literal["thread", "process"] = "thread",
        on_fork: Literal["leave", "close"] = "leave",
    ) -> None:
        function("PerWorker: open", open, "a function without parameters that returns the handle")
        if close is not None:
            function("PerWorker: close", close, "a function that takes the handle and closes it")
        one_of("PerWorker: per", per, ("thread", "process"))
        one_of("PerWorker: on_fork", on_fork, ("leave", "close"))
        self._open, self._close, self._per, self._on_fork = open, close, per, on_fork
        self._key = os.urandom(12)
        # All the mutable state, by process id: the handles from before a fork are kept.
        self._handles: dict[int, _Handles[T]] = {}
        _known[self._key] = self

    def __call__(self) -> T:
        """Return the handle of this worker."""
        handles = self._handles.get(os.getpid()) or self._join()
        if self._per == "process":
            return handles.shared(self._opened)
        here = handles.here
        opened = here.opened
        if opened is None or not opened.is_open:
            opened = here.opened = self._opened()
            if not here.ends_with_worker:
                here.ends_with_worker = at_end_of_worker(partial(_end_here, weakref.ref(handles)))
        return cast("T", opened.handle)

    def _join(self) -> _Handles[T]:
        """Return the handles of this process."""
        pid = os.getpid()
        if self._on_fork == "close":
            for process, handles in [*self._handles.items()]:
                if process != pid:  # another thread may have added its process
                    handles.close_inherited()
        return self._handles.setdefault(pid, _Handles())  # atomic: all threads get the same one

    def _opened(self) -> _Opened[T]:
        return _Opened(self._open(), self._close or close_if_it_can)

    def close(self) -> None:
        """Close the handle of this thread (or process), if it is open. The next call opens another."""
        handles = self._handles.get(os.getpid())
        if handles is not None:
            handles.close()

    def __reduce__(self) -> Any:
        options = {"close": self._close, "per": self._per, "on_fork": self._on_fork}
        return _received, (self._key, self._open, options)

    def __repr__(self) -> str:
        return f"PerWorker({brief(self._open)}, per={self._per!r})"


_known: weakref.WeakValueDictionary[bytes, PerWorker[Any]] = weakref.WeakValueDictionary()
"""All instances of this process, by key."""

_receiving = threading.Lock()


def _fresh_lock() -> None:
    global _receiving
    _receiving = threading.Lock()  # a fork may have copied a held lock


system.at_fork(after_in_child=_fresh_lock)


def _received(key: bytes, open: Callable[[], T], options: dict[str, Any]) -> PerWorker[T]:
    """Return the object with this key, made again if it is not in this process."""
    found = _known.get(key)
    if found is not None:
        return found
    made = PerWorker(open, **options)
    del _known[made._key]
    made._key = key
    with _receiving:  # several threads may receive it
        found = _known.get(key)
        if found is None:
            _known[key] = found = made
    return found


class _Opened(Generic[T]):
    """An open handle, which knows in which process."""

    __slots__ = ("__weakref__", "_close", "_pid", "handle", "is_open", "users")

    def __init__(self, handle: T, close: Callable[[T], Any]) -> None:
        self._close, self._pid = close, os.getpid()
        # All the mutable state:
        self.handle: T | None = handle
        self.is_open = True
        self.users: set[int | None] = set()  # workers that share it; None: others

    def shut(self, *, inherited: bool = False) -> None:
        """Close the handle; one that is inherited only with `inherited`. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        handle, self.handle = cast("T", self.handle), None
        if inherited or os.getpid() == self._pid:
            self._close(handle)
        else:
            _inherited.append(handle)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            with suppress(Exception):  # for example, sqlite3 refuses to close on another thread
                self.shut()


def _end_here(reference: weakref.ref[_Handles[Any]]) -> None:
    """Close the handle of a worker's thread at its end; one of a helper thread waits for that one's."""
    handles = reference()
    if handles is not None:
        here = handles.here
        here.ends_with_worker = False
        opened, here.opened = here.opened, None
        if opened is not None:
            opened.shut()


class _Handles(Generic[T]):
    """Handles of one process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may end a worker on a thread that opens
        # All the mutable state:
        self.here: _ThreadLocals = _ThreadLocals()
        self._shared: _Opened[T] | None = None

    def shared(self, make: Callable[[], _Opened[T]]) -> T:
        """Return the handle that all threads share."""
        info = get_worker_info()
        user = None if info is None else id(info)
        opened = self._shared
        if opened is None or user not in opened.users:
            opened = self._join(make, user)
        return cast("T", opened.handle)

    def _join(self, make: Callable[[], _Opened[T]], user: int | None) -> _Opened[T]:
        """Open the shared handle unless it is open, and make this worker one of its users."""
        with self._lock:
            opened = self._shared
            if opened is not None:  # in use before the next line, or a finalizer could close it
                self._use(opened, user)
            if opened is None or not opened.is_open:
                opened = self._shared = make()
                self._use(opened, user)
            return opened

    def _use(self, opened: _Opened[T], user: int | None) -> None:
        if user not in opened.users:
            opened.users.add(user)
            if user is not None:
                at_end_of_worker(partial(_leave, weakref.ref(self), user))

    def leave(self, user: int) -> None:
        """Close the shared handle if this was the last worker that used it."""
        with self._lock:
            opened = self._shared
            if opened is not None:
                opened.users.discard(user)
                if not opened.users:
                    self._shared = None
                    opened.shut()

    def close_inherited(self) -> None:
        """Close the object that was opened before the fork that made this process."""
        # Without the lock: a fork may have copied it held.
        for opened in (self.here.opened, self._shared):
            if opened is not None:
                opened.shut(inherited=True)

    def close(self) -> None:
        here, self.here.opened = self.here.opened, None
        with self._lock:
            shared, self._shared = self._shared, None
            for opened in (here, shared):
                if opened is not None:
                    opened.shut()


def _leave(reference: weakref.ref[_Handles[Any]], user: int) -> None:
    handles = reference()
    if handles is not None:
        handles.leave(user)


class _ThreadLocals(threading.local):
    opened: _Opened[Any] | None = None
    ends_with_worker = False  # True: closed when the worker on this thread ends
