"""A platform that has nothing of POSIX beyond what Windows has too, as far as Python code can tell.

In this process for the time of a test (`switch_off` with monkeypatch), and in fresh processes from their
first line: `child_environment` is what makes them run this file before anything else.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MISSING = {
    "os": [
        "fork", "forkpty", "memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity",
        "RTLD_NOLOAD", "mkfifo", "geteuid", "getuid", "killpg", "setsid", "waitid",
    ],
    "signal": [
        "SIGRTMIN", "SIGRTMAX", "SIGINFO", "SIGUSR1", "SIGUSR2", "pidfd_send_signal", "pthread_kill",
    ],
    "socket": ["send_fds", "recv_fds", "SCM_RIGHTS"],
    "mmap": ["MADV_HUGEPAGE", "MADV_DONTNEED", "MADV_POPULATE_WRITE"],
}  # fmt: skip
"""`os.register_at_fork` stays: torch calls it wherever ``sys.platform`` is not Windows'."""

NO_MODULES = ("fcntl", "resource", "termios", "pwd", "grp")


def switch_off(delete: Callable[[Any, str], None], put: Callable[[Any, str, Any], None]) -> None:
    """Take away `MISSING` and `NO_MODULES`; a test passes ways that it may undo."""
    for module, names in MISSING.items():
        for name in names:
            if hasattr(__import__(module), name):
                delete(__import__(module), name)
    for name in NO_MODULES:
        put(sys.modules, name, None)
    for owner, name in (
        (builtins, "open"),
        (io, "open"),
        (os, "open"),
        (os, "listdir"),
        (os, "stat"),
    ):
        put(owner, name, without_proc(getattr(owner, name)))


def without_proc(function: Any) -> Any:
    def call(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "there is no /proc", str(path))
        return function(path, *arguments, **named)

    return call


def there() -> list[str]:
    """Return the names that have not been taken away."""
    found = [
        f"{m}.{name}"
        for m, names in MISSING.items()
        for name in names
        if hasattr(__import__(m), name)
    ]
    found += [name for name in NO_MODULES if sys.modules.get(name, name) is not None]
    return found + (["/proc"] if os.path.exists("/proc/self/status") else [])


def child_environment(folder: Path) -> str:
    """The ``PYTHONPATH`` of processes that shall be so, too."""
    (folder / "sitecustomize.py").write_text(
        f"import runpy\nrunpy.run_path({__file__!r}, run_name='in a fresh process')\n"
    )
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


if __name__ == "in a fresh process":
    switch_off(delattr, _put)
