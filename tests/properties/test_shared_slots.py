"""Slots: used again and again, never while somebody holds them, within their limit, at a low cost."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from support.platforms import posix
from support.slot_pairs import (
    FIRST,
    OWN,
    SECOND,
    Pair,
    capacity_for,
    descriptors,
    segments,
    shared_slots,
    slots,
    slots_of,
)

# -- used again, but not too early -----------------------------------------------------------------


def test_read_only_and_empty_buffers_are_copied_or_need_nothing() -> None:
    pair = Pair()
    array = pair.empty(300_000)
    array[:] = 5
    array.flags.writeable = False
    slot_map, (buffer,) = pair.pass_on(array)
    assert slots_of(slot_map) == [SECOND]
    assert {*bytes(buffer)} == {5}
    slot_map, buffers = pair.pass_on(b"", b"abc", b"")
    assert [bytes(b) for b in buffers] == [b"", b"abc", b""]
    pair.writer.close()  # slot 0 was never announced


def test_a_batch_may_die_on_a_thread_that_holds_the_lock_of_the_slots() -> None:
    """A finalizer runs wherever Python collects garbage."""
    private = slots.PrivateSlots(1 << 30)
    cycle: list[Any] = [private.empty(OWN)]
    cycle.append(cycle)
    del cycle

    def collect() -> None:
        with private.pool.taking:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert private.empty(OWN) is not None
    assert private.pool.size == OWN, "the slot was used again"


# -- how much --------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 45))
def test_capacities_waste_at_most_an_eighth_above_a_page(size: int) -> None:
    capacity = capacity_for(size)
    assert size <= capacity < size + max(4096, size / 7)
    assert capacity_for(capacity) == capacity


def test_past_the_limit_a_batch_goes_through_the_stream_and_says_why() -> None:
    limit = 2 * capacity_for(400_000)
    pair = Pair(limit=limit)
    kept = [pair.pass_on(bytes([k]) * 400_000) for k in range(4)]
    assert [slots_of(slot_map) for slot_map, _ in kept] == [[FIRST], [SECOND], [-1], [-1]]
    assert kept[1][0].refusal is None
    refusal = kept[2][0].refusal
    assert refusal is not None
    assert f"limit of {limit:,} bytes" in refusal
    assert [buffer[0][-1] for _, buffer in kept] == [0, 1, 2, 3]
    kept.clear()
    slot_map, (buffer,) = pair.pass_on(b"z" * 400_000)
    assert slots_of(slot_map) != [-1]
    assert slot_map.refusal is None  # it was told once
    assert bytes(buffer) == b"z" * 400_000


def test_what_is_free_makes_room_for_another_size() -> None:
    pair = Pair(limit=1_000_000)
    for size in (100_000, 900_000, 300_000, 950_000):
        slot_map, buffers = pair.pass_on(bytes(size))
        assert slots_of(slot_map) != [-1]
        assert pair.writer.pool.size <= 1_000_000
        del buffers


# -- what slots cost -------------------------------------------------------------------------------


@posix  # descriptors
def test_slots_cost_no_descriptors_and_few_mappings_however_many_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "MOST", 20)
    pair, before = Pair(), descriptors()
    kept = [pair.pass_on(bytes([k]) * 40_000) for k in range(200)]
    assert len(pair.numbers) == len(pair.reader.slots) == 20
    assert descriptors() == before
    assert all(buffer[-1] == k for k, (_, (buffer,)) in enumerate(kept))
    assert not any(slot_map.refusal for slot_map, _ in kept)
    kept.clear()
    assert slots_of(pair.pass_on(bytes(90_000))[0]) == [20]


def test_slots_of_sizes_no_longer_used_are_given_back_on_both_sides() -> None:
    pair = Pair()
    for size in range(1, 60):
        pair.pass_on(bytes(size * 40_000))
    for _ in range(400):  # one size from now on
        pair.pass_on(bytes(30_000))
        assert pair.both_know_the_same
    assert len(pair.numbers) <= 3
    assert pair.writer.pool.size == sum(
        slot.mapping.size for slot in pair.writer.pool.slots.values()
    )


@posix  # descriptors
def test_a_slot_that_was_never_announced_takes_its_descriptor_along() -> None:
    pair, before = Pair(limit=2_000_000), descriptors()
    for size in range(300_000, 1_900_000, 50_000):
        pair.empty(size)  # the worker's own business, and dropped
        assert descriptors() <= before + 6
    pair.writer.close()
    assert descriptors() == before


@posix  # descriptors
def test_no_memory_for_a_slot_sends_the_batch_through_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    pair, before = Pair(), descriptors()
    monkeypatch.setattr(segments.os, "posix_fallocate", refuse)
    assert pair.writer.empty(400_000) is None
    slot_map, (buffer,) = pair.pass_on(b"x" * 400_000)
    assert slots_of(slot_map) == [-1]
    assert "No space left" in str(slot_map.refusal)
    assert bytes(buffer) == b"x" * 400_000
    assert descriptors() == before
    monkeypatch.undo()
    slot_map, (buffer,) = pair.pass_on(b"y" * 400_000)
    assert (slots_of(slot_map), slot_map.refusal) == ([FIRST], None)
    assert bytes(buffer) == b"y" * 400_000


@posix  # descriptors
def test_memory_that_can_not_be_mapped_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = descriptors()
    monkeypatch.setattr(segments.os, "posix_fallocate", lambda *_: None)
    with pytest.raises(OSError, match=f"could not map {1 << 62} bytes: "):
        segments.make(1 << 62)
    assert descriptors() == before


@posix  # descriptors
def test_a_descriptor_that_does_not_arrive_is_told_with_the_limit() -> None:
    pair = Pair()
    slot_map, fds = pair.writer.write([memoryview(bytes(OWN))])
    os.close(*fds)
    pair.reader.learn(slot_map, [])
    with pytest.raises(MemoryError, match=r"its descriptor has not arrived \(ulimit -n\)"):
        pair.reader.buffers(slot_map, [])
    pair.writer.close()


@posix  # descriptors
def test_a_batch_that_can_not_be_mapped_still_gives_all_its_slots_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    pair.pass_on(bytes(OWN))  # slot 0 is known
    arrays = [pair.empty(OWN), pair.empty(OWN)]
    with monkeypatch.context() as patched:
        patched.setattr(segments, "map_descriptor", lambda *_, **__: (_ for _ in ()).throw(OSError))
        sent = pair.send(arrays[1], arrays[0])  # a new slot, then a known one
    with pytest.raises(MemoryError):
        pair.open(sent)
    gc.collect()
    assert sorted(pair.reader.returned()) == sorted({*slots_of(sent[0])})


# -- never a corrupt batch -------------------------------------------------------------------------


class Arrays(RuleBasedStateMachine):
    """Any order of making, sending, opening, keeping and dropping: nothing held is ever written.

    Everything that is made is filled once, with a number of its own; whatever holds it must find
    that number in it for ever.
    """

    made = Bundle("made")  # arrays that the worker holds
    sent = Bundle("sent")  # batches that the parent has read and not opened
    kept = Bundle("kept")  # arrays that the parent holds

    def __init__(self) -> None:
        super().__init__()
        self._before = shared_slots.OWN, slots.IDLE, shared_slots.MOST_NEW
        shared_slots.OWN, slots.IDLE, shared_slots.MOST_NEW = 16_000, 5, 3
        self.pair = Pair(limit=400_000, hold=150_000)
        self.count = 0
        self.held: dict[int, tuple[Any, int]] = {}
        self.unopened: dict[int, Any] = {}

    def hold(self, array: Any, number: int) -> int:
        self.count += 1
        self.held[self.count] = array, number
        return self.count

    def number(self) -> int:
        self.count += 1
        return self.count

    @rule(target=made, size=st.sampled_from([4000, 9000, 30_000, 100_000]))
    def make(self, size: int) -> Any:
        buffer = self.pair.writer.empty(size)
        if buffer is None:
            assert self.pair.writer.pool.refusal is not None
            return multiple()
        number = self.number()
        array = np.frombuffer(buffer, np.uint8)[: size // 4 * 4].view(np.uint32)
        array[:] = number
        return self.hold(array, number)

    @rule(
        target=sent,
        those=st.lists(made, max_size=5),
        fresh=st.lists(st.sampled_from([400, 5000, 20_000, 120_000]), max_size=6),
        cut=st.integers(0, 50),
    )
    def send(self, those: list[int], fresh: list[int], cut: int) -> int:
        arrays = [(self.held[key][0][cut:], self.held[key][1]) for key in those]
        for size in fresh:
            number = self.number()
            arrays.append((np.full(size // 4, number, np.uint32), number))
        batch = self.pair.send(*(array for array, _ in arrays))
        key = self.number()
        self.unopened[key] = batch, [number for _, number in arrays]
        return key

    @rule(target=kept, key=consumes(sent), how=st.integers(0, 2))
    def open(self, key: int, how: int) -> Any:
        batch, numbers = self.unopened.pop(key)
        found = []
        for buffer, number in zip(self.pair.open(batch), numbers, strict=True):
            array = np.frombuffer(buffer, np.uint32)
            assert (array == number).all()
            found.append((array, torch.from_numpy(array), array[::2])[how])
        return multiple(*(self.hold(a, n) for a, n in zip(found, numbers, strict=True)))

    @rule(key=consumes(sent))
    def discard(self, key: int) -> None:
        batch, _ = self.unopened.pop(key)
        self.pair.reader.give_back(batch[0])

    @rule(key=consumes(made))
    def worker_drops(self, key: int) -> None:
        del self.held[key]

    @rule(key=consumes(kept))
    def parent_drops(self, key: int) -> None:
        del self.held[key]

    @invariant()
    def all_that_is_held_is_as_it_was(self) -> None:
        for array, number in self.held.values():
            assert (array == number).all()

    @invariant()
    def the_sums_are_right(self) -> None:
        pool = self.pair.writer.pool
        sizes = [slot.mapping.size for slot in pool.slots.values()]
        assert pool.size == sum(sizes) <= 400_000
        assert {*pool._by_start} == {*pool.slots.values()}
        for number, slot in pool.slots.items():
            assert (number in pool._free.get(slot.capacity, {})) == (not slot.references)
        assert self.pair.reader.lent >= 0

    def teardown(self) -> None:
        try:
            self.held.clear()
            for batch, _ in self.unopened.values():
                self.pair.reader.give_back(batch[0])
            self.pair.send()
            pool = self.pair.writer.pool
            pool._collect()
            assert not any(slot.references for slot in pool.slots.values())  # none is lost
            assert self.pair.reader.lent == 0
        finally:
            self.pair.writer.close()
            shared_slots.OWN, slots.IDLE, shared_slots.MOST_NEW = self._before


TestArrays = Arrays.TestCase
TestArrays.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
