"""Segments of another process, as their reader sees them: the memory, and who is to hear of its end.

A mapped segment counts nothing that the writer has to know: that is `shared_slots.SlotReader`'s. Its
pages may be locked for a device, from the first batch that is opened over it until its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hybridloader.memory.descriptors import KeptDescriptor
from hybridloader.memory.segments import Mapping

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks


_aliases = itertools.count(-1, -1)
_lendings = itertools.count()


class MappedSegment:
    """A segment as its reader sees it: slots of `capacity` bytes, one behind the other.

    `alias` is its number for processes other than reader and writer: below 0, and no other segment that
    this process knows has it. `listeners` are called with it when the segment is gone, from any thread:
    their processes know it, too.
    """

    def __init__(
        self,
        mapping: Mapping | OSError,  # the memory, or the error why it could not be mapped
        kept: KeptDescriptor | None,  # the descriptor, if it was kept
        capacity: int,
    ) -> None:
        self.mapping, self.kept, self.capacity = mapping, kept, capacity
        self.alias = next(_aliases)
        self.listeners: set[Callable[[int], None]] = set()
        self.locks: PageLocks | None = None  # None: its pages are not locked
        self._lock_asked = self._ended = False
        self._lent: set[int] = set()  # batches over it that are open; finalizers take them out

    def mapped(self) -> Mapping:
        """The memory. Raises `MemoryError` if it could not be mapped."""
        if isinstance(self.mapping, OSError):
            raise MemoryError(f"a slot of shared memory can't be mapped here: {self.mapping}")
        return self.mapping

    def slot(self, place: int) -> Any:
        """Return one slot, whole. The mapping must outlive it."""
        mapping, start = self.mapped(), place * self.capacity
        if start + self.capacity > mapping.size:
            raise IndexError(f"a segment of {mapping.size:,} bytes has no slot {place}")
        return mapping.view(start, self.capacity)

    def view(self, place: int, start: int, size: int) -> memoryview:
        """Return a part of one slot. The caller must keep the slot in use in another way."""
        return self.mapped().lasting_view(place * self.capacity + start, size)

    def lend(self) -> int:
        """Note that a batch over it is open; the number is for `give_back`."""
        lent = next(_lendings)
        self._lent.add(lent)
        return lent

    def give_back(self, lent: int) -> None:
        """Note that neither that batch nor the device looks at it any more. From any thread."""
        self._lent.discard(lent)
        if self._ended:
            self.unlock_soon()

    def lock(self, locks: PageLocks) -> None:
        """Lock the pages. The driver is asked once; a second call does nothing."""
        if not self._lock_asked:
            self._lock_asked = True
            if locks.lock(self.mapped()):
                self.locks = locks

    def unlock_soon(self) -> None:
        self._ended = True  # first this: a finalizer on another thread does it the other way round
        if self.locks is not None and not self._lent:
            self.locks.unlock(self.mapped().address)

    def unkeep(self) -> None:
        if self.kept is not None:
            self.kept.close()
            self.kept = None

    def end(self) -> None:
        """Tell all listeners that it is gone, or that nobody will forward it any more."""
        self.unkeep()
        for listener in list(self.listeners):
            listener(self.alias)
        self.listeners.clear()
