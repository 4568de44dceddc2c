"""Conditions under which a worker process is started, so that it begins as a worker should.

This module does not know which process that is, nor its work.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hybridloader.backends.process import handles
from hybridloader.backends.process.parent_watch import LEFT_TO_PARENT
from hybridloader.memory.forks import forks


@contextmanager
def starting(method: str) -> Iterator[None]:
    """Start one process within the block, by start method `method`, and note it in the same block."""
    held_back, flushed = _signals_held_back(method), _streams_to_flush(method)
    with handles.reaping, held_back, flushed, _warned_by_us(method), forks.of_ours():
        yield


def occupy_standard_descriptors() -> None:
    """Open os.devnull for stdin, stdout and stderr where they are closed, as in some daemons.

    Otherwise a descriptor of ours gets such a number, here or in a worker, and native code writes
    its messages to it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == fd:
                os.set_inheritable(fd, True)
            else:  # another thread was faster
                os.close(opened)


@contextmanager
def _signals_held_back(method: str) -> Iterator[None]:
    """Hold SIGINT and SIGTERM back, also from a process that starts within the block.

    The new process inherits the mask. Until it has its own handlers, Ctrl-C would end it with a
    traceback of its own, and SIGTERM to all processes of a job would end it before this process
    could act on the signal.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if method != "fork":
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # else `start` does it, and that lifts the mask
    if method == "forkserver":
        from multiprocessing import forkserver

        forkserver.ensure_running()  # else it would have the mask, and all that it ever forks
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # Within the block: it runs the handlers of signals that have come, which may raise.
        signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _warned_by_us(method: str) -> Iterator[None]:
    """Leave out the warning of Python 3.12 that a fork beside other threads may hang.

    Ours (`Fork.check`) names these threads, and not those that a fork can do without.
    """
    if method != "fork":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield


@contextmanager
def _streams_to_flush(method: str) -> Iterator[None]:
    """Give loky a usable `sys.stdout` and `sys.stderr` to flush when it starts a process."""
    before = sys.stdout, sys.stderr
    usable = [s is not None and not getattr(s, "closed", False) for s in before]
    if method != "loky" or all(usable):
        yield
        return
    with open(os.devnull, "w") as nowhere:
        sys.stdout, sys.stderr = (s if u else nowhere for s, u in zip(before, usable, strict=True))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
