"""Large tasks: they reach the worker through slots, whole, writable and for as long as it wants."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison import same
from support.crew_driver import OWN, CrewDriver, echo, total
from support.named_slots import NamedFork

from hybridloader import Fork, Memory, Spawn
from hybridloader.engine import Failed

LARGE = 2 * OWN

FORKS = [
    pytest.param(Fork(), id="fork"),
    pytest.param(NamedFork(), id="named"),
    pytest.param(Fork(memory=Memory(limit=1)), id="no room"),
]
BACKENDS = [*FORKS, pytest.param(Spawn(), id="spawn", marks=pytest.mark.full)]
"""A fresh worker takes what it is sent as a forked one does: every run has one of each kind of value."""


def filled(number: int, size: int = LARGE) -> np.ndarray:
    return np.full(size, number, np.uint8)


def kinds_of_values() -> list[Any]:
    rng = np.random.default_rng(0)
    big = rng.integers(0, 255, (300, 1000), np.uint8)
    tensor = torch.from_numpy(rng.random((3, 64, 400)))
    return [
        big,
        tensor,
        big[::2, ::3].astype(">u4"),
        big[::2, ::3],
        np.asfortranarray(big.astype(np.float32)),
        tensor.transpose(0, 2),
        tensor[0].requires_grad_(),
        [big[:150], {"a": (tensor, "text", None)}, np.empty((0, 7)), torch.empty(0, 3)],
        [rng.random(5000) for _ in range(130)],  # many small: they share a slot
        [np.full(OWN, k, np.uint8) for k in range(60)],  # more new slots than one message tells
        rng.bytes(1_000_000),
        bytearray(500_000),
        "ç" * 400_000,
        [rng.bytes(90_000) for _ in range(8)],
        np.array([{"an": "object"}, None], dtype=object),
    ]


@pytest.fixture(autouse=True)
def _few_slots_may_overflow() -> Any:
    """The tests that are about warnings look at them themselves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ordinary memory")
        yield


def writer_of(crew: CrewDriver, worker: int = 0) -> Any:
    return crew.raw.channels[worker].tasks


# -- whole and writable ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend", [*FORKS, pytest.param(Spawn(), id="spawn", marks=pytest.mark.full)]
)
def test_large_tasks_of_every_kind_arrive_as_they_are(backend: Any) -> None:
    values = kinds_of_values()
    with CrewDriver(backend, echo) as crew:
        for _ in range(2):  # the second time through slots that are used again
            sent = [crew.send(value) for value in values]
            for value, seq in zip(values, sent, strict=True):
                same(value, crew.payload(seq).open())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 400_000), st.booleans()), max_size=5),
        min_size=1,
        max_size=6,
    )
)
def test_tasks_of_any_sizes_under_way_together_do_not_mix_up(tasks: list[Any]) -> None:
    values = [
        [filled(k + 1, size)[:: 2 if gaps else 1] for size, gaps in task]
        for k, task in enumerate(tasks)
    ]
    crew = _echoing()
    sent = [crew.send(value) for value in values]
    for value, seq in zip(values, sent, strict=True):
        same(value, crew.payload(seq).open())


_crew: list[CrewDriver] = []


def _echoing() -> CrewDriver:
    return _crew[0]


@pytest.fixture(autouse=True, scope="module")
def _one_echoing_crew() -> Any:
    with CrewDriver(Fork(), echo, workers=2) as crew:
        crew.all_ready()
        crew.call(filled(0))  # its descriptors are there before a test counts them
        _crew[:] = [crew]
        yield
    _crew.clear()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_may_write_to_its_input(backend: Any) -> None:
    def double(index: Any) -> Any:
        index[0] *= 2
        index[1].mul_(2)
        return [int(index[0].sum()), float(index[1].sum())]

    array, tensor = filled(1), torch.ones(LARGE)
    with CrewDriver(backend, double) as crew:
        assert crew.call([array, tensor]) == [2 * LARGE, 2.0 * LARGE]
    assert array.sum() == tensor.sum() == LARGE  # that of the caller is its own


# -- used again, and not too early -----------------------------------------------------------------


