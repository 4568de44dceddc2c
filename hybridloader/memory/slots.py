"""Slots: memory that is reused for large tensors and arrays.

A loader spends more time on fresh pages than on bytes (docs/design.md has figures). So a slot is
mapped once, and reused when the last array over it has died.

A slot counts its references: one for each buffer of this process over it, and one for each batch in
which another process has it. Only a queue that finalizers may write to from any thread lowers the
count. At zero the slot is free, and only free slots are written to. So a collated tensor that a user's
function keeps is safe, in the worker and in the parent.

No call here waits. It returns None if no slot is free and the limit or the system allows no new one;
the batch is then made in ordinary memory.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from hybridloader._support import system
from hybridloader.memory import segments
from hybridloader.memory.limits import warn_of_overflow
from hybridloader.memory.segments import Mapping, Ticket

OWN = 256 * 1024
"""Bytes from which a buffer gets its own slot. Smaller buffers of a batch share one: copying a buffer
takes less than 25 microseconds, and its own slot would cost more."""

IDLE = 64
"""Number of takes, and four more for each slot, after which an unused slot is given back. A batch may
take 40 slots: mapping them again for each batch doubles its time."""

MOST = 512
"""Most slots of a pool. Linux allows a process 65,530 mappings (vm.max_map_count), which batches of
36 KB that a program keeps would use up at 2.4 GB. Further batches are made in ordinary memory."""

KEPT = 1 << 62
"""Bit in the number of a returned slot that must not be filled again: a forked process may read it."""

Made = tuple[Mapping, "Ticket | None", "int | None"]


class Slot:
    """One mapping of `capacity` bytes."""

    def __init__(self, number: int, capacity: int, made: Made) -> None:
        self.number, self.capacity = number, capacity
        self.mapping, self.ticket, fd = made  # no ticket: the reader knows the slot
        self._fds = [] if fd is None else [fd]
        self.references = 0
        self.kept = False  # it must not become free again
        self.freed = 0  # number of takes when it became free

    def hand_over(self) -> list[int]:
        """Return the descriptor, if there is one, once; the caller closes it. From any thread."""
        self.ticket = None
        try:
            return [self._fds.pop()]  # atomic: two threads never get the same one
        except IndexError:
            return []

    def close(self) -> None:
        """Close the descriptor: no other process will map the slot any more."""
        for fd in self.hand_over():
            os.close(fd)


def capacity_for(size: int) -> int:
    """Round up to an eighth of a power of two (at least a page), so that slots can be reused."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


class Pool:
    """Slots of one process, up to `limit` bytes in total.

    The time of a call depends on the number of sizes, and not on the number of slots.
    """

    def __init__(
        self,
        make: Callable[[int], Made],  # given the size of a slot; may raise `OSError`
        limit: int,  # bytes of all slots
    ) -> None:
        self._make, self._limit = make, limit
        self.taking = threading.Lock()  # for pools of several threads; `empty` takes it
        # All the mutable state:
        self.slots: dict[int, Slot] = {}  # by number
        self.size = self.made = 0  # bytes of all slots, and number of slots ever made
        self.retired: list[int] = []  # slots given back, to be announced to the reader
        self.refusal: str | None = None  # reason why the last request got no slot
        self._starts: list[int] = []  # addresses of the slots, in order
        self._by_start: list[Slot] = []  # in that order
        # Free slots by capacity and number, the latest last. A plain dict takes ever longer to find its
        # first entry.
        self._free: dict[int, OrderedDict[int, Slot]] = {}
        self._dropped: deque[int] = deque()  # slots to be released once; filled from any thread
        self._takes = 0

    def empty(self, size: int) -> Any | None:
        """Return an uninitialized buffer of `size` bytes over a new slot; None if there is no slot.

        The slot is in use until the last view of the buffer dies. May be called from any thread.
        """
        with self.taking:
            number = self.take(size)
            if number is None:
                return None
            mapping, buffer = self.slots[number].mapping, self.view(number, size)
        weakref.finalize(buffer, _drop, self._dropped, number, mapping).atexit = False
        return buffer

    def take(self, size: int) -> int | None:
        """Take a slot of at least `size` bytes, with one reference; None if no slot is available."""
        self._collect()
        self._takes += 1
        slot = self._free_one(size) or self._new(capacity_for(size))
        oldest = self._oldest()
        if oldest is not None and self._takes - oldest.freed > IDLE + 4 * len(self.slots):
            self._retire(oldest)
        if slot is None:
            return None
        slot.references = 1
        return slot.number

    def retain(self, number: int) -> None:
        self.slots[number].references += 1

    def release(self, number: int) -> None:
        slot = self.slots.get(number & ~KEPT)
        if slot is None:  # the pool was closed meanwhile
            return
        slot.kept = slot.kept or bool(number & KEPT)
        slot.references -= 1
        if not slot.references:
            slot.freed = self._takes
            self._free.setdefault(slot.capacity, OrderedDict())[slot.number] = slot
            if slot.kept:
                self._retire(slot)

    def drop(self, number: int) -> None:
        """Release a reference at the next `take`. May be called from any thread."""
        self._dropped.append(number)

    def view(self, number: int, size: int | None = None) -> Any:
        """Return the first `size` bytes of a slot, or all. The caller must have a reference to it."""
        return self.slots[number].mapping.view(0, size)

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """Return the slot that contains all these bytes, and their start in it; None if none does."""
        before = bisect_right(self._starts, address)
        if not before:
            return None
        slot = self._by_start[before - 1]
        start = address - slot.mapping.address
        return (slot.number, start) if start + size <= slot.capacity else None

    def close(self) -> None:
        """Forget all slots, and make no more; the last view of each frees its memory."""
        self._limit = 0
        self._collect()
        for slot in self.slots.values():
            slot.close()
        for known in (self.slots, self._starts, self._by_start, self._free):
            known.clear()
        self.size = 0

    def _collect(self) -> None:
        dropped = self._dropped
        while dropped:
            self.release(dropped.popleft())

    def _free_one(self, size: int) -> Slot | None:
        """Take a free slot for `size` bytes, at most twice as large as needed, off the list."""
        capacity = capacity_for(size)
        most = 2 * capacity
        while capacity <= most:
            if free := self._free.get(capacity):
                return free.popitem()[1]
            capacity = capacity_for(capacity + 1)
        return None

    def _new(self, capacity: int) -> Slot | None:
        free = sum(each * len(free) for each, free in self._free.items())
        in_use = self.size - free
        if in_use + capacity > self._limit:
            self.refusal = (
                f"slots of {in_use:,} bytes are in use and {capacity:,} more would pass the "
                f"limit of {self._limit:,} bytes"
            )
            return None
        while self.size + capacity > self._limit or len(self.slots) >= MOST:
            oldest = self._oldest()
            if oldest is None:
                return None
            self._retire(oldest)
        try:
            slot = Slot(self.made, capacity, self._make(capacity))
        except OSError as error:
            self.refusal = f"there is no memory for a slot of {capacity:,} bytes ({error})"
            return None
        self.made += 1
        self.size += capacity
        self.slots[slot.number] = slot
        at = bisect_right(self._starts, slot.mapping.address)
        self._starts.insert(at, slot.mapping.address)
        self._by_start.insert(at, slot)
        return slot

    def _oldest(self) -> Slot | None:
        """Return the slot that has been free for longest."""
        first = [next(iter(free.values())) for free in self._free.values() if free]
        return min(first, key=lambda slot: slot.freed, default=None)

    def _retire(self, slot: Slot) -> None:
        """Give back a free slot."""
        del self.slots[slot.number], self._free[slot.capacity][slot.number]
        at = bisect_left(self._starts, slot.mapping.address)
        del self._starts[at], self._by_start[at]
        self.size -= slot.capacity
        if slot.ticket is None:  # the reader knows the slot
            self.retired.append(slot.number)
        slot.close()


