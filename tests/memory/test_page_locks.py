"""Page-locked slots: locked once, used again after the device has read them, unlocked in the end."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support.fake_accelerator import FakeAccelerator
from support.forking import in_a_fork
from support.locked_slots import OWN, PageLocks, Private, Shared, address, page_locks
from support.slot_pairs import segments, slots

# -- the device comes first --------------------------------------------------------------------------


def test_each_of_two_batches_over_one_slot_is_waited_for(
    device: FakeAccelerator, locks: PageLocks
) -> None:
    memory, side = Shared(locks), device.side_stream()
    slot_map, fds = memory.writer.write([memoryview(bytes(OWN))])
    memory.reader.learn(slot_map, fds)
    view = memoryview(memory.writer.pool.segments[0].mapping.view(0, OWN)).cast("B")
    again, _ = memory.writer.write([view])
    one, other = (memory.reader.buffers(p, []) for p in (slot_map, again))
    with device.on(side):
        del one
    del other
    assert memory.reader.returned() == []
    device.run(device.default)
    assert memory.reader.returned() == [0]
    assert memory.reader.returned() == []
    device.run(side)
    assert memory.reader.returned() == [0]


def test_within_a_lock_of_the_slots_a_collection_may_end_a_batch(
    device: FakeAccelerator, locks: PageLocks
) -> None:
    memory = Private(locks)
    cycle: list[Any] = [memory.batch(1)]
    cycle.append(cycle)
    del cycle

    def collect() -> None:
        with memory.slots.pool.taking:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert device.queued == 1


# -- a device that makes trouble ---------------------------------------------------------------------


class Captured(FakeAccelerator):
    """A device on which no marks can be made or asked for a while, as while a graph is captured."""

    capturing = False

    def mark(self, stream: Any) -> Any:
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().mark(stream)


def test_a_mark_that_can_not_be_made_now_is_made_later_on_the_same_stream() -> None:
    device = Captured()
    side, locks = device.side_stream(), PageLocks(device)
    memory = Private(locks)
    batch = memory.batch(1)
    first = address(batch)
    device.capturing = True
    with device.on(side):
        copy = device.move(batch)
        del batch
    second = address(memory.batch(2))
    device.capturing = False
    assert first not in (second, address(memory.batch(3)))
    device.run(device.default)
    assert address(memory.batch(4)) != first
    device.run()
    assert (copy == 1).all()
    assert first in {address(memory.batch(k)) for k in range(5, 9)}


class Failed(FakeAccelerator):
    failed = False

    def current_stream(self) -> Any:
        if self.failed:
            raise RuntimeError("device-side assert triggered")
        return super().current_stream()


def test_of_a_device_that_has_failed_no_memory_is_used_again_and_nothing_is_raised() -> None:
    device = Failed()
    memory = Private(PageLocks(device))
    batch = memory.batch(1)
    first = address(batch)
    device.failed = True
    del batch
    device.run()
    assert first not in {address(memory.batch(k)) for k in range(4)}
    page_locks._waiting.clear()


# -- a lock that is refused --------------------------------------------------------------------------


def test_a_lock_that_is_refused_costs_a_warning_and_nothing_else(
    memory: Any, device: FakeAccelerator, locks: PageLocks
) -> None:
    device.lockable = OWN
    kept = [memory.batch(k) for k in range(4)]
    assert [device.is_pinned(batch) for batch in kept] == [True, False, False, False]
    assert [int(batch[-1]) for batch in kept] == [0, 1, 2, 3]
    with pytest.warns(UserWarning, match="is not page-locked") as caught:
        locks.warn()
    locks.warn()  # an error if it warned
    [message] = [str(warning.message) for warning in caught]
    assert f"the fake device locks at most {OWN:,} bytes" in message
    assert f"{OWN:,} bytes are locked already" in message
    assert "Memory(limit=...)" in message


def test_a_refusal_for_another_reason_is_not_cured_by_a_limit(
    memory: Any, device: FakeAccelerator, locks: PageLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, size: int) -> None:
        raise OSError("the driver does not lock 9 bytes: operation not supported")

    monkeypatch.setattr(device, "page_lock", refuse)
    batch = memory.batch(1)
    assert not device.is_pinned(batch)
    with pytest.warns(UserWarning, match="operation not supported. Batches in it") as caught:
        locks.warn()
    message = str(caught[0].message)
    assert "limit" not in message.lower()


# -- the end -----------------------------------------------------------------------------------------


def mapped(where: int) -> bool:
    starts = (line.partition("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(
        int(start, 16) <= where < int(rest.partition(" ")[0], 16) for start, _, rest in starts
    )


class Suspicious(FakeAccelerator):
    """Notes whether pages were still mapped when they were unlocked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def page_unlock(self, address: int) -> None:
        self.seen.append(mapped(address))
        super().page_unlock(address)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", [Private, Shared])
