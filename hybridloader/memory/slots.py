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
from collections import Counter, OrderedDict, deque
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
"""Number of takes after which a segment is freed, if none of its slots was in use meanwhile."""

GROWTH = 512
"""Divisor of the limit: a segment of several slots takes at most 1/512 of it. So a full pool has at most
1,024 mappings, apart from the first small ones of each size. Linux allows a process 65,530 mappings
(vm.max_map_count). A mapping for each batch of 36 KB would use them up at 2.4 GB."""

_PLACE_BITS = 24

KEPT = 1 << 62
"""Bit in the number of a returned slot that must not be filled again: a forked process may read it."""


def number_of(segment: int, place: int) -> int:
    """Return the number of a slot: the int that identifies it in messages."""
    return segment << _PLACE_BITS | place


def place_of(number: int) -> tuple[int, int]:
    """Return the number of a slot's segment, and the slot's place in that segment."""
    return number >> _PLACE_BITS, number & (1 << _PLACE_BITS) - 1


class Segment:
    """Mapping divided into slots of `capacity` bytes."""

    def __init__(self, number: int, capacity: int, slots: int, made: Made) -> None:
        self.number, self.capacity = number, capacity
        self.mapping, self.ticket, fd = made  # no ticket: the reader knows the segment
        self._fds = [] if fd is None else [fd]
        self.references = [0] * slots  # of each slot
        self.free = list(range(slots - 1, -1, -1))  # places; the end was freed last
        self.kept: set[int] = set()  # places that must not become free again
        self.lost = 0  # number of `kept` places without references
        self.last = 0

    @property
    def unused(self) -> bool:
        return len(self.free) + self.lost == len(self.references)

    def hand_over(self) -> list[int]:
        """Return the descriptor, if there is one, once; the caller closes it. From any thread."""
        self.ticket = None
        try:
            return [self._fds.pop()]  # atomic: two threads never get the same one
        except IndexError:
            return []

    def close(self) -> None:
        """Close the descriptor: no other process will map the segment any more."""
        for fd in self.hand_over():
            os.close(fd)


