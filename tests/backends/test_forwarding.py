"""Results that go on to another stage's workers unopened: what arrives, who holds what, and ends."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import same
from support.crew_driver import (
    LARGE,
    OWN,
    CrewDriver,
    digest,
    echo,
    full,
    given_back,
    make,
    one_value,
    slots_in_use,
    through,
)
from support.named_slots import NamedFork

from hybridloader import Fork, Memory, Spawn, Threads
from hybridloader.engine import Backend, Failed, Task
from hybridloader.memory import shared_slots, slots
from hybridloader.testing import Gate

PAIRS = [
    pytest.param(Fork(), Fork(), id="fork-fork"),
    pytest.param(Fork(), Spawn(), id="fork-spawn"),
    pytest.param(Spawn(), Fork(), id="spawn-fork", marks=pytest.mark.full),
    pytest.param(Spawn(), Spawn(), id="spawn-spawn", marks=pytest.mark.full),
    pytest.param(NamedFork(), NamedFork(), id="named-named"),
]


# -- what arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_hundreds_of_results_arrive_as_they_were_made(one: Backend, other: Backend) -> None:
    forks = one.name == other.name == "fork"
    numbers, workers = range(100 if forks else 60), 2 if forks else 1
    with (
        CrewDriver(one, make, workers=workers) as a,
        CrewDriver(other, digest, workers=workers) as b,
    ):
        assert through(a, b, numbers) == [digest(make(number)) for number in numbers]
        # 4 under way at A, 4 at B, of 3 sizes, and a shared one each
        for channel in a.raw.channels:
            assert len(channel.results.segments) <= 24
        for channel in b.raw.channels:
            assert channel.forwarded == {}
            assert sum(map(len, channel.claims.values())) <= 8


@pytest.mark.parametrize(("one", "other"), [PAIRS[0], PAIRS[-1]])
def test_what_is_sent_on_is_the_value_itself(one: Backend, other: Backend) -> None:
    values: list[Any] = [
        7,
        None,
        "ç" * 400_000,  # a header that has a slot
        os.urandom(10) * 40_000,
        {"a": [full(3), torch.ones(90_000)], "b": np.empty((0, 2))},
        [full(k)[:40_000] for k in range(9)],
        [np.full(OWN, k, np.uint8) for k in range(60)],  # more slots than one message tells
    ]
    with CrewDriver(one, echo) as a, CrewDriver(other, echo) as b:
        for _ in range(2):
            for value in values:
                payload = a.payload(a.send(value))
                assert payload.forwardable
                same(value, b.call(payload))


def test_between_forks_nothing_is_opened_or_copied_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with CrewDriver(Fork(), make) as a, CrewDriver(Fork(), digest) as b:
        payloads = [a.payload(a.send(k)) for k in range(6)]
        monkeypatch.setattr("hybridloader.backends.process.crew.unpack", None)
        monkeypatch.setattr("hybridloader.memory.shared_slots.SlotReader.view", None)
        sent = [b.send(payload) for payload in payloads]
        monkeypatch.undo()
        assert [b.payload(seq).open() for seq in sent] == [digest(make(k)) for k in range(6)]
        assert b.raw.channels[0].tasks is None


def test_from_threads_to_processes_values_go_through_slots() -> None:
    with CrewDriver(Threads(), make) as a, CrewDriver(Fork(), digest) as b:
        found = through(a, b, range(40), send=lambda payload: b.send(payload.open()))
        assert found == [digest(make(k)) for k in range(40)]
        pool = b.raw.channels[0].tasks.pool
        slots = sum(len(segment.references) for segment in pool.segments.values())
        assert slots <= 24 * 2  # twice: a segment may be as large as all before it


class Mine:
    """Lives in a module that every worker can import; made to look as if in the main script."""

    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize(("one", "other"), PAIRS[:2])
def test_functions_and_classes_made_on_the_spot_are_the_callers_own_again(
    one: Backend, other: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    import __main__

    monkeypatch.setattr(Mine, "__module__", "__main__")
    monkeypatch.setattr(__main__, "Mine", Mine, raising=False)

    def wrap(index: Any) -> Any:
        kind, x = index
        return Mine(x) if kind == "class" else lambda: x

    def unwrap(found: Any) -> Any:
        return ["class", found.x] if isinstance(found, Mine) else ["function", found()]

    with CrewDriver(one, wrap) as a, CrewDriver(other, unwrap) as b:
        for sent in (["class", 5], ["class", full(5)], ["function", 5], ["function", full(5)]):
            same(sent, b.call(a.payload(a.send(sent))))
            same(sent, b.call(a.call(sent)))  # and opened on its way


# -- who holds what --------------------------------------------------------------------------------


def test_a_slot_is_free_when_it_is_answered_and_let_go_and_not_before(tmp_path: Any) -> None:
    gate = Gate(tmp_path)
    kept: list[Any] = []

    def keep(index: Any) -> Any:
        if isinstance(index, str):
            gate.arrive()
            kept.clear()
            return None
        kept.append(index[10:])
        return one_value(index)

    with CrewDriver(Fork(), full) as a, CrewDriver(Fork(), keep) as b:
        sent = b.send(a.payload(a.send(1)))
        assert given_back(a) == []
        assert b.payload(sent).open() == (1, 1)
        for k in range(2, 5):
            assert b.call(full(k)) == (k, k)
            assert given_back(a) == []  # it was answered, and is kept
        cleared = b.send("clear")
        b.raw.flush()
        gate.await_arrivals()
        gate.open()
        b.payload(cleared)
        b.call(full(9))  # an answer brings the alias back
        assert given_back(a) == [0]


def test_what_the_second_worker_keeps_or_gives_on_stays_whole() -> None:
    kept: list[Any] = []

    def keep(index: Any) -> Any:
        kept.append(index[::2])
        assert all(one_value(one) == (k, k) for k, one in enumerate(kept))
        return index[100:]

    with CrewDriver(Fork(), full) as a, CrewDriver(Fork(), keep) as b:
        found = through(a, b, range(30))
        assert [one_value(one) for one in found] == [(k, k) for k in range(30)]
        assert all(len(one) == LARGE - 100 for one in found)


def test_a_second_worker_that_keeps_all_is_given_copies_and_its_parent_warns_once() -> None:
    kept: list[Any] = []

    def keep(index: Any) -> Any:
        kept.append(index)
        assert all(one_value(one) == (k, k) for k, one in enumerate(kept))
        return len(kept)

    with (
        CrewDriver(Fork(), full) as a,
        CrewDriver(Fork(memory=Memory(limit=8_000_000)), keep) as b,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        assert through(a, b, range(40), ahead=1) == list(range(1, 41))
        b.raw.wait(0)
        assert slots_in_use(a) <= 8
    assert [
        "in worker 0, the batches that the program keeps" in str(one.message) for one in told
    ] == [True]


def test_a_task_that_fails_gives_the_slots_of_its_input_back() -> None:
    def fail(index: Any) -> None:
        raise ArithmeticError("no")

    with CrewDriver(Fork(), full) as a, CrewDriver(Fork(), fail) as b:
        for k in range(30):
            failed = b.result(b.send(a.payload(a.send(k))))
            assert isinstance(failed, Failed)
            del failed
        assert len(a.raw.channels[0].results.segments) <= 3


def test_a_payload_is_opened_discarded_or_sent_on_and_then_no_more() -> None:
    with CrewDriver(Fork(), full) as a, CrewDriver(Fork(), one_value) as b:
        opened, sent, dropped = (a.payload(a.send(k)) for k in range(3))
        opened.open()
        assert b.call(sent) == (1, 1)
        dropped.discard()
        for payload in (opened, sent, dropped):
            with pytest.raises(RuntimeError, match="already"):
                payload.open()
            with pytest.raises(RuntimeError, match="already"):
                b.send(payload)
            payload.discard()  # nothing
        b.call(full(9))
        assert given_back(a) == [slots.number_of(segment, 0) for segment in range(3)]


def test_slots_of_sizes_no_longer_used_leave_the_second_worker_too(tmp_path: Any) -> None:
    def mapped(index: Any) -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:hybridloader" in line for line in maps)

    def sized(k: int) -> Any:
        return np.zeros(OWN + 50_000 * k if k < 40 else 400_000, np.uint8)

    inherited = mapped(None)  # of tests before, which the fork has got along
    with CrewDriver(Fork(), sized) as a, CrewDriver(Fork(), mapped) as b:
        assert max(through(a, b, range(40), ahead=1)) > inherited + 20
        assert through(a, b, range(40, 160), ahead=1)[-1] <= inherited + 4
        channel = b.raw.channels[0]
        assert len(channel.known) == len(a.raw.channels[0].results.segments)


# -- ends ------------------------------------------------------------------------------------------


@pytest.fixture
def _one_slot_in_each_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the parent knows of no slot that was never used, and they can be counted."""
    monkeypatch.setattr(slots, "GROWTH", 1 << 60)


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
    for turn in (0, 3, 5):
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


def test_the_parent_keeps_no_more_descriptors_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 5
    monkeypatch.setattr(shared_slots, "_most", lambda: most)
    with CrewDriver(Fork(), make, workers=2) as a, CrewDriver(Fork(), digest, workers=2) as b:
        a.all_ready()
        b.all_ready()
        before = len(os.listdir("/proc/self/fd"))
        for first in range(0, 60, 30):
            numbers = range(first, first + 30)
            assert through(a, b, numbers, ahead=8) == [digest(make(k)) for k in numbers]
            assert len(os.listdir("/proc/self/fd")) <= before + most
        assert len(shared_slots.kept) == min(most, len(shared_slots.kept))
    assert not shared_slots.kept
