"""Results that were sent on when one side ends, and the descriptors that sending on takes."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
from support.crew_driver import CrewDriver, digest, full, make, one_value, slots_in_use, through

from hybridloader import Fork
from hybridloader.engine.messages import Task
from hybridloader.memory import shared_slots, slots
from hybridloader.testing import Gate


@pytest.fixture
def _one_slot_in_each_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the parent knows of no slot that was never used, and they can be counted."""
    monkeypatch.setattr(slots, "GROWTH", 1 << 60)


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_one_slot_in_each_mapping")
def test_a_second_worker_that_dies_gives_all_back_and_the_rest_can_be_sent_to_another() -> None:
    def die_of_3(index: Any) -> Any:
        if index[0] == 3 and os.path.exists(marker):
            os.unlink(marker)
            os._exit(9)
        return one_value(index)

    marker = f"/dev/shm/die-{os.getpid()}"
    open(marker, "w").close()
    with CrewDriver(Fork(), full) as a, CrewDriver(Fork(), die_of_3, workers=2) as b:
        assert b.call(a.payload(a.send(1)), 0) == (1, 1)
        payloads = [a.payload(a.send(k)) for k in (2, 3, 4, 5)]
        sent = [b.send(payload, 0) for payload in payloads]
        b.end_of(0)
        assert b.payload(sent[0]).open() == (2, 2)
        held = slots_in_use(a)
        for k in (10, 11, 12):  # A goes on; what is not answered is not written over
            a.payload(a.send(k)).discard()
        assert held >= 3
        for seq, payload in zip(sent[1:], payloads[1:], strict=True):
            b.raw.send(1, Task(seq, payload))
        assert [b.payload(seq).open() for seq in sent[1:]] == [(k, k) for k in (3, 4, 5)]
        b.call(full(0), 1)
        for k in range(20):
            a.payload(a.send(k)).discard()
        assert len(a.raw.channels[0].results.segments) <= 9


@pytest.mark.usefixtures("_one_slot_in_each_mapping")
@pytest.mark.parametrize("how", ["close", "kill", "leave"])
def test_when_the_second_crew_ends_the_first_has_its_slots_again(how: str, tmp_path: Any) -> None:
    gate = Gate(tmp_path)

    def wait(index: Any) -> None:
        gate.arrive()

    with CrewDriver(Fork(), full) as a:
        for _ in range(3):
            with CrewDriver(Fork(), wait) as b:
                for k in range(4):
                    b.send(a.payload(a.send(k)))
                b.raw.flush()
                gate.await_arrivals()
                late = a.payload(a.send(10))
                assert slots_in_use(a) >= 5
                if how == "kill":
                    b.raw.kill(0)
                    b.end_of(0)
                elif how == "leave":
                    b.raw.leave()
                    b.raw.leave()
                    payload = a.payload(a.send(9))
                    b.raw.send(0, Task(99, payload))  # to nobody, who lets go of it
            b.raw.send(0, Task(100, late))
            assert slots_in_use(a) == 0
        assert len(a.raw.channels[0].results.segments) <= 6
        assert all(seen.listeners == set() for seen in a.raw.channels[0].results.segments.values())


def test_when_the_first_crew_ends_the_second_keeps_what_it_has_and_gets_the_rest(
    tmp_path: Any,
) -> None:
    gate = Gate(tmp_path)

    def wait(index: Any) -> Any:
        gate.arrive()
        return one_value(index)

    with CrewDriver(Fork(), wait) as b:
        for turn in range(2):
            with CrewDriver(Fork(), full) as a:
                sent = [b.send(a.payload(a.send(k))) for k in range(3)]
                b.raw.flush()
                gate.await_arrivals(1 + 6 * turn)
                late = [a.payload(a.send(k)) for k in range(3, 6)]
            del a
            gc.collect()
            sent += [b.send(payload) for payload in late]
            gate.open()
            assert [b.payload(seq).open() for seq in sent] == [(k, k) for k in range(6)]
        assert len(b.raw.channels[0].known) <= 6


def test_crews_that_are_driven_by_two_threads_may_end_in_any_order() -> None:
    for turn in range(6):
        with CrewDriver(Fork(), full) as a, CrewDriver(Fork(), one_value) as b:
            payloads = [a.payload(a.send(k)) for k in range(12)]
            closing = threading.Thread(target=a.raw.close)
            for k, payload in enumerate(payloads):
                if k == 2 * turn:
                    closing.start()
                b.send(payload)
            assert [b.payload(k).open() for k in range(12)] == [(k, k) for k in range(12)]
            closing.join()


# -- descriptors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 5, 64])
def test_the_parent_keeps_no_more_descriptors_than_it_may(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_slots, "_most", lambda: most)
    with CrewDriver(Fork(), make, workers=2) as a, CrewDriver(Fork(), digest, workers=2) as b:
        a.all_ready()
        b.all_ready()
        before = len(os.listdir("/proc/self/fd"))
        for first in range(0, 120, 30):
            numbers = range(first, first + 30)
            assert through(a, b, numbers, ahead=8) == [digest(make(k)) for k in numbers]
            assert len(os.listdir("/proc/self/fd")) <= before + most
        assert len(shared_slots.kept) == min(most, len(shared_slots.kept))
    assert not shared_slots.kept


@pytest.mark.parametrize("end", ["open", "discard"])
def test_what_is_not_sent_on_keeps_no_descriptor(end: str) -> None:
    with CrewDriver(Fork(), make) as a:
        for k in range(10):
            payload = a.payload(a.send(k))
            assert k or len(shared_slots.kept) == 2
            getattr(payload, end)()
            assert not shared_slots.kept
        a.payload(a.send(1))  # neither opened nor discarded


def test_a_worker_is_given_the_descriptor_of_a_slot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    duplicate = shared_slots.OwnDescriptor.duplicate

    def counting(kept: Any) -> Any:
        given.append(kept)
        return duplicate(kept)

    monkeypatch.setattr(shared_slots.OwnDescriptor, "duplicate", counting)
    with CrewDriver(Fork(), full) as a, CrewDriver(Fork(), one_value, workers=2) as b:
        through(a, b, range(60))
        assert 0 < len(given) <= 2 * len(a.raw.channels[0].results.segments)
