"""Recycled slots: memory that large tensors and arrays are made in, again and again.

Fresh pages, not bytes, are what a loader spends its time on (docs/internals.md has figures). So a slot
is mapped once and used again when the last array over it has died.

A slot counts its references: one for every buffer of this process over it, and, between processes,
one for every batch in which the other side has it. The count goes down only by way of a queue that
finalizers may write to from any thread. At zero the slot is free; nobody ever writes to one that
is not. So a collated tensor that a user's function keeps is safe, in the worker as in the parent.

Where a device reads the batches, the pages of a slot may be locked for it; a reference then ends
once the device has read them (`memory/page_locks.py`).

No call here waits. Without a free slot, without room below the limit, or without memory, the answer
is None, and the batch is made in ordinary memory.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridloader.memory import segments
from hybridloader.memory.forks import forks
from hybridloader.memory.limits import warn_of_overflow
from hybridloader.memory.segments import Mapping, Ticket

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks

OWN = 256 * 1024
"""Bytes from which a buffer gets a slot of its own. Smaller buffers of a batch share one: copying them
takes less than 25 microseconds each, and a slot each would cost more."""

IDLE = 64
"""Number of takes after which a segment is given back, if no slot of it was in use meanwhile."""

GROWTH = 512
"""Divisor of the limit: a segment of several slots takes at most 1/512 of it. So a full pool has at most
1,024 mappings, besides the first small ones of each size. Linux allows a process 65,530 mappings
(vm.max_map_count), which one for each batch of 36 KB would use up at 2.4 GB."""

_PLACE_BITS = 24

KEPT = 1 << 62
"""Bit of the number of a slot that is given back, but not to be filled again: a fork may look at it."""


def number_of(segment: int, place: int) -> int:
    """Return the number of a slot: one int, which stands for the slot in messages."""
    return segment << _PLACE_BITS | place


def place_of(number: int) -> tuple[int, int]:
    """Return the number of the segment that a slot is in, and the slot's place in the segment."""
    return number >> _PLACE_BITS, number & (1 << _PLACE_BITS) - 1


class Segment:
    """Mapping that is cut into slots of `capacity` bytes; its pages are locked by `locks`, if any."""

    def __init__(self, number: int, capacity: int, slots: int, made: Made) -> None:
        self.number, self.capacity = number, capacity
        self.mapping, self.ticket, fd = made  # no ticket: the reader was told
        self._fds = [] if fd is None else [fd]
        self.references = [0] * slots  # of each slot
        self.free = list(range(slots - 1, -1, -1))  # the one that was freed last at the end
        self.kept: set[int] = set()  # places that are never to be free again
        self.lost = 0  # those of them that nobody here uses
        self.last = 0
        self.locks: PageLocks | None = None

    @property
    def unused(self) -> bool:
        return len(self.free) + self.lost == len(self.references)

    def hand_over(self) -> list[int]:
        """Give the descriptor, if there is one, to the caller, who closes it; once. From any thread."""
        self.ticket = None
        try:
            return [self._fds.pop()]  # atomic: two threads never get the same one
        except IndexError:
            return []

    def close(self) -> None:
        """Close the descriptor and unlink the name: nobody will be told of it any more."""
        ticket = self.ticket
        for fd in self.hand_over():
            os.close(fd)
        if ticket is not None and ticket.name is not None:
            segments.unlink(ticket.name)


