"""Page-locked slots under any order of copies, drops and closes."""

from __future__ import annotations

import threading
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support.fake_accelerator import FakeAccelerator
from support.locked_slots import Private, Shared

from hybridloader.memory import slots
from hybridloader.memory.page_locks import PageLocks
from hybridloader.memory.slots import OWN

# -- any order of all that ---------------------------------------------------------------------------


class Slots(RuleBasedStateMachine):
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


class SharedSlots(Slots):
    kind = Shared


TestPrivateSlots = Slots.TestCase
TestSharedSlots = SharedSlots.TestCase
_SETTINGS = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestPrivateSlots.settings = TestSharedSlots.settings = _SETTINGS