@pytest.mark.parametrize("closed", [False, True], ids=["dropped", "closed first"])
def test_pages_are_unlocked_before_they_are_unmapped_and_not_while_they_are_looked_at(
    kind: Any, closed: bool
) -> None:
    device = Suspicious()
    memory = kind(PageLocks(device))
    memory.batch(0, 3 * OWN)
    kept = memory.batch(7, OWN)
    device.run()
    if closed:
        memory.close()
        assert [size >= OWN for size in device.locked.values()] == [True]
        assert device.is_pinned(kept)
        assert (kept == 7).all()
    where = address(kept)
    copy = device.move(kept)
    del kept, memory
    assert device.is_pinned(torch.empty(0)) is False
    device.run()
    assert (copy == 7).all()
    PageLocks(device).collect()
    assert device.locked == {}
    assert device.seen == [True, True]
    gc.collect()
    assert not mapped(where) or kind is Private  # the allocator may have put something else there


# -- forks -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_fork_leaves_the_device_alone_and_writes_to_no_slot_of_its_parents(
    memory: Any, device: FakeAccelerator, locks: PageLocks
) -> None:
    batch, other = memory.batch(1), memory.batch(9)
    first = address(batch)
    copy = device.move(other)
    del other
    queued, held = device.queued, dict(device.locked)

    def child() -> None:  # with numpy: torch's threads are not there in a fork
        nonlocal batch
        assert {*batch.numpy().tolist()} == {1}
        batch = None
        gc.collect()
        if isinstance(memory, Private):
            for _ in range(4):
                own = np.frombuffer(memory.slots.empty(OWN), np.uint8)
                own[:] = 50
            assert memory.slots.locks is None
        memory.close()
        assert not locks.lock(segments.make_private(OWN))
        locks.collect()
        assert (device.queued, device.locked) == (queued, held)

    assert in_a_fork(child) == 0
    assert (batch == 1).all()
    device.run()
    assert (copy == 9).all()
    assert address(batch) == first
    assert device.locked == held


# -- any order of all that ---------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Copies that the device makes late show whether a slot was written to, or unlocked, too early."""

    kind: Any = Private
    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeAccelerator()
        self.side = self.device.side_stream()
        self.locks = PageLocks(self.device)
        self.locks.wait_for(self.side)
        self.memory = self.kind(self.locks, 5 * OWN)
        self.value = 0
        self.copies: list[tuple[torch.Tensor, int]] = []
        self.held: list[list[tuple[torch.Tensor, int]]] = []
        self.closed = False
        self._before = slots.GROWTH
        slots.GROWTH = 2

    @rule(target=batches, size=st.sampled_from([OWN, OWN + 4096, 2 * OWN]))
    def take(self, size: int) -> list[tuple[torch.Tensor, int]]:
        self.value = self.value % 250 + 1
        batch = None if self.closed else self.memory.batch(self.value, size)
        self.held.append([] if batch is None else [(batch, self.value)])
        return self.held[-1]

    @rule(batch=batches, side=st.booleans())
    def copy(self, batch: list[tuple[torch.Tensor, int]], side: bool) -> None:
        if batch:
            tensor, value = batch[0]
            with self.device.on(self.side if side else self.device.default):
                self.copies.append((self.device.move(tensor), value))

    @rule(batch=consumes(batches), thread=st.booleans())
    def drop(self, batch: list[tuple[torch.Tensor, int]], thread: bool) -> None:
        if thread:
            other = threading.Thread(target=batch.clear)
            other.start()
            other.join()
        else:
            batch.clear()

    @rule(which=st.sampled_from(["default", "side", "both"]))
    def run(self, which: str) -> None:
        both = {"default": self.device.default, "side": self.side}
        self.device.run(*([both[which]] if which in both else both.values()))

    @rule()
    def allow_fewer_locks(self) -> None:
        self.device.lockable = 3 * OWN

    @rule()
    def lower(self) -> None:
        self.memory.lower(3 * OWN)

    @rule()
    def collect(self) -> None:
        self.locks.collect()

    @rule()
    def close(self) -> None:
        if not self.closed and self.value > 8:
            self.closed = True
            self.memory.close()

    @invariant()
    def what_is_locked_is_counted(self) -> None:
        assert self.locks.size == sum(self.device.locked.values())

    def teardown(self) -> None:
        slots.GROWTH = self._before
        self.memory.close()
        for batch in self.held:
            batch.clear()
        self.device.run()
        self.locks.collect()
        for copy, value in self.copies:
            assert (copy == value).all()
        assert self.device.locked == {}
        assert self.locks.size == 0


class AnyOrderShared(AnyOrder):
    kind = Shared


TestPrivateSlots = AnyOrder.TestCase
TestSharedSlots = AnyOrderShared.TestCase
_SETTINGS = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestPrivateSlots.settings = TestSharedSlots.settings = _SETTINGS