def capacity_for(size: int) -> int:
    """Round up to an eighth of a power of two (at least a page), so that slots fit again."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


Made = tuple[Mapping, "Ticket | None", "int | None"]

_ByNumber = OrderedDict[int, Segment]  # a plain dict takes ever longer to find its first entry


class Pool:
    """Slots of one process, up to `limit` bytes together.

    Slots of one size lie together in segments. Each new segment is as large as all earlier ones of
    that size together, up to a part of the limit. So a worker that fills a few slots again and
    again has no more than it needs, and a worker whose batches are kept has few mappings. The
    number of slots makes no call slower.
    """

    def __init__(
        self,
        make: Callable[[int, int], Made],  # given size and number of a segment; may raise `OSError`
        limit: int,  # bytes of all segments together
        locks: PageLocks | None = None,  # to lock the pages of new segments
    ) -> None:
        self._make = make
        self._limit = limit
        self.locks = locks
        # All the mutable state:
        self.segments: dict[int, Segment] = {}  # by number
        self.size = self.made = 0  # bytes of all, and how many there have ever been
        self.retired: list[int] = []  # given back, and the reader has not been told
        self.refusal: str | None = None  # why the last slot that was wanted could not be had
        self._starts: list[int] = []  # addresses of the segments, in order
        self._by_start: list[Segment] = []  # in that order
        self._slots: Counter[int] = Counter()  # number of slots, by their size
        self._roomy: dict[int, _ByNumber] = {}  # segments with a free slot, by the size of that
        self._unused: _ByNumber = OrderedDict()  # those that nobody uses, unused for longest first
        self._dropped: deque[int] = deque()  # slots with a reference less; filled from any thread
        self._takes = 0

    def empty(self, size: int) -> Any | None:
        """Make a buffer of `size` bytes over a slot of its own, with anything in it; or None.

        The slot is in use until the last view of the buffer dies.
        """
        number = self.take(size)
        if number is None:
            return None
        segment, buffer = self.segment_of(number), self.view(number, size)
        # It also keeps the mapping alive for as long as there is a view of it.
        shared = None if self.locks is None else forks.latest  # pages that forks share are locked
        gone = partial(_drop, self._dropped, number, segment.mapping, shared)
        after = (gone,) if segment.locks is None else (segment.locks.after_device, gone)
        weakref.finalize(buffer, *after).atexit = False
        return buffer

    def take(self, size: int) -> int | None:
        """Take a slot of at least `size` bytes, with one reference; None if there can be none."""
        if self.locks is not None and not self.locks.here:
            self._abandon()
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
        """Take a reference off at the next `take`. May be called from any thread."""
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
        """Find the slot that has all these bytes, and their place in it; None if there is none."""
        before = bisect_right(self._starts, address)
        if not before:
            return None
        segment = self._by_start[before - 1]
        place, start = divmod(address - segment.mapping.address, segment.capacity)
        if place >= len(segment.references) or start + size > segment.capacity:
            return None
        return number_of(segment.number, place), start

    def lower(self, limit: int) -> None:
        """Lower the limit, in bytes; segments in use above it are given back as they become free."""
        self._limit = min(self._limit, limit)

    def close(self) -> None:
        """Forget all slots, and make no more; their memory goes with the last view of each."""
        self._limit = 0
        self._collect()
        for segment in self.segments.values():
            segment.close()
        self._forget()

    def _abandon(self) -> None:
        """Forget, in a fork, the parent's slots: it would see what is written to them."""
        self.locks = None
        self._dropped.clear()
        self._forget()

    def _forget(self) -> None:
        for kept in (self.segments, self._starts, self._by_start, self._slots, self._roomy):
            kept.clear()
        self._unused.clear()
        self.size = 0

    def _collect(self) -> None:
        if self.locks is not None:
            self.locks.collect()
        dropped = self._dropped
        while dropped:
            self.release(dropped.popleft())
        while self.size > self._limit and self._unused:  # the limit was lowered
            self._retire(self._oldest())

    def _with_room(self, size: int) -> Segment | None:
        """Find a segment with a free slot for `size` bytes, at most twice as large as needed."""
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
        if self.locks is not None and self.locks.lock(segment.mapping):
            segment.locks = self.locks
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
            return Segment(self.made, capacity, count, self._make(count * capacity, self.made))
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
        if segment.ticket is None:  # the reader has heard of it
            self.retired.append(segment.number)
        segment.close()


def _drop(dropped: deque[int], number: int, mapping: Mapping, before: object) -> None:
    dropped.append(number if before in (None, forks.latest) else number | KEPT)


class PrivateSlots:
    """Slots for workers of this very process; any of its threads may take one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.pool = Pool(_make_private, limit)
        self._taking = threading.Lock()
        self._warned = False
        self.refusal: str | None = None  # why there was no slot for a batch, to be warned of

    @property
    def locks(self) -> PageLocks | None:
        """Page locks of the slots; None: their pages are not locked."""
        return self.pool.locks

    @property
    def size(self) -> int:
        return self.pool.size

    def page_lock(self, locks: PageLocks) -> None:
        """Lock the pages of all slots, for a consumer that pins. Before the first is taken."""
        self.pool = Pool(_make_lockable, self._limit, locks)

    def empty(self, size: int) -> Any | None:
        """Make a buffer of `size` bytes, with anything in it; None if there can be none."""
        with self._taking:
            found = self.pool.empty(size)
        if found is None and not self._warned:
            self.refusal = self.pool.refusal
        return found

    def warn(self) -> None:
        """Warn, once, that there was no slot for a batch, and that pages could not be locked."""
        reason, self.refusal = self.refusal, None
        if self.pool.locks is not None:
            self.pool.locks.warn()
        if reason is not None and not self._warned:
            self._warned = True
            warn_of_overflow(reason)

    def close(self) -> None:
        """Make no more slots; free ones are given back now, others with their last view.

        Never waits: a finalizer may come here on a thread that is taking one. Then all go with their
        last view.
        """
        if self._taking.acquire(blocking=False):
            try:
                self.pool.close()
            finally:
                self._taking.release()


def _make_private(size: int, number: int) -> Made:
    return segments.make_private(size), None, None


def _make_lockable(size: int, number: int) -> Made:
    return segments.make_private(size, forks_share=True), None, None
