"""Slots between two processes: the writer fills its own, the reader maps them as it hears of them.

A batch's place in slots travels as a `SlotMap`, which has numbers and places; the memory itself never
moves. The reader returns a number when the last array over that slot has died there. Nothing here
waits: a buffer without a slot goes through the stream, and a reader that keeps too much copies out.
Results go from a worker to its parent, large tasks the other way. A
`MappedSegment` has what a third process needs in order to map a slot; this module tells nobody.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridloader.memory import segments
from hybridloader.memory.descriptors import KeptDescriptor, keep_descriptor
from hybridloader.memory.forks import forks
from hybridloader.memory.segments import Mapping, Ticket
from hybridloader.memory.slots import IDLE, KEPT, OWN, Made, Pool, place_of

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks

ALIGN = 64
"""Bytes at which every buffer in a slot begins: a cache line, and what AVX-512 loads like best."""

MOST_NEW = 48
"""Segments that one batch may announce: their descriptors go in one message, and 253 is the kernel's
limit (SCM_MAX_FD)."""


_aliases = itertools.count(-1, -1)
_lendings = itertools.count()


def both_ways(share: int) -> tuple[int, int]:
    """Split a worker's bytes where slots go both ways: the limit of each writer, and of each reader."""
    return max(1, share // 2), share // 4


def task_names(names: str) -> str:
    """Prefix of the names of a worker's slots for tasks, given that of its slots for results."""
    return f"{names}t"


class BufferPlace(NamedTuple):
    """Place of one buffer of a batch."""

    slot: int  # its number
    start: int  # within the slot
    size: int


class Notice(NamedTuple):
    """Notice of a segment that is new to the other side, with what it needs in order to map it."""

    segment: int
    capacity: int  # bytes of each of its slots
    ticket: Ticket


class SlotMap(NamedTuple):
    """Places of a batch's buffers, as the other side is told of them."""

    spans: tuple[
        BufferPlace | None, ...
    ]  # of each buffer; None for one that goes through the stream
    new: tuple[Notice, ...]  # segments that the other side does not know yet
    retired: tuple[int, ...]  # segments that no longer exist
    refusal: str | None  # why a slot could not be had, if that was so


class SlotWriter:
    """Slots that this process fills, and that the reader maps as it hears of them.

    They have `limit` bytes together. `names` is the prefix of the names of named segments, before their
    numbers; None: they have no names.
    """

    def __init__(self, limit: int, names: str | None = None) -> None:
        def make(size: int, number: int) -> Made:
            if names is None:
                return segments.make(size, None)
            with self._naming:
                if self._swept:
                    raise OSError(errno.ECANCELED, "the reader is gone")
                return segments.make(size, f"{names}{number}")

        self._names = names
        self._naming = threading.Lock()
        self._swept = False
        self.pool = Pool(make, limit)
        self.lower, self.close = self.pool.lower, self.pool.close
        # Samples on threads of a worker take slots too, while it sends a batch.
        self._taking = threading.Lock()

    def empty(self, size: int) -> Any | None:
        """Make a buffer of `size` bytes, with anything in it; None if there can be none."""
        with self._taking:
            return self.pool.empty(size)

    def write(self, buffers: Sequence[memoryview]) -> tuple[SlotMap, list[int]]:
        """Copy into slots those of `buffers` that do not lie in one already.

        The map is to be sent to the reader, which keeps every slot that it names in use until it returns
        it; the descriptors are to be sent along, and then closed.
        """
        with self._taking:
            return self._write(buffers)

    def _write(self, buffers: Sequence[memoryview]) -> tuple[SlotMap, list[int]]:
        where = [self._find(buffer) for buffer in buffers]
        missing = [i for i, span in enumerate(where) if span is None]
        alone = [i for i in missing if buffers[i].nbytes >= OWN]
        if len(alone) > MOST_NEW // 2:
            alone = []
        taken: set[int] = set()
        try:
            for i in alone:
                self._copy(buffers, [i], where, taken)
            self._copy(buffers, [i for i in missing if i not in alone], where, taken)
            return self._announce(where, taken)
        finally:
            for number in taken:  # slots that the reader is not told of
                self.pool.release(number)

    def release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.pool.drop(number)

    def sweep(self) -> None:
        """Unlink segments that a reader, which is gone, never opened; name no more. From any thread."""
        if self._names is None:
            return
        with self._naming:
            self._swept = True
        for number in range(self.pool.made + 1):  # one may have its name and not be counted yet
            segments.unlink(f"{self._names}{number}")

    def _find(self, buffer: memoryview) -> BufferPlace | None:
        address = segments.address_of(buffer)
        found = None if address is None else self.pool.find(address, buffer.nbytes)
        return None if found is None else BufferPlace(*found, buffer.nbytes)

    def _copy(
        self,
        buffers: Sequence[memoryview],
        those: list[int],
        where: list[BufferPlace | None],
        taken: set[int],
    ) -> None:
        starts, end = [], 0
        for i in those:
            starts.append(-(-end // ALIGN) * ALIGN)
            end = starts[-1] + buffers[i].nbytes
        number = self.pool.take(end) if end else None
        if number is None:
            return
        taken.add(number)
        # All of it: ctypes makes a type for every other size, in 26 us, and slots are of few sizes.
        target = memoryview(self.pool.view(number)).cast("B")
        for i, start in zip(those, starts, strict=True):
            size = buffers[i].nbytes
            target[start : start + size] = buffers[i]
            where[i] = BufferPlace(number, start, size)

    def _announce(
        self, where: list[BufferPlace | None], taken: set[int]
    ) -> tuple[SlotMap, list[int]]:
        pool = self.pool
        new: list[Notice] = []
        fds: list[int] = []
        used: set[int] = set()
        for i, span in enumerate(where):
            if span is None or span.slot in used:
                continue
            segment = pool.segment_of(span.slot)
            if segment.ticket is not None:
                if len(new) == MOST_NEW:
                    where[i] = None
                    continue
                new.append(Notice(segment.number, segment.capacity, segment.ticket))
                fds += segment.hand_over()
            used.add(span.slot)
        for number in used - taken:
            pool.retain(number)  # for the reader, to which our own reference to the others passes
        taken -= used
        retired, pool.retired = tuple(pool.retired), []
        refusal, pool.refusal = pool.refusal, None
        return SlotMap(tuple(where), tuple(new), retired, refusal), fds


class MappedSegment:
    """A segment as its reader sees it: slots of `capacity` bytes, one after the other.

    It counts nothing that the writer has to know: that is `SlotReader`'s. Its pages may be locked for a
    device, from the first batch that is opened over it until its end.

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


class SlotReader:
    """View of one process on the slots of another.

    A consumer that keeps more than `limit` bytes of slots in use gets its batches copied out instead.
    That is below the writer's limit, so that the writer always finds a free slot. If the reader `keeps`
    descriptors of new segments, then as far as there is room, and each until the first batch over its
    segment is opened; longer if `forwards` was set.
    """

    def __init__(
        self,
        limit: int,
        names: str | None = None,  # prefix of the names of named segments, as the writer has it
        keeps: bool = False,
        locks: PageLocks
        | None = None,  # lock a segment when the first batch over it is opened here
    ) -> None:
        self.limit = limit
        self.locks = locks
        self._names = names
        self._keeps = keeps
        # All the mutable state:
        self.segments: dict[int, MappedSegment] = {}  # by number
        self.overflow: str | None = None  # why the last batch was copied out
        self.forwards = False  # batches go on to other processes, which will need descriptors
        self.highest = -1  # highest number of a segment of the writer's
        self.lent = 0  # bytes of the slots that open batches keep in use
        self._returned: deque[tuple[int, int]] = deque()  # slot, bytes lent; from any thread
        self._free: list[int] = []  # returned, and not yet told

    @property
    def size(self) -> int:  # bytes of all segments that are known
        mapped = [segment.mapping for segment in list(self.segments.values())]
        return sum(mapping.size for mapping in mapped if not isinstance(mapping, OSError))

    def waiting(self) -> list[int]:
        """Slots that were given back, and that the writer has not been told of. Takes none."""
        return list(dict.fromkeys([*self._free, *(number for number, _ in self._returned)]))

    def learn(self, slot_map: SlotMap, fds: list[int]) -> None:
        """Map new segments of `slot_map`, forget retired ones. Takes over `fds`."""
        for number in slot_map.retired:
            gone = self.segments.pop(number, None)
            if gone is not None:
                gone.end()
        for number, capacity, ticket in slot_map.new:
            self.highest = max(self.highest, number)
            self.segments[number] = MappedSegment(*self._map(ticket, fds), capacity)

    def _map(
        self, ticket: Ticket, fds: list[int]
    ) -> tuple[Mapping | OSError, KeptDescriptor | None]:
        kept: KeptDescriptor | None = None
        try:
            if ticket.name is not None:
                return segments.open_named(ticket.name), None
            if not fds:  # the kernel leaves out those for which this process has no room
                raise OSError(errno.EMFILE, "its descriptor has not arrived (ulimit -n)")
            fd = fds.pop(0)
            kept = keep_descriptor(fd) if self._keeps else None
            try:
                return segments.map_descriptor(fd, ticket.size), kept
            finally:
                if kept is None:
                    os.close(fd)
        except OSError as error:  # told when a batch is opened, and with those over it alone
            if kept is not None:
                kept.close()
            return error, None

    def buffers(self, slot_map: SlotMap, streamed: Sequence[memoryview]) -> list[memoryview]:
        """Open the batch's buffers; each slot is returned when the last array over it dies."""
        stream = iter(streamed)
        by_slot: dict[int, memoryview] = {}
        found = []
        numbers = slots_of(slot_map)
        try:
            for number in numbers:
                by_slot[number] = self._lend(number)
        except MemoryError:
            self._returned.extend((number, 0) for number in numbers if number not in by_slot)
            raise
        for span in slot_map.spans:
            if span is None:
                found.append(next(stream))
            else:
                found.append(by_slot[span.slot][span.start : span.start + span.size])
        return found

    def give_back(self, slot_map: SlotMap) -> None:
        """Return the slots of a batch that nobody wants."""
        for number in slots_of(slot_map):
            if not self.forwards:
                self.segments[place_of(number)[0]].unkeep()
            self.hand_back(number)

    def view(self, span: BufferPlace) -> memoryview:
        """Return a buffer without a copy. The caller must keep the slot in use in another way."""
        segment, place = place_of(span.slot)
        return self.segments[segment].view(place, span.start, span.size)

    def hand_back(self, number: int) -> None:
        """Return a slot for one batch. From any thread."""
        self._returned.append((number, 0))

    def returned(self) -> list[int]:
        """Take the slots whose last array has died since the last call, and that no device reads."""
        if self.locks is not None:
            self.locks.collect()
        if self._returned:
            self._collect()
        found, self._free = self._free, []
        return found

    def close(self) -> None:
        """End all segments: the writer is gone. Batches that came can still be opened.

        Pages that nobody looks at are unlocked now, others with the last view of them.
        """
        if self.locks is not None:
            self.locks.collect()
        for segment in list(self.segments.values()):
            segment.end()
            segment.unlock_soon()

    def sweep(self) -> None:
        """Unlink segments that the writer, which is gone, had made and nobody has opened here."""
        if self._names is None:
            return
        number = absent = 0
        while number <= self.highest or absent < 2 * IDLE:
            absent = 0 if segments.unlink(f"{self._names}{number}") else absent + 1
            number += 1

    def _collect(self) -> None:
        returned = self._returned
        while returned:
            slot, size = returned.popleft()
            self.lent -= size
            self._free.append(slot)

    def _lend(self, number: int) -> memoryview:
        at, place = place_of(number)
        segment = self.segments[at]
        size = segment.capacity
        array = segment.slot(place)
        if not self.forwards:
            segment.unkeep()
        self._collect()
        if self.lent + size > self.limit:
            self.overflow = (
                f"the batches that are kept hold {self.lent:,} bytes of slots, of "
                f"{self.limit:,} for each worker"
            )
            copied = memoryview(bytearray(array))
            self._returned.append((number, 0))
            return copied
        self.lent += size
        if self.locks is not None:
            segment.lock(self.locks)
        back = partial(_hand_in, self._returned, number, segment, segment.lend(), forks.latest)
        # It also keeps the mapping alive for as long as there is a view of it.
        after = (back,) if segment.locks is None else (segment.locks.after_device, back)
        weakref.finalize(array, *after).atexit = False
        return memoryview(array).cast("B")


def slots_of(slot_map: SlotMap) -> list[int]:
    return list(dict.fromkeys(span.slot for span in slot_map.spans if span is not None))


def _hand_in(
    returned: deque[tuple[int, int]], number: int, segment: MappedSegment, lent: int, before: object
) -> None:
    segment.give_back(lent)
    if forks.latest != before:
        number |= KEPT
    returned.append((number, segment.capacity))
