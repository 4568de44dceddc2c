"""Forks of this process that the user's code makes: each may keep the batches that are open then.

Our own workers are forks, too; they are left out, because they look at no batch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _OfThisThread(threading.local):
    ours = False  # a worker of ours is being forked


class Forks:
    """Mark of the latest fork. Two equal marks mean that there was no fork between them."""

    def __init__(self) -> None:
        self.latest = (
            object()
        )  # no count: of two threads that fork at once, one would not be counted
        self._thread = _OfThisThread()

    def note(self) -> None:
        """Mark a fork by the user's code."""
        if not self._thread.ours:
            self.latest = object()

    @contextmanager
    def of_ours(self) -> Iterator[None]:
        """Leave out the forks that this thread makes within the block."""
        self._thread.ours = True
        try:
            yield
        finally:
            self._thread.ours = False


forks = Forks()

if hasattr(os, "register_at_fork"):
    # Before it, too: another thread may let go of a batch that the fork has just copied.
    os.register_at_fork(before=forks.note, after_in_parent=forks.note)
