"""Forks of this process by the user's code: each child may keep the batches that are open then.

Forked workers do not count, because they read no batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hybridloader._support import system


class _OfThisThread(threading.local):
    ours = False  # this thread is forking a worker


class Forks:
    """Mark of the latest fork. Two equal marks mean that there was no fork between them."""

    def __init__(self) -> None:
        self.latest = object()  # not a counter: two threads that fork at once might count one fork
        self._thread = _OfThisThread()

    def note(self) -> None:
        """Record a fork by the user's code."""
        if not self._thread.ours:
            self.latest = object()

    @contextmanager
    def of_ours(self) -> Iterator[None]:
        """Do not count the forks that this thread makes within the block."""
        self._thread.ours = True
        try:
            yield
        finally:
            self._thread.ours = False


forks = Forks()

# Before the fork too: another thread may release a batch that the fork has just copied.
system.at_fork(before=forks.note, after_in_parent=forks.note)
