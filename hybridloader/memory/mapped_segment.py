"""A segment of another process, as its reader sees it: its memory, and who has to hear of its end.

It counts nothing that the writer has to know: that is `arena.Reader`'s. Its pages may be locked for a
device, from the first batch that is opened over it until its end.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from hybridloader.memory.segments import Mapping

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks


class Keeper(Protocol):
    """A descriptor that is kept, for processes that may have to map its segment later."""

    def close(self) -> None: ...

    def duplicate(self) -> int | None:
        """Return another descriptor of the same segment, for the caller; None if it is closed."""


class Listener(Protocol):
    """Interface of an object that has told a third process of a segment."""

    def forget(self, alias: int) -> None:
        """Note that the segment is gone. Called from any thread."""


_aliases = itertools.count(-1, -1)
_lendings = itertools.count()


class MappedSegment:
    """A segment as its reader sees it: slots of `capacity` bytes, one behind the other.

    Attributes
    ----------
    mapping
        Its memory, or why it could not be mapped.
    capacity
        Of each slot in it, in bytes.
    alias
        Its number for processes other than reader and writer: below 0, and no other segment that this
        process knows has it.
    kept
        Its descriptor, if it was kept.
    listeners
        Who has told others of it.
    locks
        What its pages are locked by, if they are.
    """

    __slots__ = (
        "_ended", "_lent", "_tried", "alias", "capacity", "kept", "listeners", "locks", "mapping"
    )  # fmt: skip

    def __init__(self, mapping: Mapping | OSError, kept: Keeper | None, capacity: int) -> None:
        self.mapping, self.kept, self.capacity = mapping, kept, capacity
        self.alias = next(_aliases)
        self.listeners: set[Listener] = set()
        self.locks: PageLocks | None = None
        self._tried = self._ended = False
        self._lent: set[int] = set()  # batches over it that are open; finalizers take them out

    def mapped(self) -> Mapping:
        if isinstance(self.mapping, OSError):
            raise MemoryError(f"a slot of shared memory can't be mapped here: {self.mapping}")
        return self.mapping

    def slot(self, place: int) -> Any:
        """One slot, whole. The mapping must outlive it."""
        mapping, start = self.mapped(), place * self.capacity
        if start + self.capacity > mapping.size:
            raise IndexError(f"a segment of {mapping.size:,} bytes has no slot {place}")
        return mapping.view(start, self.capacity)

    def view(self, place: int, start: int, size: int) -> memoryview:
        """A part of one slot. The caller must hold the slot in another way."""
        mapping = self.mapped()
        holder = mapping.view(place * self.capacity + start, size)
        weakref.finalize(holder, id, mapping).atexit = False  # mapped for as long as the view lives
        return memoryview(holder).cast("B")

    def lend(self) -> int:
        """Note that a batch over it is open; for `give_back`."""
        lent = next(_lendings)
        self._lent.add(lent)
        return lent

    def give_back(self, lent: int) -> None:
        """Neither that batch nor the device looks at it any more. From any thread."""
        self._lent.discard(lent)
        if self._ended:
            self.unlock_soon()

    def lock(self, locks: PageLocks) -> None:
        """Lock its pages; it is tried once."""
        if not self._tried:
            self._tried = True
            if locks.lock(self.mapped()):
                self.locks = locks

    def unlock_soon(self) -> None:
        """Unlock its pages as soon as no batch over it is open."""
        self._ended = True  # first this: a finalizer on another thread does it the other way round
        if self.locks is not None and not self._lent:
            self.locks.unlock(self.mapped())

    def unkeep(self) -> None:
        """Let go of the descriptor."""
        if self.kept is not None:
            self.kept.close()
            self.kept = None

    def end(self) -> None:
        """It is gone, or nobody will send it any more."""
        self.unkeep()
        for listener in list(self.listeners):
            listener.forget(self.alias)
        self.listeners.clear()