@pytest.mark.parametrize("backend", [Fork(), NamedFork()])
def test_slots_are_used_again_over_hundreds_of_tasks(backend: Any) -> None:
    with CrewDriver(backend, total, workers=2) as crew:
        under_way: list[tuple[int, int]] = []
        for k in range(300):
            under_way.append((crew.send(filled(k % 251)), k % 251))
            if len(under_way) == 6:
                seq, number = under_way.pop(0)
                assert crew.payload(seq).open() == number * LARGE
        for worker in range(2):
            segments = writer_of(crew, worker).pool.segments.values()
            references = [count for segment in segments for count in segment.references]
            assert (
                1 <= len(references) <= 8
            )  # 3 under way, and one for each answer that is read late
            assert sum(references) <= 4
        for seq, number in under_way:
            assert crew.payload(seq).open() == number * LARGE


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_that_is_a_view_of_the_task_is_whole(backend: Any) -> None:
    def views(index: Any) -> Any:
        return [index[1000:], index.reshape(-1, 2)[:, 1], torch.from_numpy(index)[:OWN]]

    with CrewDriver(backend, views) as crew:
        found = []
        for k in range(12):
            seq = crew.send(filled(k))
            crew.send(filled(99))  # would be written over it, were its slot free too early
            found.append(crew.payload(seq).open())
        for k, arrays in enumerate(found):
            assert [len(one) for one in arrays] == [LARGE - 1000, LARGE // 2, OWN]
            assert all(int(one.min()) == int(one.max()) == k for one in arrays)


# -- within the limit ------------------------------------------------------------------------------


def hoard() -> Any:
    kept: list[Any] = []

    def keep(index: Any) -> int:
        kept.append(index)
        assert all(one.min() == one.max() == k for k, one in enumerate(kept))
        return len(kept)

    return keep


@pytest.mark.parametrize("limit", [6_000_000, 1], ids=["some room", "none"])
def test_a_worker_that_keeps_all_gets_all_and_its_parent_warns_once(limit: int) -> None:
    with (
        CrewDriver(Fork(memory=Memory(limit=limit)), hoard()) as crew,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for k in range(30):
            assert crew.call(filled(k)) == k + 1
        crew.raw.wait(0)
        assert writer_of(crew).pool.size <= limit // 2
    assert len(caught) == 1
    assert "ordinary memory" in str(caught[0].message)
    assert "Memory(limit=...)" in str(caught[0].message)


def test_tasks_that_outrun_their_worker_pass_the_limit_through_the_stream_and_warn() -> None:
    with CrewDriver(Fork(memory=Memory(limit=4_000_000)), total) as crew:
        sent = [crew.send(filled(k)) for k in range(20)]
        assert writer_of(crew).pool.size <= 2_000_000
        with pytest.warns(UserWarning, match="limit of 2,000,000 bytes"):
            assert crew.payload(sent[0]).open() == 0
        for k, seq in enumerate(sent[1:], 1):
            assert crew.payload(seq).open() == k * LARGE


# -- what it costs those who need none of it -------------------------------------------------------


def test_a_small_task_makes_no_slots() -> None:
    with CrewDriver(Fork(), echo) as crew:
        for index in (7, "key", list(range(64)), None, [0, (1, 2)], filled(1, 99)):
            same(index, crew.call(index))
        assert writer_of(crew) is None


def test_a_task_by_slot_leaves_no_descriptor_behind() -> None:
    crew = _echoing()
    crew.call(filled(1))
    before = len(os.listdir("/proc/self/fd"))
    for k in range(40):
        crew.call([filled(k, OWN + 4096 * (k % 9)), filled(k, 40_000)])
    assert len(os.listdir("/proc/self/fd")) <= before


# -- when it goes wrong ----------------------------------------------------------------------------


class Poison:
    """Can be sent, and not be loaded."""

    def __init__(self, more: Any = None) -> None:
        self.more = more

    def __reduce__(self) -> Any:
        return _refuse, (self.more,)


def _refuse(more: Any) -> None:
    raise LookupError("this can't be loaded")


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("more", [None, filled(3)], ids=["small", "large"])
def test_a_task_that_can_not_be_loaded_fails_alone_and_gives_its_slots_back(
    backend: Any, more: Any
) -> None:
    with CrewDriver(backend, total) as crew:
        for _ in range(10):
            failed = crew.result(crew.send(Poison(more)))
            assert isinstance(failed, Failed)
            assert isinstance(failed.failure.to_exception("a note"), LookupError)
            del failed
            assert crew.call(filled(2)) == 2 * LARGE
        if writer_of(crew) is not None:
            pool = writer_of(crew).pool
            slots = sum(len(segment.references) for segment in pool.segments.values())
            assert slots <= 4 * 2  # twice: a segment may be as large as all before it


def test_a_task_that_can_not_be_sent_says_so_and_loses_no_slots() -> None:
    with CrewDriver(Fork(), echo) as crew:
        for k in range(20):
            crew.call(
                filled(k)
            )  # its slot is returned with the next task: that which can't be sent
            with pytest.raises(TypeError, match="a task of type"):
                crew.send([filled(1), (x for x in "abc")])
        assert len(crew.raw.channels[0].results.segments) <= 3


@pytest.mark.parametrize("backend", [Fork(), NamedFork()])
def test_tasks_that_a_dead_worker_never_read_leave_nothing(backend: Any) -> None:
    def die(index: Any) -> None:
        os._exit(3)

    before = len(os.listdir("/proc/self/fd"))
    with CrewDriver(backend, die) as crew:
        for k in range(8):
            crew.send(filled(k))
        assert crew.end_of(0).cause == "exited with code 3"
        crew.send(filled(9))  # to nobody
        assert writer_of(crew) is None
    del crew  # multiprocessing closes the process's sentinel with the process object
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    ours = f"hl-{os.getpid()}-"
    assert [name for name in os.listdir("/dev/shm") if name.startswith(ours)] == []
