"""Features of this platform. No other module asks for its name, or for a name that `os` may lack.

The constants are read as attributes of this module (``system.PIDFD``): tests take features away.
Only the standard library's own differences between Linux, macOS and Windows count here.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from functools import cached_property as _with_lock
from importlib import import_module
from typing import Any, TypeVar

ROOT = "/" if sys.platform == "linux" else os.devnull
"""Folder of the kernel's files: proc, sys, dev/shm. Elsewhere nothing is below it.

A platform without these files may still have such a folder, such as ``C:\\proc``.
"""

PROC = os.path.join(ROOT, "proc")  # folder of the kernel's files about processes

FORK = hasattr(os, "fork")
PIDFD = hasattr(os, "pidfd_open")  # Linux; kernels before 5.3 and some sandboxes refuse it
MEMFD = hasattr(os, "memfd_create")  # Linux
FALLOCATE = hasattr(os, "posix_fallocate")  # not macOS
PREAD = hasattr(os, "pread")  # not Windows
OWNERS = hasattr(os, "geteuid")  # of files and processes, by number; not Windows

UNIX_SOCKETS = os.name == "posix"
"""True if connections between processes can be polled, and carry descriptors."""

SIGNAL_MASKS = hasattr(signal, "pthread_sigmask")  # not Windows
KILL: int | None = getattr(signal, "SIGKILL", None)  # not Windows, where `terminate` does it

NO_LOAD: int | None = getattr(os, "RTLD_NOLOAD", None)
"""Mode of `ctypes.CDLL` that finds a library only if it is loaded. Not on Windows."""

HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux

BINARY: int = getattr(os, "O_BINARY", 0)
"""Flag of `os.open`, without which Windows changes the ends of lines."""

TEMPORARY: int = getattr(os, "O_TEMPORARY", 0)
"""Flag of `os.open` on Windows: the file goes with its last descriptor, however that process ends."""

NO_WAITING: int = getattr(os, "O_NONBLOCK", 0)
"""Flag of `os.open`, without which the open of a named pipe waits for a writer. Not on Windows."""

_POLL = 0.5  # seconds between two checks of a process, where nothing reports its end

_FIRST_FREE = 4
"""Offset from SIGRTMIN of the first real-time signal that is spare: musl and Go reserve the first ones,
and other libraries take the next."""


def at_fork(**hooks: Callable[[], object]) -> None:
    """Call `os.register_at_fork` where processes fork."""
    if hasattr(os, "register_at_fork"):  # torch needs it wherever it forks
        os.register_at_fork(**hooks)


def renewed_in_forks(lock: Any) -> Any:
    """Return a lock of `threading`, which is free in each fork: a held copy may stay held forever."""
    if FORK:
        os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock


T = TypeVar("T")


class cached_property(_with_lock[T]):
    """The standard one, but without its lock before Python 3.12, which a fork may copy while held."""

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()


def signals(*names: str) -> frozenset[int]:
    """Return those of the signals that this platform has."""
    return frozenset(getattr(signal, name) for name in names if hasattr(signal, name))


def spare_signals() -> range:
    """Return the signals that neither the system nor its usual libraries need."""
    if hasattr(signal, "SIGRTMIN"):
        return range(signal.SIGRTMIN + _FIRST_FREE, signal.SIGRTMAX + 1)
    if hasattr(signal, "SIGINFO"):  # macOS and the BSDs; ignored by default
        return range(signal.SIGINFO, signal.SIGINFO + 1)
    return range(0)


@cache
def module(name: str) -> Any:
    """Return a module of the standard library that not every platform has; None where it is missing.

    The result is kept, because a failing import searches all folders of `sys.path` each time.
    """
    try:
        return import_module(name)
    except ImportError:
        return None


def soft_limit(name: str) -> int | None:
    """Return a limit of this process, such as ``"RLIMIT_NOFILE"``; None if there is none, or no way to
    read it."""
    resource = module("resource")
    number = getattr(resource, name, None)
    if number is None:
        return None
    soft: int = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def alive(pid: int) -> bool:
    """True if there is a process with that number."""
    windows = module("_winapi")
    if windows is not None:
        return not _ends_within(windows, pid, 0)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def await_end(pid: int) -> None:
    """Wait until there is no process with that number."""
    windows = module("_winapi")
    if windows is not None:
        _ends_within(windows, pid, windows.INFINITE)
        return
    while alive(pid):
        time.sleep(_POLL)


def _ends_within(windows: Any, pid: int, milliseconds: int) -> bool:
    try:
        handle = windows.OpenProcess(0x00100000, False, pid)  # SYNCHRONIZE
    except OSError:  # it has ended
        return True
    try:
        return bool(windows.WaitForSingleObject(handle, milliseconds) == windows.WAIT_OBJECT_0)
    finally:
        windows.CloseHandle(handle)


def on_request(name: str, answer: Callable[[], object]) -> None:
    """On Windows, call `answer` on a thread of this process whenever one calls `request(name)`."""
    import threading  # not for modules that only ask for features

    windows, event = module("_winapi"), _event(name)

    def answer_requests() -> None:
        while windows.WaitForSingleObject(event, windows.INFINITE) == windows.WAIT_OBJECT_0:
            answer()

    thread = threading.Thread(target=answer_requests, name="hybridloader-requests", daemon=True)
    thread.start()


def request(name: str) -> None:
    """On Windows, have the process answer that called `on_request(name)`, if there is one."""
    event = _event(name)
    module("ctypes").windll.kernel32.SetEvent(event)
    module("_winapi").CloseHandle(event)


def _event(name: str) -> int:
    """Make or open an event, which the end of a wait for it resets.

    A handle has 32 significant bits (learn.microsoft.com, "Interprocess Communication Between 32-bit
    and 64-bit Applications").
    """
    event: int = module("ctypes").windll.kernel32.CreateEventW(None, False, False, name)
    if not event:
        raise OSError(f"no event named {name!r} could be made or opened")
    return event


@contextmanager
def kept_open(section: str) -> Iterator[None]:
    """Keep a named section of Windows open within the block. Raises `FileNotFoundError` if it is gone.

    `SharedMemory` opens it twice, and the second time makes a new one, all zeros, if the last process
    that had it open has ended meanwhile (`mmap.mmap(-1, size, tagname=name)`, CPython 3.11 to 3.14).
    """
    windows = module("_winapi")
    if windows is None:
        yield
        return
    handle = windows.OpenFileMapping(windows.FILE_MAP_READ, False, section)
    try:
        yield
    finally:
        windows.CloseHandle(handle)


def machine_memory() -> int:
    """Return the bytes of this machine's memory; 1 TiB if the platform does not report it."""
    try:
        if module("_winapi") is None:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        import ctypes

        # MEMORYSTATUSEX: two 32-bit words (its own length, load), then seven of 64 bits, the first of
        # which is the physical memory (learn.microsoft.com, sysinfoapi.h).
        status = (ctypes.c_uint64 * 8)()
        status[0] = ctypes.sizeof(status)
        kernel = ctypes.windll.kernel32  # type: ignore[attr-defined,unused-ignore]
        if kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
            return int(status[1])
    except (ValueError, OSError):
        pass
    return 1 << 40
