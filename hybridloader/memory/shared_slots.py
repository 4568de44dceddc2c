"""Slots shared by two processes: the writer fills them, and the reader maps the announced ones.

A message contains a `SlotMap` with the numbers and places of a batch's buffers; the memory itself is
not sent. The reader returns a slot's number when the last array over that slot has died in the reader.
Workers send results to their parent this way, and the parent sends large tasks.

No call waits. A buffer without a slot is sent through the stream. A reader that keeps too many slots
copies the batch and returns the slot at once. A `MappedSlot` has the data that a third process needs
to map a slot; another module sends them.
"""

from __future__ import annotations

import errno
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from hybridloader._support import system
from hybridloader.memory import segments
from hybridloader.memory.segments import ALIGN, Mapping, Ticket
from hybridloader.memory.slots import KEPT, OWN, Pool, forks

MOST_NEW = 48
"""Number of new slots that one batch may announce: one message carries their descriptors, and the
kernel's limit is 253 (SCM_MAX_FD)."""


_aliases = itertools.count(-1, -1)


def both_ways(share: int) -> tuple[int, int]:
    """Split a worker's bytes among two directions: the limit of each writer, and of each reader."""
    return max(1, share // 2), share // 4


class BufferPlace(NamedTuple):
    """Place of one buffer of a batch."""

    slot: int  # its number
    start: int  # within the slot
    size: int


class Notice(NamedTuple):
    """Announcement of a new slot, with the data that the reader needs to map it."""

    slot: int  # its number
    ticket: Ticket


class SlotMap(NamedTuple):
    """Message from writer to reader: the places of a batch's buffers."""

    spans: tuple[BufferPlace | None, ...]  # of each buffer; None: the buffer is in the stream
    new: tuple[Notice, ...]  # slots that the reader does not know yet
    retired: tuple[int, ...]  # slots that no longer exist
    refusal: str | None  # reason why a buffer got no slot, if one did not


class SlotWriter:
    """Slots that this process fills and that the reader maps.

    `limit` is the maximum of their bytes in total.
    """

    def __init__(self, limit: int) -> None:
        self.pool = Pool(lambda size: segments.make(size), limit)
        self.empty, self.lower, self.close = self.pool.empty, self.pool.lower, self.pool.close

    def write(self, buffers: Sequence[memoryview]) -> tuple[SlotMap, list[int]]:
        """Copy into slots those of `buffers` that are not in a slot yet.

        The caller sends the map and the descriptors to the reader, and then closes the descriptors. Each
        slot in the map stays in use until the reader returns it.
        """
        with self.pool.taking:  # threads of a worker take slots while it sends a batch
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
                for number in taken:  # slots that the map does not name
                    self.pool.release(number)

    def release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.pool.drop(number)

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
        # The whole slot: ctypes makes a type for each new size, in 26 us, and slots have few sizes.
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
            slot = pool.slots[span.slot]
            if slot.ticket is not None:
                if len(new) == MOST_NEW:
                    where[i] = None
                    continue
                new.append(Notice(slot.number, slot.ticket))
                fds += slot.hand_over()
            used.add(span.slot)
        for number in used - taken:
            pool.retain(number)  # for the reader; slots in `taken` pass their reference to it
        taken -= used
        retired, pool.retired = tuple(pool.retired), []
        refusal, pool.refusal = pool.refusal, None
        return SlotMap(tuple(where), tuple(new), retired, refusal), fds


class MappedSlot:
    """Slot in its reader, which counts the slot for the writer.

    `alias` is the slot's number for processes other than reader and writer. It is below 0 and unique in
    this process. `listeners` are called with the alias when the slot is gone, from any thread: their
    processes know the slot, too.
    """

    def __init__(
        self,
        mapping: Mapping | OSError,  # the memory, or the error why it could not be mapped
        kept: OwnDescriptor | None,  # the descriptor, if it was kept
    ) -> None:
        self.mapping, self.kept = mapping, kept
        self.alias = next(_aliases)
        self.listeners: set[Callable[[int], None]] = set()

    def mapped(self) -> Mapping:
        """Return the memory. Raises `MemoryError` if it could not be mapped."""
        if isinstance(self.mapping, OSError):
            raise MemoryError(f"a slot of shared memory can't be mapped here: {self.mapping}")
        return self.mapping

    def end(self) -> None:
        """Call all listeners: the slot is gone, or will not be forwarded any more."""
        self.kept = None
        for listener in list(self.listeners):
            listener(self.alias)
        self.listeners.clear()


class SlotReader:
    """Slots of another process, mapped in this one.

    A consumer that keeps more than `limit` bytes of slots in use receives copies of its batches. That
    limit is below the writer's, so that the writer always finds a free slot. A reader that `keeps`
    descriptors of new slots keeps as many as the process allows. It closes each when the first batch
    over its slot is opened, unless `forwards` is set.
    """

    def __init__(self, limit: int, keeps: bool = False) -> None:
        self.limit, self._keeps = limit, keeps
        # All the mutable state:
        self.slots: dict[int, MappedSlot] = {}  # by number
        self.overflow: str | None = None  # reason why the last batch was copied
        self.forwards = False  # batches are forwarded to processes that will need descriptors
        self.lent = 0  # bytes of the slots that open batches keep in use
        self._returned: deque[tuple[int, int]] = deque()  # slot, bytes lent; from any thread
        self._free: list[int] = []  # returned, and not yet reported to the writer

    @property
    def size(self) -> int:  # bytes of all slots that are known
        mapped = [slot.mapping for slot in list(self.slots.values())]
        return sum(mapping.size for mapping in mapped if not isinstance(mapping, OSError))

    def learn(self, slot_map: SlotMap, fds: list[int]) -> None:
        """Map new slots of `slot_map`, forget retired ones. Takes ownership of `fds`."""
        for number in slot_map.retired:
            gone = self.slots.pop(number, None)
            if gone is not None:
                gone.end()
        for number, ticket in slot_map.new:
            self.slots[number] = MappedSlot(*self._map(ticket, fds))

    def _map(
        self, ticket: Ticket, fds: list[int]
    ) -> tuple[Mapping | OSError, OwnDescriptor | None]:
        try:
            if ticket.name is not None:
                return segments.open_named(ticket.name), None
            if not fds:  # the kernel omits descriptors beyond this process's limit
                raise OSError(errno.EMFILE, "its descriptor has not arrived (ulimit -n)")
            fd = fds.pop(0)
            kept = keep_descriptor(fd) if self._keeps else None
            try:
                return segments.map_descriptor(fd, ticket.size), kept
            finally:
                if kept is None:
                    os.close(fd)
        except OSError as error:  # raised when a batch over this slot is opened
            return error, None

    def lost(self, slot_map: SlotMap) -> bool:
        """Return True if a slot of the batch had no name any more when its announcement was read.

        On Windows a slot is gone with the last process that has it open.
        """
        found = (self.slots[number].mapping for number in slots_of(slot_map))
        return any(isinstance(mapping, FileNotFoundError) for mapping in found)

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
        """Return the slots of a batch that was discarded."""
        for number in slots_of(slot_map):
            if not self.forwards:
                self.slots[number].kept = None
            self.hand_back(number)

    def view(self, span: BufferPlace) -> memoryview:
        """Return a buffer without a copy. The caller must keep the slot in use in another way."""
        return self.slots[span.slot].mapped().lasting_view(span.start, span.size)

    def hand_back(self, number: int) -> None:
        """Return a slot for one batch. From any thread."""
        self._returned.append((number, 0))

    def returned(self) -> list[int]:
        """Take the slots whose last array has died since the previous call."""
        if self._returned:
            self._collect()
        found, self._free = self._free, []
        return found

    def close(self) -> None:
        """End all slots: the writer is gone. Batches that have arrived can still be opened."""
        for slot in list(self.slots.values()):
            slot.end()

    def _collect(self) -> None:
        returned = self._returned
        while returned:
            slot, size = returned.popleft()
            self.lent -= size
            self._free.append(slot)

    def _lend(self, number: int) -> memoryview:
        slot = self.slots[number]
        mapping = slot.mapped()
        array, size = mapping.view(), mapping.size
        if not self.forwards:
            slot.kept = None
        self._collect()
        if self.lent + size > self.limit:
            self.overflow = (
                f"the batches that the program keeps hold {self.lent:,} bytes of slots, of "
                f"{self.limit:,} for each worker"
            )
            copied = segments.aligned_view(size)
            copied[:] = memoryview(array).cast("B")
            self._returned.append((number, 0))
            return copied
        self.lent += size
        back = weakref.finalize(array, _hand_in, self._returned, number, mapping, forks.latest)
        back.atexit = False
        return memoryview(array).cast("B")


def slots_of(slot_map: SlotMap) -> list[int]:
    return list(dict.fromkeys(span.slot for span in slot_map.spans if span is not None))


def _hand_in(
    returned: deque[tuple[int, int]], number: int, mapping: Mapping, before: object
) -> None:
    """Return a slot whose last view has died; its `mapping` lives as long as such a view."""
    if forks.latest != before:
        number |= KEPT
    returned.append((number, mapping.size))


# -- descriptors of the parent: those that a forked worker must close, and kept ones of segments
#
# Each process that maps a slot needs its descriptor once. A parent that opens the results does not need
# the descriptor again. A parent that forwards them to another stage needs it until each worker there has
# mapped the slot. The whole process keeps a bounded number of descriptors, so that the
# user has most of ``ulimit -n``. A slot without a descriptor is copied, which is slower and equally
# correct.

MOST = 256  # maximum number of kept descriptors: 256 slots of 38 MB are 10 GB
_SHARE = 4  # divisor of the descriptors that this process may open

ours: set[int] = set()
"""All descriptors of backends in this process. In a forked worker they would keep memory alive, and hide
from other workers that the parent's end of their connection is closed."""


def _close(fd: int) -> None:
    ours.discard(fd)
    os.close(fd)


@cache
def _most() -> int:
    limit = system.soft_limit("RLIMIT_NOFILE")
    return MOST if limit is None else min(MOST, limit // _SHARE)


class OwnDescriptor:
    """Descriptor that is closed with the last reference to this object.

    So one thread may let go of it while another waits by it, or duplicates it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        ours.add(fd)
        weakref.finalize(self, _close, fd).atexit = False

    def fileno(self) -> int:
        return self._fd

    def duplicate(self) -> int | None:
        """Return a duplicate that the caller owns; None if no number is free."""
        try:
            return os.dup(self._fd)
        except OSError:
            return None


kept: weakref.WeakSet[OwnDescriptor] = weakref.WeakSet()


def keep_descriptor(fd: int) -> OwnDescriptor | None:
    """Take ownership of `fd`; return None, and leave `fd` to the caller, if enough are kept."""
    if len(kept) >= _most():
        return None
    descriptor = OwnDescriptor(fd)
    kept.add(descriptor)
    return descriptor
