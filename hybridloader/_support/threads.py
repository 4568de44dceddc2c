"""Tools for code on several threads: waits, joins, snapshots, the global interpreter lock."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import TypeVar

from hybridloader._support import system

REMEMBERED = 4096  # number of waits, or of spans, that a ring keeps

Pause = tuple[float, float]  # begin and end of a wait


class Waits:
    """Waits of one thread, by `time.perf_counter`. One thread notes them, any thread may read.

    Waits of fewer than `brief` seconds are only summed.
    """

    def __init__(self, brief: float = 0.0) -> None:
        # All the mutable state:
        self.brief = brief
        self.longer = 0  # number of the others
        self.brief_seconds = self.longer_seconds = 0.0
        self.ring: deque[Pause] = deque(maxlen=REMEMBERED)  # a trace puts another in its place

    def note(self, began: float, ended: float) -> None:
        """Note a wait."""
        seconds = ended - began
        if seconds < self.brief:
            self.brief_seconds += seconds
        else:
            self.longer += 1
            self.longer_seconds += seconds
            self.ring.append((began, ended))

    @property
    def waited(self) -> float:
        """Seconds of all waits."""
        return self.brief_seconds + self.longer_seconds

    @property
    def latest(self) -> tuple[Pause, ...]:
        """Begin and end of the latest longer waits, in order."""
        return snapshot(self.ring)


T = TypeVar("T")


def snapshot(things: Collection[T]) -> tuple[T, ...]:
    """Return the content of a deque, or of a weak collection, to which other threads may add."""
    while True:
        try:
            return tuple(things)
        except RuntimeError:  # "changed size during iteration"
            continue


_ENDING = 0.5
"""Longest wait for the kernel, in seconds. It takes microseconds, and more only if no core is free."""


def join(thread: threading.Thread, timeout: float | None = None) -> None:
    """Join a thread that was started, until the kernel has ended it, too.

    Before Python 3.13, `Thread.join` returns when the thread has left Python. After that, native
    libraries free the memory of the thread, and hold locks for it. A fork at that moment copies a locked
    lock, and the forked process waits for it without end. In 3 of 10 forks right after four threads had
    used `torch.fft`, the next `torch.fft.rfft` never returned (torch 2.13 with MKL). Half a second
    later, it returned in 40 of 40.

    With a `timeout` in seconds, the thread may still be alive afterwards.
    """
    thread.join(timeout)
    if thread.is_alive():
        return
    listed = f"{system.PROC}/self/task/{thread.native_id}"  # missing where nothing lists threads
    deadline = time.monotonic() + _ENDING
    while os.path.exists(listed) and time.monotonic() < deadline:
        time.sleep(0.0001)


def gil_enabled() -> bool:
    """Return False if threads of this process run Python code at the same time.

    That is so in a free-threaded Python, until an extension is imported that needs the lock.
    """
    known = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13 on
    return known is None or bool(known())


def turn_at_gil() -> float:
    """Return the seconds after which a thread that waits for the lock asks for it; or infinity."""
    return sys.getswitchinterval() if gil_enabled() else math.inf
