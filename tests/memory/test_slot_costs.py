"""Slots cost few descriptors and mappings; private ones; and any order of all that."""

from __future__ import annotations

import gc
import os
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from support.line_count import lines_run
from support.platforms import posix
from support.slot_pairs import FIRST, Pair, descriptors, slots_in, slots_of

from hybridloader.memory import segments, shared_slots, slots
from hybridloader.memory.slots import OWN, PrivateSlots

# -- what slots cost -------------------------------------------------------------------------------


@posix  # descriptors
def test_slots_cost_no_descriptors_and_few_mappings_however_many_are_kept() -> None:
    pair, before = Pair(), descriptors()
    kept = [pair.pass_on(bytes([k]) * 40_000)[1] for k in range(200)]
    assert 200 <= len(pair.numbers) < 400
    assert len(pair.reader.segments) < 12
    assert descriptors() == before
    assert all(buffer[0][-1] == k for k, buffer in enumerate(kept))


@pytest.mark.parametrize("held", [True, False], ids=["held", "free"])
def test_a_slot_is_found_in_as_many_steps_however_many_there_are(held: bool) -> None:
    pair, content = Pair(), bytes(40_000)
    kept, found = [], []
    for count in (20, 1500):
        while len(kept) < count:
            kept.append(pair.pass_on(content)[1])
        free = kept.pop()
        if not held:
            kept.clear()
        pair.pass_on(content)  # takes in what was dropped
        found.append(lines_run(lambda: pair.pass_on(content)))
        del free
    assert found[1] <= found[0] + 50, found


def test_mappings_are_few_however_small_the_limit() -> None:
    pair = Pair(limit=64 << 20)
    kept = [pair.pass_on(bytes(36_000))[1] for _ in range(1700)]
    assert len(pair.writer.pool.segments) < 2 * slots.GROWTH
    assert pair.reader.overflow is None
    del kept


def test_where_there_is_no_memory_for_several_slots_there_may_be_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = segments.make

    def make_small(size: int, name: str | None) -> Any:
        if size > 50_000:
            raise OSError(28, "No space left on device")
        return make(size, name)

    monkeypatch.setattr(segments, "make", make_small)
    pair = Pair()
    kept = [pair.pass_on(bytes([k]) * 40_000) for k in range(8)]
    assert [slots_of(slot_map) for slot_map, _ in kept] == [
        [slots.number_of(k, 0)] for k in range(8)
    ]
    assert [slot_map.refusal for slot_map, _ in kept] == [None] * 8