def _drop(dropped: deque[int], number: int, mapping: Mapping) -> None:
    """Release a slot whose last view has died; its `mapping` lives as long as such a view."""
    dropped.append(number)


class PrivateSlots:
    """Slots for workers of this process; any of its threads may take one."""

    def __init__(self, limit: int) -> None:
        self.pool = Pool(lambda size: (segments.make_private(size), None, None), limit)
        self._warned = False
        self.refusal: str | None = None  # reason why a batch got no slot, for a warning

    def empty(self, size: int) -> Any | None:
        """Return an uninitialized buffer of `size` bytes; None if no slot is available."""
        found = self.pool.empty(size)
        if found is None and not self._warned:
            self.refusal = self.pool.refusal
        return found

    def warn(self) -> None:
        """Warn, once, that there was no slot for a batch."""
        reason, self.refusal = self.refusal, None
        if reason is not None and not self._warned:
            self._warned = True
            warn_of_overflow(reason)

    def close(self) -> None:
        """Make no more slots; free ones are freed now, others with their last view.

        Never waits: a finalizer may call this on a thread that is taking a slot. Then each slot is freed
        with its last view.
        """
        if self.pool.taking.acquire(blocking=False):
            try:
                self.pool.close()
            finally:
                self.pool.taking.release()


# -- slots that a thread collates into, and hooks that run when a process first uses slots
#
# A backend sets the slots of its workers' threads. The code that collates is in a higher layer, and may
# be loaded later; it registers a hook.


class Slots(Protocol):
    """Source of memory for a worker's batches."""

    def empty(self, size: int) -> Any | None:
        """Return an uninitialized buffer of `size` bytes; None if no slot is available."""


class _ThreadLocals(threading.local):
    slots: Slots | None = None  # slots to collate into; None: each batch gets new memory
    forks_worker = False  # this thread is forking a worker


on_this_thread = _ThreadLocals()


def set_slots(slots: Slots | None) -> Slots | None:
    """Collate into `slots` on this thread from now on; return the slots that were set before."""
    before, on_this_thread.slots = on_this_thread.slots, slots
    return before


_teach: list[Callable[[], None]] = []
_used = False


def when_slots_are_used(act: Callable[[], None]) -> None:
    """Call `act` once a worker of this process collates into slots: now, or later."""
    _teach.append(act)
    if _used:
        act()


def collate_into(slots: Slots) -> None:
    """Collate into `slots` on this thread of a worker process, and run the hooks at the first call."""
    global _used
    set_slots(slots)
    if not _used:
        _used = True
        for act in _teach:
            act()


# -- forks of this process by the user's code: each child may keep the batches that are open then
#
# Forked workers do not count, because they read no batch.


class Forks:
    """Mark of the latest fork. Two equal marks mean that there was no fork between them."""

    def __init__(self) -> None:
        self.latest = object()  # not a counter: two threads that fork at once might count one fork

    def note(self) -> None:
        """Record a fork by the user's code."""
        if not on_this_thread.forks_worker:
            self.latest = object()

    @contextmanager
    def of_ours(self) -> Iterator[None]:
        """Do not count the forks that this thread makes within the block."""
        on_this_thread.forks_worker = True
        try:
            yield
        finally:
            on_this_thread.forks_worker = False


forks = Forks()

# Before the fork too: another thread may release a batch that the fork has just copied.
system.at_fork(before=forks.note, after_in_parent=forks.note)
