"""A writer of slots and its reader in one process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from hybridloader.memory import segments, shared_slots, slots
from hybridloader.memory.packing import tensor_over
from hybridloader.memory.shared_slots import SlotMap, SlotReader, SlotWriter
from hybridloader.memory.slots import OWN, capacity_for

__all__ = ["OWN", "capacity_for", "segments", "shared_slots", "tensor_over"]

LARGE = 1 << 40


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def writer_and_reader(limit: int = LARGE, hold: int = LARGE) -> tuple[SlotWriter, SlotReader]:
    """Return both sides of one worker's slots."""
    return SlotWriter(limit), SlotReader(hold)


class Pair:
    """One worker's writer and the parent's reader, without the two processes."""

    def __init__(self, limit: int = LARGE, hold: int = LARGE) -> None:
        self.writer, self.reader = writer_and_reader(limit, hold)

    def send(self, *buffers: Any) -> tuple[SlotMap, list[Any]]:
        """Write buffers as the worker does; the parent has read but not yet opened them."""
        self.writer.release(self.reader.returned())
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        slot_map, fds = self.writer.write(views)
        self.reader.learn(slot_map, fds)
        streamed = zip(views, slot_map.spans, strict=True)
        return slot_map, [memoryview(bytearray(v)) for v, span in streamed if span is None]

    def open(self, sent: tuple[SlotMap, list[Any]]) -> list[memoryview]:
        return self.reader.buffers(*sent)

    def pass_on(self, *buffers: Any) -> tuple[SlotMap, list[memoryview]]:
        sent = self.send(*buffers)
        return sent[0], self.open(sent)

    def empty(self, size: int) -> Any:
        """Make an array that the worker collates into."""
        self.writer.release(self.reader.returned())
        buffer = self.writer.empty(size)
        assert buffer is not None
        return np.frombuffer(buffer, np.uint8)

    @property
    def numbers(self) -> set[int]:
        """Slots that the worker has."""
        return slots_in(self.writer.pool)

    @property
    def both_know_the_same(self) -> bool:
        """True if the parent has mapped all that the worker has, and nothing else."""
        return set(self.reader.slots) == set(self.writer.pool.slots)


def slots_in(pool: slots.Pool, *, free: bool = False) -> set[int]:
    """The numbers of all slots, or of those that nobody holds."""
    return {number for number, slot in pool.slots.items() if not (free and slot.references)}


FIRST, SECOND = 0, 1
"""Numbers of the first slots."""


def slots_of(slot_map: SlotMap) -> list[int]:
    return [-1 if span is None else span.slot for span in slot_map.spans]
