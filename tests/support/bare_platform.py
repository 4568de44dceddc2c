"""Platforms that lack features of Linux, as far as Python code can tell: Windows, and macOS.

In this process for the time of a test (`switch_off` with monkeypatch), and in fresh processes from their
first line: `child_environment` makes them run this file before anything else.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any, NamedTuple


class Lacks(NamedTuple):
    """Names and modules that a platform does not have."""

    names: dict[str, list[str]]  # by module
    modules: tuple[str, ...]
    features: dict[str, Any]  # constants of `system` that follow from the platform's name

    def removed(self) -> list[str]:
        """Return the names and modules that this process does not have any more."""
        names = [f"{m}.{n}" for m, names in self.names.items() for n in names]
        return sorted([*names, *self.modules, "/proc"])


_NO_FILES = {"ROOT": os.devnull, "PROC": f"{os.devnull}/proc"}

MACOS = Lacks(
    {
        "os": ["memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity"],
        "signal": ["SIGRTMIN", "SIGRTMAX", "pidfd_send_signal"],
        "socket": ["SOCK_SEQPACKET", "MSG_CMSG_CLOEXEC"],
        "mmap": ["MADV_HUGEPAGE", "MADV_POPULATE_WRITE"],
    },
    (),
    {**_NO_FILES, "PIDFD": False, "MEMFD": False, "FALLOCATE": False},
)
"""Source: the availability notes of Python's documentation of these modules, and "No AF_UNIX sockets of
type SOCK_SEQPACKET" in macOS's unix(4)."""

WINDOWS = Lacks(
    {
        "os": [
            *MACOS.names["os"], "fork", "forkpty", "RTLD_NOLOAD", "mkfifo", "geteuid", "getuid",
            "killpg", "setsid", "waitid", "pread",
        ],
        "signal": [*MACOS.names["signal"], "SIGINFO", "SIGUSR1", "SIGUSR2", "pthread_kill"],
        "socket": [*MACOS.names["socket"], "send_fds", "recv_fds", "SCM_RIGHTS"],
        "mmap": [*MACOS.names["mmap"], "MADV_DONTNEED"],
    },
    ("fcntl", "resource", "termios", "pwd", "grp"),
    {
        **MACOS.features, "FORK": False, "PREAD": False, "OWNERS": False, "UNIX_SOCKETS": False,
        "NO_LOAD": None,
    },
)  # fmt: skip
"""`os.register_at_fork` stays: torch calls it wherever ``sys.platform`` is not Windows'."""

UNIMPORTABLE = (
    "multiprocessing.popen_fork",
    "multiprocessing.popen_forkserver",
    "multiprocessing.popen_spawn_posix",
    "_posixshmem",
    "_posixsubprocess",
    "pty",
    "syslog",
    "tty",
)
"""Further modules whose import fails on Windows. This system needs them to start a process."""

WITHOUT_SOCKETS = Lacks({}, (), {"UNIX_SOCKETS": False})
"""Connections between processes carry no descriptors, so slots have names."""

PLATFORMS = {"macos": MACOS, "windows": WINDOWS, "without sockets": WITHOUT_SOCKETS}


class Section(shared_memory.SharedMemory):
    """Named memory whose name goes when another process opens it, and at no end of a process.

    On Windows the memory is gone with the last process that has it open.
    """

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
        super().__init__(name, create, size)
        path = f"/{self.name}"
        resource_tracker.unregister(path, "shared_memory")
        if not create:
            importlib.import_module("_posixshmem").shm_unlink(path)


def switch_off(
    platform: str, delete: Callable[[Any, str], None], put: Callable[[Any, str, Any], None]
) -> None:
    """Take away what `platform` lacks; a test passes ways that it may undo."""
    system: Any = importlib.import_module("hybridloader._support.system")
    lacks = PLATFORMS[platform]
    for name, value in lacks.features.items():
        put(system, name, value)
    for module, names in lacks.names.items():
        for name in names:
            if hasattr(importlib.import_module(module), name):
                delete(importlib.import_module(module), name)
    for name in lacks.modules:
        put(sys.modules, name, None)
    system.module.cache_clear()
    if os.name == "posix" and not system.UNIX_SOCKETS:
        put(shared_memory, "SharedMemory", Section)
    if "PROC" not in lacks.features:
        return
    for owner, name in (
        (builtins, "open"),
        (io, "open"),
        (os, "open"),
        (os, "listdir"),
        (os, "stat"),
    ):
        put(owner, name, without_proc(getattr(owner, name)))


@contextmanager
def lacking(platform: str, folder: Path) -> Iterator[None]:
    """Take it away from this process, and from those that it starts meanwhile."""

    def put(owner: Any, name: str, value: Any) -> None:
        (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, value)

    import pytest  # not in the fresh processes that run this file first

    from hybridloader._support import system

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", child_environment(platform, folder))
        switch_off(platform, patch.delattr, put)
        yield
    system.module.cache_clear()


def without_proc(function: Any) -> Any:
    def call(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "there is no /proc", str(path))
        return function(path, *arguments, **named)

    return call


def removed() -> list[str]:
    """Return the names of `WINDOWS` that this process does not have."""
    found = [
        f"{m}.{name}"
        for m, names in WINDOWS.names.items()
        for name in names
        if not hasattr(importlib.import_module(m), name)
    ]
    found += [name for name in WINDOWS.modules if sys.modules.get(name, name) is None]
    return sorted(found + ([] if os.path.exists("/proc/self/status") else ["/proc"]))


def child_environment(platform: str, folder: Path) -> str:
    """The ``PYTHONPATH`` of processes that shall be so, too."""
    (folder / "sitecustomize.py").write_text(
        f"import runpy\nrunpy.run_path({__file__!r}, run_name='as {platform}')\n"
    )
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


if __name__.startswith("as "):
    switch_off(__name__.removeprefix("as "), delattr, _put)
