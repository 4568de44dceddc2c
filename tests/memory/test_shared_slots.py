"""Slots: used again and again, never while somebody holds them, within their limit."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.platforms import posix
from support.slot_pairs import FIRST, SECOND, Pair, slots_of

from hybridloader.memory import segments, shared_slots
from hybridloader.memory.packing import tensor_over
from hybridloader.memory.slots import OWN, capacity_for

# -- used again, but not too early -----------------------------------------------------------------


def numpy_view(buffer: memoryview) -> Any:
    return np.frombuffer(buffer, np.uint8)[10:]


def torch_view(buffer: memoryview) -> Any:
    return torch.frombuffer(buffer, dtype=torch.uint8)[10:]


def view_of_a_view(buffer: memoryview) -> Any:
    return torch.frombuffer(buffer, dtype=torch.uint8).numpy()[10:][5:].reshape(-1, 1)


def storage(buffer: memoryview) -> Any:
    return tensor_over(buffer, torch.uint8, (len(buffer), 1)).untyped_storage()


@pytest.mark.parametrize("view_of", [numpy_view, torch_view, view_of_a_view, storage, memoryview])
def test_a_slot_is_used_again_once_the_last_view_of_it_has_died_and_not_before(
    view_of: Any,
) -> None:
    pair = Pair()
    first, buffers = pair.pass_on(b"a" * 5000, b"b" * 3000)
    assert [bytes(buffer) for buffer in buffers] == [b"a" * 5000, b"b" * 3000]
    view = view_of(buffers[1])
    del buffers
    second, others = pair.pass_on(b"c" * 8000)
    assert slots_of(second) != slots_of(first)[:1]  # the view is alive
    assert {*np.asarray(view).reshape(-1).tolist()} == {ord("b")}
    del view, others
    assert {slots_of(pair.pass_on(b"d" * 8000)[0])[0] for _ in range(5)} <= pair.numbers
    assert len(pair.numbers) == 2


def test_memory_that_comes_back_is_the_same_memory_on_both_sides() -> None:
    pair = Pair()
    seen = set()
    for k in range(20):
        array = pair.empty(300_000)
        array[:] = k
        _, (buffer,) = pair.pass_on(array)
        seen.add((array.ctypes.data, np.frombuffer(buffer, np.uint8).ctypes.data))
        assert {*bytes(buffer)} == {k}
        del array, buffer
    assert len(seen) == 1


def test_a_batch_made_in_a_slot_is_not_copied_on_its_way() -> None:
    pair = Pair()
    array = pair.empty(300_000)
    array[:] = 1
    slot_map, (buffer,) = pair.pass_on(array[1000:])
    assert slot_map.spans == (shared_slots.BufferPlace(0, 1000, 299_000),)
    array[1000] = 7
    assert buffer[0] == 7


def test_a_slot_that_the_worker_itself_still_holds_is_not_used_again() -> None:
    pair = Pair()
    array = pair.empty(300_000)
    array[:] = 1
    kept = array[5:6]
    del array
    slot_map, buffers = pair.pass_on(kept.base)
    del buffers
    for _ in range(3):
        other = pair.empty(300_000)
        other[:] = 9
        assert slots_of(pair.pass_on(other)[0]) != slots_of(slot_map)
        assert kept[0] == 1
        del other
    assert len(pair.numbers) == 2
    del kept
    assert {slots_of(pair.pass_on(pair.empty(300_000))[0])[0] for _ in range(4)} <= pair.numbers
    assert len(pair.numbers) == 2


def test_one_tensor_in_two_batches_is_held_until_both_have_died() -> None:
    pair = Pair()
    array = pair.empty(300_000)
    array[:] = 3
    first, one = pair.pass_on(array)
    again, other = pair.pass_on(array, array[:70_000])
    assert {*slots_of(first), *slots_of(again)} == {FIRST}
    assert again.new == ()  # announced once
    del array, one
    replacement = pair.empty(300_000)
    replacement[:] = 4
    assert slots_of(pair.pass_on(replacement)[0]) == [SECOND]
    assert {*bytes(other[0])} == {*bytes(other[1])} == {3}
    del other[0]
    assert FIRST not in slots_of(pair.pass_on(pair.empty(300_000))[0])
    other.clear()
    del replacement
    assert {slots_of(pair.pass_on(pair.empty(300_000))[0])[0] for _ in range(4)} <= pair.numbers
    assert len(pair.numbers) == 4


def test_what_nobody_opens_gives_its_slots_back() -> None:
    pair = Pair()
    for _ in range(10):
        slot_map, _ = pair.send(bytes(OWN), bytes(OWN), bytes(50_000))
        assert len({*slots_of(slot_map)}) == 3
        pair.reader.give_back(slot_map)
    assert len(pair.numbers) == 3


def test_a_view_outlives_writer_and_reader() -> None:
    pair = Pair()
    _, buffers = pair.pass_on(b"x" * 100_000)
    array, made = np.frombuffer(buffers[0], np.uint8), pair.empty(300_000)
    made[:] = 2
    pair.writer.close()
    del pair, buffers
    gc.collect()
    assert array.sum() == 100_000 * ord("x")
    assert made.sum() == 600_000


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


def test_a_buffer_begins_at_a_cache_line() -> None:
    pair = Pair()
    slot_map, buffers = pair.pass_on(*(bytes(n) for n in (33_001, 50_003, OWN + 1, 40_007)))
    assert slots_of(slot_map) == [SECOND, SECOND, FIRST, SECOND]
    for buffer in buffers:
        assert np.frombuffer(buffer, np.uint8).ctypes.data % shared_slots.ALIGN == 0


# -- how much --------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 45))
def test_capacities_waste_at_most_an_eighth_above_a_page(size: int) -> None:
    capacity = capacity_for(size)
    assert size <= capacity < size + max(4096, size / 7)
    assert capacity_for(capacity) == capacity


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_a_larger_size_never_gets_a_smaller_capacity(one: int, other: int) -> None:
    assert (one <= other) <= (capacity_for(one) <= capacity_for(other))


def test_past_the_limit_a_batch_goes_through_the_stream_and_says_why() -> None:
    pair = Pair(limit=1_000_000)
    kept = [pair.pass_on(bytes([k]) * 400_000) for k in range(4)]
    assert [slots_of(slot_map) for slot_map, _ in kept] == [[FIRST], [SECOND], [-1], [-1]]
    assert kept[1][0].refusal is None
    refusal = kept[2][0].refusal
    assert refusal is not None
    assert "limit of 1,000,000 bytes" in refusal
    assert [buffer[0][-1] for _, buffer in kept] == [0, 1, 2, 3]
    kept.clear()
    slot_map, (buffer,) = pair.pass_on(b"z" * 400_000)
    assert slots_of(slot_map) != [-1]
    assert slot_map.refusal is None  # it was told once
    assert bytes(buffer) == b"z" * 400_000


def test_what_is_larger_than_the_limit_goes_through_the_stream_and_smaller_ones_do_not() -> None:
    pair = Pair(limit=1_000_000)
    assert pair.writer.empty(2_000_000) is None
    slot_map, buffers = pair.pass_on(b"a" * 2_000_000, b"b" * 500_000, b"c" * 40_000)
    assert [slot >= 0 for slot in slots_of(slot_map)[:2]] == [False, True]
    assert [bytes(b[:1]) for b in buffers] == [b"a", b"b", b"c"]
    assert pair.writer.pool.size <= 1_000_000


def test_what_is_free_makes_room_for_another_size() -> None:
    pair = Pair(limit=1_000_000)
    for size in (100_000, 900_000, 300_000, 950_000):
        slot_map, buffers = pair.pass_on(bytes(size))
        assert slots_of(slot_map) != [-1]
        assert pair.writer.pool.size <= 1_000_000
        del buffers


def test_a_batch_larger_than_the_limit_does_not_cost_the_others_their_slots() -> None:
    pair = Pair(limit=1_000_000)
    pair.pass_on(bytes(400_000))
    pair.pass_on(bytes(5_000_000))
    assert slots_of(pair.pass_on(bytes(400_000))[0]) == [FIRST]


def test_what_the_consumer_keeps_past_its_limit_is_copied_out_and_the_slot_comes_back() -> None:
    pair = Pair(hold=900_000)
    kept = [pair.pass_on(bytes([k]) * 400_000) for k in range(2)]
    assert pair.reader.overflow is None
    kept += [pair.pass_on(bytes([k]) * 400_000) for k in range(2, 8)]
    assert pair.reader.overflow is not None
    assert "900,000" in pair.reader.overflow
    assert len({slots_of(slot_map)[0] for slot_map, _ in kept[2:]}) == 1  # at once, again and again
    for k, (_, (buffer,)) in enumerate(kept):
        assert {*bytes(buffer)} == {k}
        buffer[0] = 99  # writable, all of them
    del kept, buffer
    assert len(pair.numbers) == 4
    pair.pass_on(bytes(400_000))
    assert len(pair.reader.returned()) == 1
    assert pair.reader.lent == 0


def test_a_batch_that_has_died_no_longer_counts_as_kept() -> None:
    pair = Pair(hold=900_000)
    sent = [pair.send(bytes(400_000)) for _ in range(3)]  # the window, after the last task
    for one in sent:
        pair.open(one)  # and dropped
    assert pair.reader.overflow is None


def test_a_limit_that_was_lowered_is_kept_to_as_slots_become_free() -> None:
    pair = Pair(limit=4_000_000)
    kept = [pair.pass_on(bytes(400_000)) for _ in range(9)]
    assert pair.writer.pool.size > 3_000_000
    pair.writer.lower(1_000_000)
    kept.clear()
    for _ in range(3):
        assert slots_of(pair.pass_on(bytes(400_000))[0]) != [-1]
        assert pair.writer.pool.size <= 1_000_000
    assert pair.both_know_the_same


# -- with names ------------------------------------------------------------------------------------


@pytest.fixture
def names() -> str:
    return f"hl-{os.getpid()}-{os.urandom(3).hex()}-"


def in_dev_shm(names: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(names)]


def test_named_slots_come_across_are_used_again_and_lose_their_names(names: str) -> None:
    pair = Pair(names=names)
    for k in range(10):
        slot_map, buffers = pair.pass_on(bytes([k]) * 400_000, bytes([k]) * 50_000)
        assert [{*bytes(buffer)} for buffer in buffers] == [{k}, {k}]
        assert {*slots_of(slot_map)} == {FIRST, SECOND}
        assert in_dev_shm(names) == []
        del buffers
    pair.writer.close()


@posix  # /dev/shm
def test_sweep_takes_the_names_off_what_was_never_opened(names: str) -> None:
    pair = Pair(names=names)
    pair.pass_on(bytes(50_000))
    kept = [pair.empty(300_000), pair.empty(600_000)]
    pair.writer.write([memoryview(array) for array in kept])  # lost on its way
    assert len(in_dev_shm(names)) == 2
    pair.writer.close()
    pair.reader.sweep()
    assert in_dev_shm(names) == []


def test_named_slots_that_only_the_worker_knew_are_swept_too(names: str) -> None:
    pair = Pair(limit=1_000_000, names=names)
    try:
        for k in range(100):
            pair.empty(300_000 if k % 2 else 900_000)  # a user's own collation, and dropped
        pair.writer.close()
        pair.reader.sweep()
        assert in_dev_shm(names) == []
    finally:
        for name in in_dev_shm(names):
            segments.unlink(name)


@posix  # /dev/shm
def test_the_memory_of_a_named_segment_is_there_when_it_is_made(names: str) -> None:
    mapping, ticket, _ = segments.make(1 << 20, f"{names}0")
    try:
        assert Path("/dev/shm", str(ticket.name)).stat().st_blocks * 512 >= 1 << 20
    finally:
        segments.unlink(str(ticket.name))
    assert mapping.size >= 1 << 20
