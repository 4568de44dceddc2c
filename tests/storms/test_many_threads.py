"""Stress of what several threads touch: many threads at once, which change places all the time.

README.md has the protection of each object. With a GIL, threads are switched every microsecond; a
free-threaded Python runs them on all cores.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from support.containers import forked
from support.platforms import posix
from support.references import merge_references
from support.ways_to_draw import WAYS

from hybridloader import DataLoader, Pipeline
from hybridloader._support import system
from hybridloader._support.threads import snapshot
from hybridloader.engine import contract, worker
from hybridloader.engine.worker import SharedItems, get_worker_info, worker_info_set
from hybridloader.loader.plan import LoaderRecord, record_of
from hybridloader.memory import shared_slots
from hybridloader.memory.packing import pack, unpack
from hybridloader.memory.slots import PrivateSlots
from hybridloader.seeding.sample_rng import Origin
from hybridloader.seeding.thread_generators import ThreadSampleRng, installation
from hybridloader.sources import PerWorker

THREADS = 8
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Call the functions on a thread each, which begin together; return their results."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    together = threading.Barrier(len(functions))

    def run(place: int) -> None:
        together.wait(PATIENCE)
        try:
            results[place] = functions[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "two threads wait for each other"
    if errors:
        raise errors[0]
    return results


def slots_keep_what_is_in_use() -> None:
    """Each thread fills slots, and lets other threads drop them."""
    slots, passed = PrivateSlots(1 << 22), SimpleQueue[Any]()

    def use(number: int) -> None:
        for turn in range(40):
            buffer = slots.empty(4096 * (1 + turn % 3))
            if buffer is None:
                continue
            view = memoryview(buffer).cast("B")
            view[:] = bytes([number]) * len(view)
            assert set(view.tobytes()) == {number}
            passed.put((number, view))
            del view, buffer
            owner, other = passed.get()
            assert set(other.tobytes()) == {owner}
            del other

    at_once(*(functools.partial(use, number) for number in range(THREADS)))
    merge_references()
    assert slots.empty(1) is not None  # it counts what was dropped
    merge_references()
    slots.pool._collect()
    assert not any(slot.references for slot in slots.pool.slots.values())
    slots.close()


def items_are_done_once() -> None:
    done: list[int] = []
    items = SharedItems(range(200))

    def note(item: int) -> int:
        done.append(item)
        return -item

    last = at_once(*[lambda: items.work(note, None)] * THREADS)
    assert sorted(done) == [*range(200)]
    assert items.results == [-item for item in range(200)]
    assert sum(last) == 1
    assert not items.begun


def samples_draw_their_own_numbers() -> None:
    """Threads draw in all ways, while patches come and go, and others draw from the global ones."""
    keys = [b"%d" % number for number in range(THREADS - 2)]
    expected, found = [], []
    for results in (expected, found):
        rngs = [ThreadSampleRng(Origin(3), 0) for _ in keys]
        for rng in rngs:
            rng.prepare()

        def draw(rng: ThreadSampleRng, key: bytes) -> Any:
            return rng.call(b"", key, lambda: [(name, way()) for name, way in WAYS.items()])

        calls = [functools.partial(draw, *pair) for pair in zip(rngs, keys, strict=True)]
        if results is expected:
            results += [call() for call in calls]
        else:
            results += at_once(*calls, patches_come_and_go, global_draws)[: len(keys)]
        for rng in rngs:
            rng.release()
    assert found == expected


def patches_come_and_go() -> None:
    for _ in range(20):
        installation.take()
        installation.give_back()


def global_draws() -> None:
    for _ in range(20):
        torch.initial_seed()
        torch.get_rng_state()
        assert get_worker_info() is None


def patches_never_break_a_call() -> None:
    """Patches are undone while the functions are called, unless loaders of other tests use them."""
    before = installation.count
    at_once(*[patches_come_and_go] * 2, *[global_draws] * (THREADS - 2))
    assert installation.count == before


def a_loader_has_one_record() -> None:
    loader = DataLoader(range(3))  # type: ignore[arg-type]
    records = at_once(*[lambda: record_of(loader)] * THREADS)
    assert len({*map(id, records)}) == 1
    numbers = at_once(*[lambda: [LoaderRecord().number for _ in range(50)]] * THREADS)
    assert len({*itertools.chain(*numbers)}) == 50 * THREADS


def descriptors_are_closed_once() -> None:
    numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
    owned: list[Any] = [shared_slots.OwnDescriptor(fd) for fd in numbers]

    def use() -> None:
        for place in range(40):
            if (descriptor := owned[place]) is not None:
                os.fstat(descriptor.fileno())
                owned[place] = None

    at_once(*[use] * THREADS)
    assert not shared_slots.ours & {*numbers}


def values_are_packed_apart() -> None:
    def use(number: int) -> None:
        for size in (1, 10, 30_000):
            value = {"n": number, "t": torch.full((size,), number)}
            header, buffers = pack(value)
            got = unpack(header, buffers)
            assert got["n"] == number
            assert got["t"].tolist() == [number] * size

    at_once(*(functools.partial(use, number) for number in range(THREADS)))


def a_handle_that_arrives_twice_is_one() -> None:
    opened = PerWorker(object, per="process")
    pickled = pickle.dumps(opened)
    del opened
    found = at_once(*[lambda: pickle.loads(pickled)] * THREADS)
    assert len({*map(id, found)}) == 1


def ends_of_workers_are_kept_apart() -> None:
    ended: list[int] = []

    class Info:
        worker_method = "thread"

    def use(number: int) -> None:
        info: Any = Info()
        with worker_info_set(info):
            for _ in range(20):
                assert worker.at_end_of_worker(functools.partial(ended.append, number))
            assert get_worker_info() is info
        worker.end_worker(info)

    at_once(*(functools.partial(use, number) for number in range(THREADS)))
    assert sorted(ended) == sorted([*range(THREADS)] * 20)


def loaders_come_and_go() -> None:
    def use(number: int) -> None:
        data: Any = range(number, number + 24)
        loader = DataLoader(data, 3, num_workers=2, backend="threads", collate_fn=list)
        for _ in range(2):
            assert [n for batch in loader for n in batch] == [*data]
        snapshot(contract._crews)

    at_once(*(functools.partial(use, number) for number in range(THREADS)))


def relays_pass_all_items() -> None:
    pipe = (
        Pipeline.from_iterable(range(200))
        .map(abs, backend="threads", num_workers=3)
        .map(str, backend="threads", num_workers=3)
        .prefetch(4)
    )
    assert [*pipe] == [*map(str, range(200))]


STRESSES = [
    slots_keep_what_is_in_use,
    items_are_done_once,
    samples_draw_their_own_numbers,
    patches_never_break_a_call,
    a_loader_has_one_record,
    descriptors_are_closed_once,
    values_are_packed_apart,
    a_handle_that_arrives_twice_is_one,
    ends_of_workers_are_kept_apart,
    loaders_come_and_go,
    relays_pass_all_items,
]


@pytest.mark.parametrize("stress", STRESSES, ids=lambda stress: stress.__name__)
@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.timeout(600)
def test_many_threads(stress: Callable[[], None], rounds: int) -> None:
    for _ in range(rounds):
        stress()


@posix
def test_a_fork_copies_no_held_lock_of_a_property() -> None:
    """Before Python 3.12, the standard `cached_property` has one lock for all objects of a class."""
    entered, leave = threading.Event(), threading.Event()

    class Slow:
        @system.cached_property
        def value(self) -> int:
            entered.set()
            return 7 if self is other or leave.wait(60) else 0

    first, other = Slow(), Slow()
    thread = threading.Thread(target=lambda: first.value)
    thread.start()
    try:
        assert entered.wait(60)
        assert forked(lambda: other.value) == 7
    finally:
        leave.set()
        thread.join()
