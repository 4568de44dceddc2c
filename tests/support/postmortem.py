"""Worker processes with a postmortem record, and no crew."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hybridloader.backends.process.postmortem import PostmortemRecord, PostmortemWriter

PATIENCE = 60.0
"""Seconds; never reached when all is well."""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc")


class Child:
    """A forked process with the worker's side of a record, and a pipe each way."""

    def __init__(self, record: PostmortemRecord, body: Callable[[Child], Any]) -> None:
        self.here, there = os.pipe(), os.pipe()
        self.told, self.tell = there[0], self.here[1]
        self.read_end, self.write_end = self.here[0], there[1]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self.read_end)
                os.close(self.write_end)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)  # what dying processes have to say
                side = PostmortemWriter.open(record.fd)
                assert side is not None
                self.side = side
                body(self)
                code = 0
            finally:
                os._exit(code)
        os.close(self.told)
        os.close(self.tell)

    # in the child
    def stuck(self) -> None:
        """Says so, and is, until the parent lets it go."""
        os.write(self.tell, b"!")
        os.read(self.told, 1)

    # in the parent
    def hear(self) -> bytes:
        return os.read(self.read_end, 1)

    def let_go(self) -> None:
        os.write(self.write_end, b"!")

    def end(self) -> int:
        """The exit code of `os.waitstatus_to_exitcode`."""
        os.close(self.write_end)
        os.close(self.read_end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def child(record: PostmortemRecord, body: Callable[[Child], Any]) -> Iterator[Child]:
    made = Child(record, body)
    ended = False
    try:
        yield made
        ended = True
        assert made.end() == 0
    finally:
        if not ended:
            os.kill(made.pid, signal.SIGKILL)
            made.end()


def crash_in_native_code() -> None:
    ctypes.string_at(0)
