"""Worker processes as their parent has them: how they are started, asked, ended and waited for.

Knows nothing of what a worker does, nor of the connection to it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hybridloader.backends.child import alive

GRACE = 1.0
"""Seconds that a worker gets to finish its sample before it is terminated, then killed."""


@contextmanager
def interrupts_held_back(forks: bool) -> Iterator[None]:
    """Hold Ctrl-C back, from a process that starts within the block too: it inherits the mask.

    Until that has its own handler, Ctrl-C would end it with a traceback of its own.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if not forks:
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # else `start` does it, and that lifts the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_LOOK = 1e-2
"""Seconds at most between two looks at a process whose files are all closed. It is about to be gone,
unless the user's code has closed them, ours too, and goes on: so nobody waits for it by `waitpid`."""

reaping = threading.RLock()
"""Held while a process is started or asked how it ended. multiprocessing asks about all its children
whenever it starts one, and what it learns on one thread is not there on another for a moment: the child
seems to be alive, and its number is nobody's, or somebody else's. Stages of a pipeline run on several
threads."""


class ProcessHandle:
    """A worker process; also what tells how it ended."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.name = "process"

    @property
    def pid(self) -> int | None:
        return self._process.pid  # type: ignore[no-any-return]

    def is_alive(self) -> bool:
        with reaping:
            return self._process.is_alive()  # type: ignore[no-any-return]

    def terminate(self) -> None:
        with reaping:
            self._process.terminate()

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        if multiprocessing.connection.wait([self._process.sentinel], timeout):
            pause = _LOOK / 100
            # What somebody else has waited for seems to be alive for ever.
            while self.is_alive() and alive(self._process.pid):
                if deadline is not None and time.monotonic() >= deadline:
                    return
                time.sleep(pause)
                pause = min(2 * pause, _LOOK)

    def kill(self) -> None:
        """SIGKILL where there is one (`LokyProcess.kill` raises AttributeError in loky 3.7)."""
        with reaping:
            if hasattr(signal, "SIGKILL") and self.is_alive():
                os.kill(self._process.pid, signal.SIGKILL)
            else:
                self._process.terminate()

    def disown(self) -> None:
        """Take it off the list of those that multiprocessing ends when this process exits."""
        children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]
        children.discard(self._process)

    def cause(self) -> str:
        """How it ended, for a worker that was not asked to."""
        self.join(GRACE)
        code = self._process.exitcode
        if code is None:
            if not self.is_alive():
                return "ended; its exit code is not known"
            self.kill()
            self.join(GRACE)
            return "closed its connection while it was running, and was killed"
        if code < 0:
            try:
                return f"was killed by signal {signal.Signals(-code).name} ({-code})"
            except ValueError:
                return f"was killed by signal {-code}"
        return f"exited with code {code}"


def join_all(handles: Sequence[ProcessHandle], deadline: float) -> None:
    """Join each, until `deadline` by `time.monotonic`."""
    for handle in handles:
        handle.join(max(0.0, deadline - time.monotonic()))
