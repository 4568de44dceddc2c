"""Descriptors of the parent: those that a forked worker must close, and kept ones of segments.

A segment needs its descriptor once for every process that maps it. Results that are opened in the
parent never need it again; results that are forwarded to another stage need it until every worker
there has mapped the segment. The number that is kept is bounded for the whole process, so that
``ulimit -n`` is left to the user: without a descriptor a slot is copied, slower and never wrong.
"""

from __future__ import annotations

import os
import threading
from functools import cache

MOST = 256  # descriptors kept at most, whatever the limit: 256 segments of 38 MB are 10 GB
_SHARE = 4  # divisor of the descriptors that this process may have

ours: set[int] = set()
"""All descriptors of backends that are this process's own. In a forked worker they would keep memory
alive, and other workers from seeing that our end of their connection is closed."""

kept: set[int] = set()  # descriptors of segments; they are among `ours`

_lock = threading.RLock()  # reentrant, because a collection may end a crew at any point


def _fresh_lock() -> None:
    global _lock
    _lock = threading.RLock()  # the one that a fork has copied may be held for ever


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)


@cache
def _most() -> int:
    import resource  # where descriptors travel there is this module

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(MOST, soft // _SHARE)


class KeptDescriptor:
    """Kept descriptor of a segment. One thread may close it while another duplicates it."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def duplicate(self) -> int | None:
        """Make another one, for the caller; None if this one was closed, or there is no room."""
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
    """Take over `fd`; None if enough are kept already, and then it stays the caller's."""
    with _lock:
        if len(kept) >= _most():
            return None
        kept.add(fd)
        ours.add(fd)
        return KeptDescriptor(fd)
