"""Descriptors of the parent: those that a forked worker must close, and kept ones of segments.

Each process that maps a segment needs its descriptor once. A parent that opens the results does not
need the descriptor again. A parent that forwards them to another stage needs it until each worker there
has mapped the segment. The whole process keeps a bounded number of descriptors, so that the user has
most of ``ulimit -n``. A slot without a descriptor is copied, which is slower and equally correct.
"""

from __future__ import annotations

import os
import threading
from functools import cache

from hybridloader._support import system

MOST = 256  # maximum number of kept descriptors: 256 segments of 38 MB are 10 GB
_SHARE = 4  # divisor of the descriptors that this process may open

ours: set[int] = set()
"""All descriptors of backends in this process. In a forked worker they would keep memory alive, and hide
from other workers that the parent's end of their connection is closed."""

kept: set[int] = set()  # descriptors of segments; they are among `ours`

_lock = threading.RLock()  # reentrant, because a collection may end a crew at any point


def _fresh_lock() -> None:
    global _lock
    _lock = threading.RLock()  # a copy from the parent may stay locked forever


system.at_fork(after_in_child=_fresh_lock)


@cache
def _most() -> int:
    limit = system.soft_limit("RLIMIT_NOFILE")
    return MOST if limit is None else min(MOST, limit // _SHARE)


class KeptDescriptor:
    """Kept descriptor of a segment. One thread may close it while another duplicates it."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def duplicate(self) -> int | None:
        """Return a duplicate that the caller owns; None if this one is closed or no number is free."""
        with _lock:
            if self._fd is None:
                return None
            try:
                return os.dup(self._fd)
            except OSError:
                return None

    def close(self) -> None:
        with _lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                kept.discard(fd)
                ours.discard(fd)
                os.close(fd)


def keep_descriptor(fd: int) -> KeptDescriptor | None:
    """Take ownership of `fd`; return None, and leave `fd` to the caller, if enough are kept."""
    with _lock:
        if len(kept) >= _most():
            return None
        kept.add(fd)
        ours.add(fd)
        return KeptDescriptor(fd)
