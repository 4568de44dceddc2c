"""Recycled slots: memory that large tensors and arrays are made in, again and again.

Fresh pages, not bytes, are what a loader spends its time on: filling 38 MB of fresh memory takes
some 17 ms, of recycled memory 1 ms. So a slot is mapped once and used again when the last array over
it has died.

Who holds a slot is a count: one for every buffer of this process over it, and, between processes,
one for every batch in which the other side has it. The count goes down only by way of a queue that
finalizers may write to from any thread. At zero the slot is free; nobody ever writes to one that
is not. So a collated tensor that a user's function keeps is safe, in the worker as in the parent.

Where a device reads the batches, the pages of a slot may be locked for it; the end of a holder counts
once the device has read them, then (`buffers/page_locks.py`).

No call here waits. Without a free slot, without room below the limit, or without memory, the answer
is None, and the batch is made in ordinary memory.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridloader.buffers import segments
from hybridloader.buffers.segments import Mapping, Ticket

if TYPE_CHECKING:
    from hybridloader.buffers.page_locks import PageLocks

OWN = 256 * 1024
"""Bytes from which a buffer gets a slot of its own. Smaller ones of a batch share one: copying them
takes less than 25 microseconds each, and a mapping each would cost more."""

IDLE = 64
"""A slot that was passed over so many times is given back."""


class Slot:
    """One piece of memory, and how many hold it; what its pages are locked by, if they are."""

    __slots__ = ("fd", "holders", "last", "locks", "mapping", "number", "ticket")

    def __init__(
        self, number: int, mapping: Mapping, ticket: Ticket | None, fd: int | None
    ) -> None:
        self.number, self.mapping, self.ticket, self.fd = number, mapping, ticket, fd
        self.holders = 0
        self.last = 0
        self.locks: PageLocks | None = None

    def close(self) -> None:
        """Nobody will be told of it any more."""
        if self.fd is not None:
            os.close(self.fd)
        if self.ticket is not None and self.ticket.name is not None:
            segments.unlink(self.ticket.name)
        self.ticket = self.fd = None


def capacity_for(size: int) -> int:
    """Round up to an eighth of a power of two (at least a page), so that slots fit again."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


Made = tuple[Mapping, "Ticket | None", "int | None"]


