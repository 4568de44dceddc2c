"""A `Fanout`: results and errors of a loop, on threads that nobody has to think of."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import pytest
from support.references import merge_references

from hybridloader.engine.messages import Abandoned, TaskContext
from hybridloader.engine.worker import worker_info_set
from hybridloader.fetching import item_loop
from hybridloader.fetching.item_loop import Fanout
from hybridloader.memory.shared_slots import SlotWriter
from hybridloader.memory.slots import Pool, set_slots
from hybridloader.memory.slots import on_this_thread as current_slots

LONG = 60.0
"""Seconds after which a test gives up; never reached when all is well."""


def together(threads: int) -> Callable[[Any], Any]:
    """Gives the item back once so many of them are under way at the same time."""
    barrier = threading.Barrier(threads)

    def function(item: Any) -> Any:
        barrier.wait(LONG)
        return item

    return function


def test_a_call_of_which_no_item_has_begun_ends_when_it_is_stopped() -> None:
    mine, release, begun = Fanout(2), threading.Event(), threading.Barrier(3)
    rung: SimpleQueue[str] = SimpleQueue()

    def function(item: int) -> None:
        begun.wait(LONG)
        assert release.wait(LONG)

    running, waiting = (
        mine.begin(function, items, None, "item", partial(rung.put, name))
        for name, items in (("running", [1, 2]), ("waiting", [3, 4]))
    )
    begun.wait(LONG)  # both threads are busy
    for job in (running, waiting):
        job.stop()
    assert (running.ended, waiting.ended) == (False, True)
    assert waiting.leave()
    release.set()
    assert running.leave()
    assert [rung.get(timeout=LONG) for _ in range(2)] == ["waiting", "running"]
    assert rung.empty()


@pytest.mark.parametrize("stuck", [True, False])
def test_a_cancelled_call_waits_for_running_items_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    caller, flag, done, ended = threading.get_ident(), TaskContext(), [], []
    begun, waiting, release = threading.Barrier(2), threading.Event(), threading.Event()

    def clock() -> float:  # the caller looks at it once it waits, context
        waiting.set()
        return next(ticks) if stuck else 0.0

    ticks = count(0.0, item_loop._PATIENCE)
    monkeypatch.setattr(item_loop, "monotonic", clock)

    def function(item: int) -> None:
        begun.wait(LONG)
        if threading.get_ident() == caller:
            flag.cancelled = True
            return
        if (release if stuck else waiting).wait(LONG):
            done.append(item)
        ended.append(item)

    with pytest.raises(Abandoned):
        Fanout(2).map(function, range(9), flag)
    assert len(done) == len(ended) == (0 if stuck else 1)
    release.set()


def test_the_slots_of_a_worker_are_taken_by_one_thread_at_a_time() -> None:
    inside, most, meet = [0], [0], together(4)

    class Slots(Pool):
        def take(self, size: int) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            for _ in range(2000):  # long enough for a switch, as the check below shows
                os.getpid()
            inside[0] -= 1

    slots = Slots(SlotWriter(1).pool.make, 1)
    before = set_slots(slots)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        Fanout(4).map(lambda i: (meet(i), current_slots.slots.empty(1)), range(40))  # type: ignore[union-attr]
    finally:
        sys.setswitchinterval(interval)
        set_slots(before)
    assert most == [1]


class Thing:
    """Something that can be seen to die."""

    id = 7

    def empty(self, size: int) -> None:
        return None


class Resting(SimpleQueue[Any]):
    """A queue that tells who waits at it."""

    def __init__(self) -> None:
        self.waiting = threading.Semaphore(0)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.waiting.release()
        return super().get(block, timeout)


def test_threads_at_rest_hold_nothing_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_loop, "SimpleQueue", Resting)
    mine, meet = Fanout(3), together(3)
    resting: Any = mine._jobs
    items, info, slots = [Thing() for _ in range(3)], Thing(), Thing()
    refs = [weakref.ref(thing) for thing in (*items, info, slots)]
    before = set_slots(slots)
    with worker_info_set(info):  # type: ignore[arg-type]
        results = mine.map(lambda item: (meet(item), Thing())[1], items)
    set_slots(before)
    refs += map(weakref.ref, results)
    del items, info, slots, results
    for _ in range(4):  # two threads come to it, and come back
        assert resting.waiting.acquire(timeout=LONG)
    merge_references()
    assert [ref() for ref in refs] == [None] * 8


def test_a_call_that_a_thread_comes_to_late_holds_nothing_of_the_users() -> None:
    caller, begun, go = threading.get_ident(), threading.Barrier(2), threading.Event()

    def get_stuck(item: int) -> None:
        begun.wait(LONG)
        if threading.get_ident() == caller:
            raise KeyboardInterrupt
        assert go.wait(LONG)

    mine = Fanout(2)
    with pytest.raises(KeyboardInterrupt):
        mine.map(get_stuck, range(2))
    items, function = [Thing(), Thing()], partial(lambda thing, item: Thing(), Thing())
    refs = [weakref.ref(thing) for thing in (*items, *function.args)]
    results = mine.map(function, items)
    refs += map(weakref.ref, results)
    del items, function, results
    assert [ref() for ref in refs] == [None] * 5
    go.set()
