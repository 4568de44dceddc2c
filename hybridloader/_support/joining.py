"""Joining a thread until the kernel has ended it, too.

Before Python 3.13, `Thread.join` returns when the thread has left Python. After that, native libraries
free the memory of the thread, and hold locks for it. A fork at that moment copies a locked lock, and
the forked process waits for it without end. In 3 of 10 forks right after four threads had used
`torch.fft`, the next `torch.fft.rfft` never returned (torch 2.13 with MKL). Half a second later, it
returned in 40 of 40.
"""

from __future__ import annotations

import os
import threading
import time

from hybridloader._support import system

_ENDING = 0.5
"""Longest wait for the kernel, in seconds. It takes microseconds, and more only if no core is free."""


def join(thread: threading.Thread, timeout: float | None = None) -> None:
    """Join a thread that was started. With a `timeout` in seconds, it may still be alive afterwards."""
    thread.join(timeout)
    if thread.is_alive():
        return
    listed = f"{system.PROC}/self/task/{thread.native_id}"  # missing where nothing lists threads
    deadline = time.monotonic() + _ENDING
    while os.path.exists(listed) and time.monotonic() < deadline:
        time.sleep(0.0001)