def capacity_for(size: int) -> int:
    """Round up to an eighth of a power of two (at least a page), so that slots can be reused."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


Made = tuple[Mapping, "Ticket | None", "int | None"]

_ByNumber = OrderedDict[int, Segment]  # a plain dict takes ever longer to find its first entry


class Pool:
    """Slots of one process, up to `limit` bytes in total.

    Segments contain slots of one size. Each new segment is as large as all earlier ones of that size
    together, up to a part of the limit. So a worker that reuses a few slots has no more than it needs,
    and a worker whose batches are kept has few mappings. The time of a call does not depend on the
    number of slots.
    """

    def __init__(
        self,
        make: Callable[[int, int], Made],  # given size and number of a segment; may raise `OSError`
        limit: int,  # bytes of all segments
    ) -> None:
        self.make = make
        self._limit = limit
        self.taking = threading.Lock()  # for pools of several threads; `empty` takes it
        # All the mutable state:
        self.segments: dict[int, Segment] = {}  # by number
        self.size = self.made = 0  # bytes of all segments, and number of segments ever made
        self.retired: list[int] = []  # freed segments to be announced to the reader
        self.refusal: str | None = None  # reason why the last request got no slot
        self._starts: list[int] = []  # addresses of the segments, in order
        self._by_start: list[Segment] = []  # in that order
        self._slots: Counter[int] = Counter()  # number of slots, by their size
        self._roomy: dict[int, _ByNumber] = {}  # segments with a free slot, by its size
        self._unused: _ByNumber = OrderedDict()  # segments without references, oldest first
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
            segment, buffer = self.segment_of(number), self.view(number, size)
        weakref.finalize(buffer, _drop, self._dropped, number, segment.mapping).atexit = False
        return buffer

    def take(self, size: int) -> int | None:
        """Take a slot of at least `size` bytes, with one reference; None if no slot is available."""
        self._collect()
        self._takes += 1
        number = None
        segment = self._with_room(size) or self._new(capacity_for(size))
        if segment is not None:
            self._unused.pop(segment.number, None)
            segment.last = self._takes
            place = segment.free.pop()
            segment.references[place] = 1
            number = number_of(segment.number, place)
            if not segment.free:
                del self._roomy[segment.capacity][segment.number]
        if self._unused and self._takes - self._oldest().last > IDLE:
            self._retire(self._oldest())
        return number

    def retain(self, number: int) -> None:
        segment, place = place_of(number)
        self.segments[segment].references[place] += 1

    def release(self, number: int) -> None:
        found, place = place_of(number & ~KEPT)
        segment = self.segments.get(found)
        if segment is None:  # the pool was closed meanwhile
            return
        if number & KEPT:
            segment.kept.add(place)
        segment.references[place] -= 1
        if segment.references[place] == 0:
            if place in segment.kept:
                segment.lost += 1
            else:
                if not segment.free:
                    self._roomy.setdefault(segment.capacity, OrderedDict())[found] = segment
                segment.free.append(place)
            if segment.unused:
                self._unused[found] = segment
                if not segment.free:  # all of it is lost
                    self._retire(segment)

    def drop(self, number: int) -> None:
        """Release a reference at the next `take`. May be called from any thread."""
        self._dropped.append(number)

    def segment_of(self, number: int) -> Segment:
        return self.segments[place_of(number)[0]]

    def view(self, number: int, size: int | None = None) -> Any:
        """Return the first `size` bytes of a slot, or all. The caller must have a reference to it."""
        at, place = place_of(number)
        segment = self.segments[at]
        start = place * segment.capacity
        return segment.mapping.view(start, segment.capacity if size is None else size)

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """Return the slot that contains all these bytes, and their start in it; None if none does."""
        before = bisect_right(self._starts, address)
        if not before:
            return None
        segment = self._by_start[before - 1]
        place, start = divmod(address - segment.mapping.address, segment.capacity)
        if place >= len(segment.references) or start + size > segment.capacity:
            return None
        return number_of(segment.number, place), start

    def lower(self, limit: int) -> None:
        """Lower the limit, in bytes; segments in use above it are freed when they become unused."""
        self._limit = min(self._limit, limit)

    def close(self) -> None:
        """Forget all slots, and make no more; the last view of each frees its memory."""
        self._limit = 0
        self._collect()
        for segment in self.segments.values():
            segment.close()
        for kept in (self.segments, self._starts, self._by_start, self._slots, self._roomy):
            kept.clear()
        self._unused.clear()
        self.size = 0

    def _collect(self) -> None:
        dropped = self._dropped
        while dropped:
            self.release(dropped.popleft())
        while self.size > self._limit and self._unused:  # the limit was lowered
            self._retire(self._oldest())

    def _with_room(self, size: int) -> Segment | None:
        """Return a segment with a free slot for `size` bytes, at most twice as large as needed."""
        capacity = capacity_for(size)
        most = 2 * capacity
        while capacity <= most:
            if roomy := self._roomy.get(capacity):
                return next(reversed(roomy.values()))
            capacity = capacity_for(capacity + 1)
        return None

    def _new(self, capacity: int) -> Segment | None:
        in_use = self.size - sum(unused.mapping.size for unused in self._unused.values())
        room = self._limit - in_use
        if capacity > room:
            self.refusal = (
                f"slots of {in_use:,} bytes are in use and {capacity:,} more would pass the "
                f"limit of {self._limit:,} bytes"
            )
            return None
        count = max(1, min(self._slots[capacity], min(room, self._limit // GROWTH) // capacity))
        while self.size + count * capacity > self._limit:
            self._retire(self._oldest())
        try:
            segment = self._make_segment(capacity, count)
        except OSError as error:
            self.refusal = f"there is no memory for a slot of {capacity:,} bytes ({error})"
            return None
        self.made += 1
        self.size += segment.mapping.size
        self.segments[segment.number] = segment
        at = bisect_right(self._starts, segment.mapping.address)
        self._starts.insert(at, segment.mapping.address)
        self._by_start.insert(at, segment)
        self._slots[capacity] += len(segment.references)
        self._roomy.setdefault(capacity, OrderedDict())[segment.number] = segment
        return segment

    def _make_segment(self, capacity: int, count: int) -> Segment:
        try:
            return Segment(self.made, capacity, count, self.make(count * capacity, self.made))
        except OSError:
            if count == 1:
                raise
        return self._make_segment(capacity, 1)  # a full /dev/shm may have room for one more

    def _oldest(self) -> Segment:
        return self._unused[next(iter(self._unused))]

    def _retire(self, segment: Segment) -> None:
        del self._unused[segment.number], self.segments[segment.number]
        self._roomy[segment.capacity].pop(segment.number, None)
        at = bisect_left(self._starts, segment.mapping.address)
        del self._starts[at], self._by_start[at]
        self._slots[segment.capacity] -= len(segment.references)
        self.size -= segment.mapping.size
        if segment.ticket is None:  # the reader knows the segment
            self.retired.append(segment.number)
        segment.close()


def _drop(dropped: deque[int], number: int, mapping: Mapping) -> None:
    """Release a slot whose last view has died; its `mapping` lives as long as such a view."""
    dropped.append(number)


class PrivateSlots:
    """Slots for workers of this process; any of its threads may take one."""

    def __init__(self, limit: int) -> None:
        self.pool = Pool(_make_private, limit)
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


def _make_private(size: int, number: int) -> Made:
    return segments.make_private(size), None, None


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