class Pool:
    """Slots of one process, up to `limit` bytes together.

    Parameters
    ----------
    make
        Makes the memory of a new slot, given its size and number, or raises `OSError`.
    limit
        In bytes.
    locks
        Locks the pages of new slots; None: nobody does.

    Attributes
    ----------
    refusal
        Why the last slot that was wanted could not be had; None as long as all could.
    """

    def __init__(
        self, make: Callable[[int, int], Made], limit: int, locks: PageLocks | None = None
    ) -> None:
        self._make = make
        self._limit = limit
        self.locks = locks
        # All the mutable state:
        self.slots: dict[int, Slot] = {}
        self.size = 0  # bytes of all slots
        self.retired: list[int] = []
        self.refusal: str | None = None
        self._free: list[Slot] = []  # the one that was freed last at the end
        self._left: deque[int] = deque()  # slots whose holder went; filled from any thread
        self.made = 0  # slots, ever
        self._takes = 0

    def empty(self, size: int) -> Any | None:
        """A buffer of `size` bytes over a slot of its own, with anything in it; or None."""
        slot = self.take(size)
        return None if slot is None else self.hold(slot, 0, size)

    def hold(self, slot: Slot, start: int, size: int) -> Any:
        """A buffer over a part of `slot`, which is held until the last view of the buffer dies."""
        buffer = slot.mapping.view(start, size)
        slot.holders += 1
        # It also keeps the mapping alive for as long as there is a view of it.
        gone = partial(_leave, self._left, slot.number, slot.mapping)
        if slot.locks is None:
            done = weakref.finalize(buffer, gone)
        else:
            done = weakref.finalize(buffer, slot.locks.after_device, gone)
        done.atexit = False
        return buffer

    def take(self, size: int) -> Slot | None:
        """A free slot of at least `size` bytes, not yet held; None if there can be none."""
        if self.locks is not None and not self.locks.here:
            self._abandon()
        self._collect()
        self._takes += 1
        best: Slot | None = None
        for slot in reversed(self._free):
            fits = size <= slot.mapping.size <= 2 * capacity_for(size)
            if fits and (best is None or slot.mapping.size < best.mapping.size):
                best = slot
        if best is not None:
            self._free.remove(best)
        else:
            best = self._new(capacity_for(size))
        if best is not None:
            best.last = self._takes
        if self._free and self._takes - self._free[0].last > IDLE:
            self._retire(self._free[0])
        return best

    def drop(self, slot: Slot) -> None:
        """One holder less."""
        self._left.append(slot.number)

    def give_up(self, slot: Slot) -> None:
        """What was taken is not wanted after all."""
        if slot.holders == 0 and slot not in self._free:
            self._free.append(slot)

    def lower(self, limit: int) -> None:
        """Make do with `limit` bytes; what is in use above that goes as it becomes free."""
        self._limit = min(self._limit, limit)

    def close(self) -> None:
        """Forget all slots; their memory goes with the last view of each. There are no more then."""
        self._limit = 0
        self._collect()
        for slot in self.slots.values():
            slot.close()
        self.slots.clear()
        self._free.clear()
        self.size = 0

    def _abandon(self) -> None:
        """In a fork: these slots are the parent's, which would see what is written to them."""
        self.locks = None
        self.slots.clear()
        self._free.clear()
        self._left.clear()
        self.size = 0

    def _collect(self) -> None:
        if self.locks is not None:
            self.locks.collect()
        left = self._left
        while left:
            slot = self.slots.get(left.popleft())
            if slot is None:  # closed meanwhile
                continue
            slot.holders -= 1
            if slot.holders == 0:
                self._free.append(slot)
        while self.size > self._limit and self._free:  # the limit was lowered
            self._retire(self._free[0])

    def _new(self, capacity: int) -> Slot | None:
        in_use = self.size - sum(slot.mapping.size for slot in self._free)
        if in_use + capacity <= self._limit:
            while self.size + capacity > self._limit:
                self._retire(self._free[0])
        else:
            self.refusal = (
                f"slots of {in_use:,} bytes are in use and {capacity:,} more would pass the "
                f"limit of {self._limit:,} bytes"
            )
            return None
        try:
            mapping, ticket, fd = self._make(capacity, self.made)
        except OSError as error:
            self.refusal = f"there is no memory for a slot of {capacity:,} bytes ({error})"
            return None
        slot = Slot(self.made, mapping, ticket, fd)
        if self.locks is not None and self.locks.lock(mapping):
            slot.locks = self.locks
        self.made += 1
        self.size += mapping.size
        self.slots[slot.number] = slot
        return slot

    def _retire(self, slot: Slot) -> None:
        self._free.remove(slot)
        del self.slots[slot.number]
        self.size -= slot.mapping.size
        if slot.ticket is None:  # else nobody has heard of it
            self.retired.append(slot.number)
        slot.close()


def _leave(left: deque[int], number: int, mapping: Mapping) -> None:
    left.append(number)


class PrivateSlots:
    """Slots for workers of this very process; any of its threads may take one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pool = Pool(_make_private, limit)
        self._taking = threading.Lock()

    def page_lock(self, locks: PageLocks) -> None:
        """Lock the pages of all slots, for a consumer that pins. Before the first is taken."""
        self._pool = Pool(_make_lockable, self._limit, locks)

    def empty(self, size: int) -> Any | None:
        """A buffer of `size` bytes, with anything in it; None if there can be none."""
        with self._taking:
            return self._pool.empty(size)

    def close(self) -> None:
        """There are no more; those that are free are given back now, others with their last view.

        Never waits: a finalizer may come here on a thread that is taking one. Then all go with their
        last view.
        """
        if self._taking.acquire(blocking=False):
            try:
                self._pool.close()
            finally:
                self._taking.release()

    @property
    def locks(self) -> PageLocks | None:
        """What locks their pages; None: nothing."""
        return self._pool.locks

    @property
    def refusal(self) -> str | None:
        return self._pool.refusal

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self._pool.size


def _make_private(size: int, number: int) -> Made:
    return segments.make_private(size), None, None


def _make_lockable(size: int, number: int) -> Made:
    return segments.make_private(size, forks_share=True), None, None
