"""Limit of the finished results that wait for a late one.

Results are returned in the order of their tasks. While one of them is late, the following ones wait, and
workers do other tasks up to this limit (decision 27).
"""

from __future__ import annotations

from hybridloader._support.user_objects import size_of
from hybridloader.engine.messages import Done, Result
from hybridloader.engine.payload import ByReference, known_bytes

TASKS = 64
"""Results per worker that may wait: one task may take as long as 64 others before a worker becomes
idle."""

BYTES = 1 << 28
"""Bytes of results that may wait, 256 MiB: 64 of 4 MB, such as batches of 32 images of 180 x 240."""

PAGES = 2e9
"""Bytes of fresh memory per second. A waiting result keeps its memory, so the next one needs other
pages, which are new, or at least not in the cache. If allocating these takes longer than computing the
result, the worker pauses (decision 27)."""


class ReorderLimit:
    """Limit of the results of one stage that wait for a late one, in tasks and in bytes.

    The bytes are an estimate: each result counts as much as the largest recent one. A result is measured
    only when a worker has nothing to do, so a stage that never stalls measures none.
    """

    def __init__(self, workers: int, nbytes: int = BYTES) -> None:
        self.tasks, self.nbytes = TASKS * workers, nbytes
        self._largest = 0

    def extra(self, done: dict[int, Result]) -> int:
        """Return how many results may wait, if those in `done` do, in the order in which they came."""
        newest = done[next(reversed(done))]
        if isinstance(newest, Done):
            payload = newest.payload
            size = known_bytes(payload)
            if isinstance(payload, ByReference):
                size = size_of(payload.peek())
            self._largest = max(size, self._largest * 7 // 8)
            if newest.seconds * PAGES < size:
                return 0
        return min(self.tasks, self.nbytes // max(1, self._largest))
