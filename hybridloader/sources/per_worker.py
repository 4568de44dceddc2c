"""`PerWorker`: an object that must be opened in each worker, such as a database or a file of HDF5."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypeVar

from hybridloader._support import system
from hybridloader._support.text import brief, function, one_of
from hybridloader._support.user_objects import close as close_if_it_can
from hybridloader.engine.worker import at_end_of_worker, get_worker_info

T = TypeVar("T")

_inherited: list[Any] = []
"""Handles that a fork copied, kept forever: their destructors would close them."""


class PerWorker(Generic[T]):
    """A handle that each worker opens for itself, when it first asks for it.

    Calling this object returns the handle. The handle is closed when the worker ends that opened it, or
    by `close`. A forked process opens another one, and so does a process to which this object is sent;
    only `open` is sent there. A copy within one process is this object itself. A handle that several
    threads share, and one that no worker has opened, stays open until `close`, or until this object is
    deleted.

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
        # All the mutable state: objects with a `slot`, by process id. Those from before a fork are kept.
        self._places: dict[int, Any] = {}
        _known[self._key] = self

    def __call__(self) -> T:
        """Return the handle of this worker."""
        slot = (self._places.get(os.getpid()) or self._join()).slot
        return self._opened_in(slot) if slot.opened is None else slot.opened[0]

    def _join(self) -> Any:
        """Return the place of the handles of this process."""
        pid = os.getpid()
        if self._on_fork == "close":
            for process, place in [*self._places.items()]:
                if process != pid:  # another thread may have added its process
                    # Without the lock: a fork may have copied it held.
                    place.slot.shut(inherited=True)
        make = partial(_Slot, self._close or close_if_it_can)
        made = SimpleNamespace(slot=make()) if self._per == "process" else _ByThread(make)
        return self._places.setdefault(pid, made)  # atomic: all threads get the same one

    def _opened_in(self, slot: _Slot[T]) -> T:
        """Open the handle unless it is open; it is closed with this worker, unless threads share it."""
        with slot.lock:
            if slot.opened is None:
                info, alone = get_worker_info(), self._per == "thread"
                if info is not None and (alone or info.worker_method == "multiprocessing"):
                    at_end_of_worker(partial(_close, weakref.ref(self)))
                slot.opened = (self._open(),)
            return slot.opened[0]

    def close(self) -> None:
        """Close the handle of this thread (or process), if it is open. The next call opens another."""
        place = self._places.get(os.getpid())
        if place is not None:
            place.slot.close()

    def __reduce__(self) -> Any:
        options = {"close": self._close, "per": self._per, "on_fork": self._on_fork}
        return _received, (self._key, self._open, options)

    def __repr__(self) -> str:
        return f"PerWorker({brief(self._open)}, per={self._per!r})"


_known: weakref.WeakValueDictionary[bytes, PerWorker[Any]] = weakref.WeakValueDictionary()
"""All instances of this process, by key."""

_receiving = system.renewed_in_forks(threading.Lock())


def _received(key: bytes, open: Callable[[], T], options: dict[str, Any]) -> PerWorker[T]:
    """Return the object with this key, made again if it is not in this process."""
    with _receiving:  # several threads may receive it
        found = _known.get(key)
        if found is None:
            found = PerWorker(open, **options)
            del _known[found._key]
            found._key, _known[key] = key, found
    return found


class _Slot(Generic[T]):
    """A handle of one thread, or of all threads of a process, which may be open."""

    def __init__(self, close: Callable[[T], Any]) -> None:
        self._close, self._pid = close, os.getpid()
        self.lock = threading.RLock()  # a finalizer may end a worker on a thread that opens
        # All the mutable state:
        self.opened: tuple[T] | None = None

    def close(self) -> None:
        with self.lock:
            self.shut()

    def shut(self, *, inherited: bool = False) -> None:
        """Close the handle; one that is inherited only with `inherited`. Idempotent."""
        opened, self.opened = self.opened, None
        if opened is None:
            return
        if inherited or os.getpid() == self._pid:
            self._close(opened[0])
        else:
            _inherited.append(opened)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            with suppress(Exception):  # for example, sqlite3 refuses to close on another thread
                self.shut()


class _ByThread(threading.local):
    """The slots of the threads of a process: each thread that asks makes one."""

    def __init__(self, make: Callable[[], _Slot[Any]]) -> None:
        self.slot = make()


def _close(reference: weakref.ref[PerWorker[Any]]) -> None:
    """Close a handle, on the thread of the worker: one of a helper thread ends with that."""
    owner = reference()
    if owner is not None:
        owner.close()
