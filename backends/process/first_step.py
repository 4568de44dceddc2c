"""First step of a fresh process: to import its function, and to report an error of the import.

Multiprocessing and loky import the function while they load a process's arguments. An error there only
goes to stderr. So this module imports as little as possible.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from hybridloader._support import system
from hybridloader._support.user_objects import described, traceback_of

RAISED = "\nEnded by: "
"""Beginning of the text about an exception that ended the worker: the exception, and its traceback."""


class FirstStep(NamedTuple):
    """Target of a process, which is `function` there. It must be sent before other arguments."""

    function: Callable[..., Any]
    connection: Any  # the process's end
    recorded: bool | str  # as `child.FirstFrame` has it

    def __reduce__(self) -> tuple[Any, ...]:
        name = self.function.__module__, self.function.__name__
        return _imported, (*name, self.connection, self.recorded)


def _imported(module: str, name: str, connection: Any, recorded: bool | str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except BaseException as error:
        if isinstance(recorded, str):
            record_end(open_record(recorded), error)
        elif recorded:
            own = os.dup(connection.fileno())
            with socket.socket(fileno=own) as sock:
                _, fds, flags, _ = socket.recv_fds(sock, 1, 253)  # as `frames.MOST_FDS`
            if fds and not flags & socket.MSG_CTRUNC:
                record_end(fds[-1], error)
        raise


def open_record(path: str, flags: int = os.O_APPEND) -> int:
    """Open the file of a record by its path. By default, each write appends to it."""
    return os.open(path, os.O_RDWR | system.BINARY | system.TEMPORARY | flags)


def record_end(record: int, error: BaseException) -> None:
    """Write an exception that is about to end this process to its postmortem record."""
    line, _, _ = described(error).partition("\n")
    text = f"{RAISED}{line}\n{traceback_of(error)}"
    with suppress(OSError):  # no room
        os.write(record, text.encode("utf-8", "backslashreplace"))
