"""Slots whose pages are locked: of the consumer, and of a worker with its parent."""

from __future__ import annotations

import torch

from hybridloader.engine import PrivateSlots
from support.slot_pairs import OWN, PageLocks, page_locks, tensor_over, writer_and_reader

__all__ = ["OWN", "PageLocks", "page_locks"]

LARGE = 1 << 40


class Private:
    """Slots of inline and threaded workers."""

    def __init__(self, locks: PageLocks, limit: int = LARGE) -> None:
        self.slots = PrivateSlots(limit)
        self.slots.page_lock(locks)
        self.lower, self.close = self.slots.pool.lower, self.slots.close

    def batch(self, value: int, size: int = OWN) -> torch.Tensor | None:
        """A new batch that is full of `value`; None if there is no slot for it."""
        buffer = self.slots.empty(size)
        return None if buffer is None else tensor_over(buffer, torch.uint8, (size,)).fill_(value)


class Shared:
    """Slots of one worker process, and its parent, in one process."""

    def __init__(self, locks: PageLocks, limit: int = LARGE) -> None:
        self.writer, self.reader = writer_and_reader(limit, limit, locks=locks)
        self.lower = self.writer.lower

    def batch(self, value: int, size: int = OWN) -> torch.Tensor | None:
        self.writer.release(self.reader.returned())
        slot_map, fds = self.writer.write([memoryview(bytes([value]) * size)])
        self.reader.learn(slot_map, fds)
        if slot_map.spans == (None,):
            return None
        [buffer] = self.reader.buffers(slot_map, [])
        return tensor_over(buffer, torch.uint8, (size,))

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


def address(batch: torch.Tensor | None) -> int:
    assert batch is not None
    return batch.data_ptr()
