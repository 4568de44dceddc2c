"""Slots shared by two processes: the writer fills them, and the reader maps the announced ones.

A message contains a `SlotMap` with the numbers and places of a batch's buffers; the memory itself is
not sent. The reader returns a slot's number when the last array over that slot has died in the reader.
Workers send results to their parent this way, and the parent sends large tasks.

No call waits. A buffer without a slot is sent through the stream. A reader that keeps too many slots
copies the batch and returns the slot at once.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hybridloader.memory import segments
from hybridloader.memory.segments import ALIGN, Mapping, Ticket
from hybridloader.memory.slots import KEPT, OWN, Pool, forks

MOST_NEW = 48
"""Number of new slots that one batch may announce: one message carries their descriptors, and the
kernel's limit is 253 (SCM_MAX_FD)."""


def limits_of(share: int) -> tuple[int, int]:
    """Split a worker's bytes among two directions: the limits of its results, and of its tasks."""
    return max(1, share - share // 4), share // 4


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
        self.empty, self.close = self.pool.empty, self.pool.close

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


class SlotReader:
    """Slots of another process, mapped in this one.

    A consumer that keeps more than `limit` bytes of slots in use receives copies of its batches. That
    limit is below the writer's, so that the writer always finds a free slot.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # All the mutable state:
        # By number: the memory, or the error why it could not be mapped.
        self.slots: dict[int, Mapping | OSError] = {}
        self.overflow: str | None = None  # reason why the last batch was copied
        self.lent = 0  # bytes of the slots that open batches keep in use
        self._returned: deque[tuple[int, int]] = deque()  # slot, bytes lent; from any thread
        self._free: list[int] = []  # returned, and not yet reported to the writer

    @property
    def size(self) -> int:  # bytes of all slots that are known
        slots = list(self.slots.values())
        return sum(mapping.size for mapping in slots if not isinstance(mapping, OSError))

    def learn(self, slot_map: SlotMap, fds: list[int]) -> None:
        """Map new slots of `slot_map`, forget retired ones. Takes ownership of `fds`."""
        for number in slot_map.retired:
            self.slots.pop(number, None)
        for number, ticket in slot_map.new:
            self.slots[number] = self._map(ticket, fds)

    def _map(self, ticket: Ticket, fds: list[int]) -> Mapping | OSError:
        try:
            if ticket.name is not None:
                return segments.open_named(ticket.name)
            if not fds:  # the kernel omits descriptors beyond this process's limit
                raise OSError(errno.EMFILE, "its descriptor has not arrived (ulimit -n)")
            fd = fds.pop(0)
            try:
                return segments.map_descriptor(fd, ticket.size)
            finally:
                os.close(fd)
        except OSError as error:  # raised when a batch over this slot is opened
            return error

    def lost(self, slot_map: SlotMap) -> bool:
        """Return True if a slot of the batch had no name any more when its announcement was read.

        On Windows a slot is gone with the last process that has it open.
        """
        numbers = slots_of(slot_map)
        return any(isinstance(self.slots[number], FileNotFoundError) for number in numbers)

    def _mapped(self, number: int) -> Mapping:
        """Return the memory of a slot. Raises `MemoryError` if it could not be mapped."""
        mapping = self.slots[number]
        if isinstance(mapping, OSError):
            raise MemoryError(f"a slot of shared memory can't be mapped here: {mapping}")
        return mapping

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
            self.hand_back(number)

    def view(self, span: BufferPlace) -> memoryview:
        """Return a buffer without a copy. The caller must keep the slot in use in another way."""
        return self._mapped(span.slot).lasting_view(span.start, span.size)

    def hand_back(self, number: int) -> None:
        """Return a slot for one batch. From any thread."""
        self._returned.append((number, 0))

    def returned(self) -> list[int]:
        """Take the slots whose last array has died since the previous call."""
        if self._returned:
            self._collect()
        found, self._free = self._free, []
        return found

    def _collect(self) -> None:
        returned = self._returned
        while returned:
            slot, size = returned.popleft()
            self.lent -= size
            self._free.append(slot)

    def _lend(self, number: int) -> memoryview:
        mapping = self._mapped(number)
        array, size = mapping.view(), mapping.size
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


# -- descriptors of the parent, which a forked worker must close

ours: set[int] = set()
"""All descriptors of backends in this process. In a forked worker they would keep memory alive, and hide
from other workers that the parent's end of their connection is closed."""


def _close(fd: int) -> None:
    ours.discard(fd)
    os.close(fd)


class OwnDescriptor:
    """Descriptor that is closed with the last reference to this object.

    So one thread may let go of it while another waits by it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        ours.add(fd)
        weakref.finalize(self, _close, fd).atexit = False

    def fileno(self) -> int:
        return self._fd
