"""Slots between two processes: a worker fills its own, the parent maps them as it hears of them.

What a batch brings into slots travels as a `Parcel`, which tells numbers and places; the memory itself
never moves. The parent returns a number when the last array over that slot has died there. Nothing
here waits: a buffer without a slot goes through the stream, and a parent that holds too much
copies out.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hybridloader import segments
from hybridloader.segments import Mapping, Ticket
from hybridloader.slots import IDLE, OWN, Made, Pool, Slot

ALIGN = 64
"""Bytes at which every buffer in a slot begins: a cache line, and what AVX-512 loads like best."""

_MOST_NEW = 48
"""Slots that one batch may announce: their descriptors go in one message, and 253 is the kernel's
limit (SCM_MAX_FD)."""


class Span(NamedTuple):
    """Where one buffer of a batch lies."""

    slot: int
    start: int
    size: int


class Parcel(NamedTuple):
    """A batch's buffers, as the other side is told of them.

    Attributes
    ----------
    spans
        One for each buffer; None for one that goes through the stream.
    tickets
        Slots that the other side does not know yet, with what it needs in order to map them.
    retired
        Slots that no longer exist.
    refusal
        Why a slot could not be had, if that was so.
    """

    spans: tuple[Span | None, ...]
    tickets: tuple[tuple[int, Ticket], ...]
    retired: tuple[int, ...]
    refusal: str | None


class Writer:
    """A worker's own slots, which the parent maps as it hears of them.

    Parameters
    ----------
    limit
        Bytes of all slots together.
    names
        How the names of named segments begin; their numbers follow. None: they have no names.
    """

    def __init__(self, limit: int, names: str | None = None) -> None:
        def make(size: int, number: int) -> Made:
            return segments.make(size, None if names is None else f"{names}{number}")

        self._pool = Pool(make, limit)
        self.empty = self._pool.empty

    def write(self, buffers: Sequence[memoryview]) -> tuple[Parcel, list[int]]:
        """Bring `buffers` into slots, those that do not lie in one already.

        Returns
        -------
        parcel
            To be sent to the reader, which holds every slot that it names until it returns it.
        fds
            To be sent along, and then closed.
        """
        where = [self._find(buffer) for buffer in buffers]
        missing = [i for i, span in enumerate(where) if span is None]
        alone = [i for i in missing if buffers[i].nbytes >= OWN]
        if len(alone) > _MOST_NEW // 2:
            alone = []
        for i in alone:
            self._copy(buffers, [i], where)
        self._copy(buffers, [i for i in missing if i not in alone], where)
        return self._announce(where)

    def release(self, numbers: Sequence[int]) -> None:
        """The reader is done with these."""
        for number in numbers:
            slot = self._pool.slots.get(number)
            if slot is not None:
                self._pool.drop(slot)

    def close(self) -> None:
        self._pool.close()

    def _find(self, buffer: memoryview) -> Span | None:
        """Where `buffer` lies, if that is in a slot."""
        address = segments.address_of(buffer)
        if address is None:
            return None
        for slot in self._pool.slots.values():
            start = address - slot.mapping.address
            if start >= 0 and start + buffer.nbytes <= slot.mapping.size:
                return Span(slot.number, start, buffer.nbytes)
        return None

    def _copy(
        self, buffers: Sequence[memoryview], those: list[int], where: list[Span | None]
    ) -> None:
        starts, end = [], 0
        for i in those:
            starts.append(-(-end // ALIGN) * ALIGN)
            end = starts[-1] + buffers[i].nbytes
        slot = self._pool.take(end) if end else None
        if slot is None:
            return
        target = memoryview(slot.mapping.view()).cast("B")
        for i, start in zip(those, starts, strict=True):
            size = buffers[i].nbytes
            target[start : start + size] = buffers[i]
            where[i] = Span(slot.number, start, size)

    def _announce(self, where: list[Span | None]) -> tuple[Parcel, list[int]]:
        tickets: list[tuple[int, Ticket]] = []
        fds: list[int] = []
        used: dict[int, Slot] = {}
        for i, span in enumerate(where):
            if span is None or span.slot in used:
                continue
            slot = self._pool.slots[span.slot]
            if slot.ticket is not None:
                if len(tickets) == _MOST_NEW:
                    where[i] = None
                    self._pool.give_up(slot)
                    continue
                tickets.append((slot.number, slot.ticket))
                if slot.fd is not None:
                    fds.append(slot.fd)
                slot.ticket = slot.fd = None
            used[span.slot] = slot
        for slot in used.values():
            slot.holders += 1  # the reader's
        pool = self._pool
        retired, pool.retired = tuple(pool.retired), []
        refusal, pool.refusal = pool.refusal, None
        return Parcel(tuple(where), tuple(tickets), retired, refusal), fds


class Reader:
    """The parent's view of one worker's slots.

    Parameters
    ----------
    limit
        Bytes that the consumer may hold in slots before batches are copied out instead. Below
        the writer's limit, so that the writer always finds a free one.
    names
        As the writer's.
    """

    def __init__(self, limit: int, names: str | None = None) -> None:
        self._limit = limit
        self._names = names
        self._highest = -1
        self._mappings: dict[int, Mapping | OSError] = {}
        self._lent = 0
        self._returned: deque[tuple[int, int]] = deque()  # slot, bytes lent; from any thread
        self._free: list[int] = []  # returned, and not yet told
        self.overflow: str | None = None
        """Why the last batch was copied out; None as long as none was."""

    def learn(self, parcel: Parcel, fds: list[int]) -> None:
        """Map what is new in `parcel`, forget what is gone. Takes over `fds`."""
        for number in parcel.retired:
            self._mappings.pop(number, None)
        for number, ticket in parcel.tickets:
            self._highest = max(self._highest, number)
            fd = fds.pop(0) if ticket.name is None else None
            try:
                self._mappings[number] = segments.open_ticket(ticket, fd)
            except OSError as error:  # told when the batch is opened, and with that batch alone
                self._mappings[number] = error

    def buffers(self, parcel: Parcel, streamed: Sequence[memoryview]) -> list[memoryview]:
        """The batch's buffers; each slot is returned when the last array over it dies."""
        stream = iter(streamed)
        by_slot: dict[int, memoryview] = {}
        found = []
        try:
            for number in _slots_of(parcel):
                by_slot[number] = self._lend(number)
        except MemoryError:
            lost = [number for number in _slots_of(parcel) if number not in by_slot]
            self._returned.extend((number, 0) for number in lost)
            raise
        for span in parcel.spans:
            if span is None:
                found.append(next(stream))
            else:
                found.append(by_slot[span.slot][span.start : span.start + span.size])
        return found

    def give_back(self, parcel: Parcel) -> None:
        """Nobody wants what is in `parcel`."""
        self._returned.extend((slot, 0) for slot in _slots_of(parcel))

    def returned(self) -> list[int]:
        """Slots whose last array has died since the last call."""
        self._collect()
        found, self._free = self._free, []
        return found

    def _collect(self) -> None:
        returned = self._returned
        while returned:
            slot, size = returned.popleft()
            self._lent -= size
            self._free.append(slot)

    def sweep(self) -> None:
        """Take the names off what the writer, which is gone, had made and we have never opened."""
        if self._names is None:
            return
        number = misses = 0
        while number <= self._highest or misses < 2 * IDLE:
            misses = 0 if segments.unlink(f"{self._names}{number}") else misses + 1
            number += 1

    def _lend(self, number: int) -> memoryview:
        mapping = self._mappings[number]
        if isinstance(mapping, OSError):
            raise MemoryError(f"a slot of shared memory can't be mapped here: {mapping}")
        holder = mapping.view()
        self._collect()
        if self._lent + mapping.size > self._limit:
            self.overflow = (
                f"the batches that are kept hold {self._lent:,} bytes of slots, of "
                f"{self._limit:,} for each worker"
            )
            copied = memoryview(bytearray(holder))
            self._returned.append((number, 0))
            return copied
        self._lent += mapping.size
        # The finalizer also keeps the mapping alive for as long as there is a view of it.
        done = weakref.finalize(holder, _hand_in, self._returned, number, mapping)
        done.atexit = False
        return memoryview(holder).cast("B")


def _slots_of(parcel: Parcel) -> list[int]:
    return list(dict.fromkeys(span.slot for span in parcel.spans if span is not None))


def _hand_in(returned: deque[tuple[int, int]], number: int, mapping: Mapping) -> None:
    returned.append((number, mapping.size))
