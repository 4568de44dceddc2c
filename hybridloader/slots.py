"""Recycled slots: memory that large tensors and arrays are made in, again and again.

Fresh pages, not bytes, are what a loader spends its time on: filling 38 MB of fresh memory takes
some 17 ms, of recycled memory 1 ms. So a slot is mapped once and used again when the last array over
it has died.

Who holds a slot is a count: one for every buffer of this process over it, and, between processes,
one for every batch in which the other side has it. The count goes down only by way of a queue that
finalizers may write to from any thread. At zero the slot is free; nobody ever writes to one that
is not. So a collated tensor that a user's function keeps is safe, in the worker as in the parent.

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
from typing import Any

from hybridloader import segments
from hybridloader.segments import Mapping, Ticket

OWN = 256 * 1024
"""Bytes from which a buffer gets a slot of its own. Smaller ones of a batch share one: copying them
takes less than 25 microseconds each, and a mapping each would cost more."""

IDLE = 64
"""A slot that was passed over so many times is given back."""


class Slot:
    """One piece of memory, and how many hold it."""

    __slots__ = ("fd", "holders", "last", "mapping", "number", "ticket")

    def __init__(
        self, number: int, mapping: Mapping, ticket: Ticket | None, fd: int | None
    ) -> None:
        self.number, self.mapping, self.ticket, self.fd = number, mapping, ticket, fd
        self.holders = 0
        self.last = 0

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

    Attributes
    ----------
    refusal
        Why the last slot that was wanted could not be had; None as long as all could.
    """

    def __init__(self, make: Callable[[int, int], Made], limit: int) -> None:
        self._make = make
        self._limit = limit
        # All the mutable state:
        self.slots: dict[int, Slot] = {}
        self.size = 0  # bytes of all slots
        self.retired: list[int] = []
        self.refusal: str | None = None
        self._free: list[Slot] = []  # the one that was freed last at the end
        self._left: deque[Slot] = deque()  # holders that went; filled from any thread
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
        # The finalizer also keeps the mapping alive for as long as there is a view of it.
        weakref.finalize(buffer, self._left.append, slot).atexit = False
        return buffer

    def take(self, size: int) -> Slot | None:
        """A free slot of at least `size` bytes, not yet held; None if there can be none."""
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
        self._left.append(slot)

    def give_up(self, slot: Slot) -> None:
        """What was taken is not wanted after all."""
        if slot.holders == 0 and slot not in self._free:
            self._free.append(slot)

    def lower(self, limit: int) -> None:
        """Make do with `limit` bytes; what is in use above that goes as it becomes free."""
        self._limit = min(self._limit, limit)

    def close(self) -> None:
        """Forget all slots; their memory goes with the last view of each."""
        for slot in self.slots.values():
            slot.close()
        self.slots.clear()
        self._free.clear()

    def _collect(self) -> None:
        left = self._left
        while left:
            slot = left.popleft()
            slot.holders -= 1
            if slot.holders == 0 and slot.number in self.slots:
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


class PrivateSlots:
    """Slots for workers of this very process; any of its threads may take one."""

    def __init__(self, limit: int) -> None:
        self._pool = Pool(lambda size, number: (segments.make_private(size), None, None), limit)
        self._taking = threading.Lock()

    def empty(self, size: int) -> Any | None:
        """A buffer of `size` bytes, with anything in it; None if there can be none."""
        with self._taking:
            return self._pool.empty(size)

    @property
    def refusal(self) -> str | None:
        return self._pool.refusal

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self._pool.size