def test_slots_of_sizes_no_longer_used_are_given_back_on_both_sides() -> None:
    pair = Pair()
    for size in range(1, 60):
        pair.pass_on(bytes(size * 40_000))
    for _ in range(80):  # one size from now on
        pair.pass_on(bytes(30_000))
        assert pair.both_know_the_same
    assert len(pair.numbers) <= 3
    assert pair.writer.pool.size == sum(
        segment.mapping.size for segment in pair.writer.pool.segments.values()
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
def test_more_new_slots_than_one_message_announces() -> None:
    pair = Pair(limit=slots.GROWTH * (OWN - 1))  # too little for two in one mapping
    arrays = [pair.empty(OWN) for _ in range(60)]
    for k, array in enumerate(arrays):
        array[:] = k
    slot_map, fds = pair.writer.write([memoryview(array) for array in arrays])
    assert len(fds) == len(slot_map.new) == 48
    assert [span is None for span in slot_map.spans] == [False] * 48 + [True] * 12
    pair.reader.learn(slot_map, fds)
    stream = [memoryview(bytearray(array)) for array in arrays[48:]]
    assert [b[-1] for b in pair.reader.buffers(slot_map, stream)] == list(range(60))
    slot_map, buffers = pair.pass_on(*arrays)  # the others are announced with the next batch
    assert len(slot_map.new) == 12
    assert [b[-1] for b in buffers] == list(range(60))
    pair.writer.close()


def test_many_large_buffers_share_one_slot() -> None:
    pair = Pair()
    content = [bytes([k]) * (OWN + k) for k in range(30)]
    slot_map, buffers = pair.pass_on(*content)
    assert len({*slots_of(slot_map)}) == 1
    assert [bytes(b) for b in buffers] == content


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
def test_a_slot_that_can_not_be_mapped_fails_its_own_batch_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    pair, before = Pair(), descriptors()
    first = pair.send(bytes(OWN))
    array = pair.empty(2 * OWN)
    monkeypatch.setattr(segments, "map_descriptor", refuse)
    second = pair.send(array)
    monkeypatch.undo()
    third = pair.send(b"3" * OWN)
    assert len(pair.open(first)) == 1
    with pytest.raises(MemoryError, match="can't be mapped"):
        pair.open(second)
    assert bytes(pair.open(third)[0]) == b"3" * OWN
    assert descriptors() == before


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


@posix  # descriptors
def test_a_segment_that_two_threads_close_closes_its_descriptor_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = segments.make(4096, None)
    segment, closed, close = slots.Segment(0, 4096, 1, made), list[int](), os.close

    def close_and_close_again(fd: int) -> None:
        closed.append(fd)
        segment.close()  # as another thread, while the first is at it
        close(fd)

    monkeypatch.setattr(os, "close", close_and_close_again)
    segment.close()
    assert closed == [made[2]]
    assert segment.hand_over() == []


# -- slots within one process ----------------------------------------------------------------------


def test_private_slots_refuse_past_their_limit_and_recover() -> None:
    private = PrivateSlots(1_000_000)
    kept = [private.empty(400_000) for _ in range(2)]
    assert private.empty(400_000) is None
    assert "limit of 1,000,000 bytes" in str(private.refusal)
    assert private.size <= 1_000_000
    kept.pop()
    assert private.empty(400_000) is not None


def test_private_slots_taken_and_dropped_by_several_threads_are_never_shared() -> None:
    private = PrivateSlots(64 << 20)
    passed: SimpleQueue[Any] = SimpleQueue()
    wrong: list[Any] = []

    def work(number: int) -> None:
        for step in range(150):
            buffer = private.empty(OWN + 4096 * (step % 3))
            assert buffer is not None
            array = np.frombuffer(buffer, np.uint8)
            del buffer
            mark = (number * 31 + step) % 256
            array[:] = mark
            passed.put((array, mark))
            other, expected = passed.get()  # often of another thread, which then drops it
            if other.min() != expected or other.max() != expected:
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert passed.empty()
    assert len(slots_in(private.pool)) <= 48  # 4 threads, 2 each, 3 sizes
    del threads, thread
    assert private.empty(OWN) is not None  # takes in what was dropped
    gc.collect()
    private.pool._collect()
    assert slots_in(private.pool, free=True) == slots_in(private.pool)


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
        self._before = shared_slots.OWN, slots.IDLE, shared_slots.MOST_NEW, slots.GROWTH
        shared_slots.OWN, slots.IDLE, shared_slots.MOST_NEW, slots.GROWTH = 16_000, 5, 3, 4
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
        sizes = [segment.mapping.size for segment in pool.segments.values()]
        assert pool.size == sum(sizes) <= 400_000
        for number, segment in pool.segments.items():
            idle = [place for place, references in enumerate(segment.references) if not references]
            assert sorted(segment.free) == idle
            roomy = pool._roomy.get(segment.capacity, {})
            assert (number in roomy) == bool(segment.free)
            assert (number in pool._unused) == segment.unused
        assert self.pair.reader.lent >= 0

    def teardown(self) -> None:
        try:
            self.held.clear()
            for batch, _ in self.unopened.values():
                self.pair.reader.give_back(batch[0])
            self.pair.send()
            pool = self.pair.writer.pool
            pool._collect()
            assert set(pool._unused) == set(pool.segments)  # none is lost
            assert self.pair.reader.lent == 0
        finally:
            self.pair.writer.close()
            shared_slots.OWN, slots.IDLE, shared_slots.MOST_NEW, slots.GROWTH = self._before


TestArrays = Arrays.TestCase
TestArrays.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
