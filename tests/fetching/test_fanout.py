"""A `Fanout`: results and errors of a loop, on threads that nobody has to think of."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.references import merge_references
from torch.utils.data import get_worker_info as imported_earlier

import hybridloader
from hybridloader.engine.messages import Abandoned, TaskContext
from hybridloader.engine.worker import worker_info_set
from hybridloader.fetching import item_loop
from hybridloader.fetching.item_loop import Fanout
from hybridloader.memory.shared_slots import SlotWriter
from hybridloader.memory.slots import Pool, set_slots
from hybridloader.memory.slots import on_this_thread as current_slots

LONG = 60.0
"""Seconds after which a test gives up; never reached when all is well."""


def fanout_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("hybridloader-fanout")}


def together(threads: int) -> Callable[[Any], Any]:
    """Gives the item back once so many of them are under way at the same time."""
    barrier = threading.Barrier(threads)

    def function(item: Any) -> Any:
        barrier.wait(LONG)
        return item

    return function


@given(st.integers(1, 6), st.integers(0, 40), st.sets(st.integers(0, 39)))
def test_results_and_errors_are_those_of_a_loop(threads: int, items: int, bad: set[int]) -> None:
    begun: list[int] = []

    def function(item: int) -> int:
        begun.append(item)
        if item in bad:
            raise ValueError(item)
        return item * item

    first = min((item for item in bad if item < items), default=None)
    mine = Fanout(threads)
    if first is None:
        assert mine.map(function, range(items)) == [item * item for item in range(items)]
    else:
        with pytest.raises(ValueError) as caught:
            mine.map(function, range(items), what="sample")
        assert caught.value.args == (first,)
        assert caught.value.__notes__ == [f"sample {first}"]
    assert len(begun) == len(set(begun))
    # Handed out in their order; after an error each thread may have taken one more.
    assert set(begun) == set(range(len(begun)))
    assert len(begun) <= (items if first is None else first + threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_so_many_items_are_under_way_at_once_and_no_more(threads: int) -> None:
    mine = Fanout(threads)
    before = fanout_threads()
    assert mine.map(together(threads), range(3 * threads)) == list(range(3 * threads))
    assert len(fanout_threads() - before) == threads - 1


def test_threads_are_started_when_there_are_items_for_them_and_kept() -> None:
    before = fanout_threads()
    mine = Fanout(8)
    assert mine.map(abs, [-1]) == [1]
    assert fanout_threads() == before
    for items in (3, 3, 5, 2):
        mine.map(together(items), range(items))
    assert len(fanout_threads() - before) == 4


def test_calls_that_are_begun_one_after_the_other_have_all_threads() -> None:
    mine, function = Fanout(5), together(5)
    ended: SimpleQueue[None] = SimpleQueue()
    jobs = [
        mine.begin(function, items, None, "item", partial(ended.put, None))
        for items in ([1, 2], [3, 4], [5])
    ]
    for _ in jobs:
        ended.get(timeout=LONG)
    assert [job.result() for job in jobs] == [[1, 2], [3, 4], [5]]


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


def test_an_error_waits_for_what_is_running_and_later_errors_do_not_hide_it() -> None:
    late_has_raised, ended = threading.Event(), []

    def function(item: int) -> None:
        if item == 1:
            late_has_raised.set()
            raise KeyError(item)
        assert late_has_raised.wait(LONG)
        ended.append(item)
        raise ValueError(item)

    with pytest.raises(ValueError) as caught:
        Fanout(2).map(function, range(9))
    assert caught.value.args == (0,)
    assert ended == [0]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, Abandoned])
def test_whatever_a_thread_raises_comes_out_at_the_caller(kind: type[BaseException]) -> None:
    caller, meeting = threading.get_ident(), threading.Barrier(2)

    def function(item: int) -> None:
        meeting.wait(LONG)
        if threading.get_ident() != caller:
            raise kind

    with pytest.raises(kind):
        Fanout(2).map(function, range(2))


def test_an_interrupt_of_the_caller_does_not_wait_for_the_others() -> None:
    caller, begun, go = threading.get_ident(), threading.Barrier(2), threading.Event()

    def function(item: int) -> None:
        begun.wait(LONG)
        if threading.get_ident() == caller:
            raise KeyboardInterrupt
        assert go.wait(LONG)

    with pytest.raises(KeyboardInterrupt):
        Fanout(2).map(function, range(9))
    go.set()


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
    monkeypatch.setattr(item_loop, "time", SimpleNamespace(monotonic=clock))

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


def test_a_flag_that_goes_up_with_the_last_item_is_seen() -> None:
    flag = TaskContext()
    with pytest.raises(Abandoned):
        Fanout(3).map(lambda item: setattr(flag, "cancelled", item == 5), range(6), flag)


def test_what_is_kept_per_thread_is_the_callers_and_only_for_the_call() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    meet, info, slots = together(3), SimpleNamespace(id=7), SimpleNamespace(empty=lambda size: size)
    mine = Fanout(3)

    def look(item: int) -> tuple[Any, ...]:
        meet(item)
        taken = None if current_slots.slots is None else current_slots.slots.empty(item)
        info = hybridloader.get_worker_info()
        assert imported_earlier() is info
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return variable.get(), taken, info, *modes

    plain = [(0, None, None, True, False)] * 3
    assert mine.map(look, range(3)) == plain
    before = set_slots(slots)
    token = variable.set(1)
    with worker_info_set(info):  # type: ignore[arg-type]
        with torch.no_grad():
            assert mine.map(look, range(3)) == [(1, i, info, False, False) for i in range(3)]
        with torch.inference_mode():
            assert mine.map(look, range(3)) == [(1, i, info, False, True) for i in range(3)]
    variable.reset(token)
    assert set_slots(before) is slots
    assert mine.map(look, range(3)) == plain


def test_the_slots_of_a_worker_are_taken_by_one_thread_at_a_time() -> None:
    inside, most, meet = [0], [0], together(4)

    class Slots(Pool):
        def empty(self, size: int) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            for _ in range(2000):  # long enough for a switch, as the check below shows
                os.getpid()
            inside[0] -= 1

    slots = SlotWriter(1)
    slots.pool = Slots(slots.pool._make, 1)
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


def test_the_threads_end_when_it_is_collected() -> None:
    before = fanout_threads()
    mine: Fanout | None = Fanout(4)
    assert mine is not None
    mine.map(together(4), range(4))
    threads = fanout_threads() - before
    assert len(threads) == 3
    mine = None
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


def test_items_may_use_it_too() -> None:
    mine = Fanout(3)
    meet = together(3)

    def function(item: int) -> list[int]:
        meet(item)
        return mine.map(lambda i: i + item, range(5))

    assert mine.map(function, range(6)) == [[i + item for i in range(5)] for item in range(6)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_after_a_fork_in_the_middle_the_child_has_threads_of_its_own() -> None:
    mine, caller, forked = Fanout(3), threading.get_ident(), threading.Event()
    begun = threading.Barrier(3)

    def in_the_child() -> bool:
        return mine.map(together(3), range(6)) == list(range(6))

    def function(item: int) -> int:
        begun.wait(LONG)
        if threading.get_ident() != caller:
            assert forked.wait(LONG)
            return 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # "... is multi-threaded"
            child = os.fork()
        if child == 0:
            try:
                os._exit(0 if in_the_child() else 1)
            finally:
                os._exit(2)
        forked.set()
        return child

    child = max(mine.map(function, range(3)))
    assert os.waitpid(child, 0)[1] == 0
    assert in_the_child()


def test_an_item_that_is_stuck_does_not_hold_up_the_exit_of_python() -> None:
    code = """if True:
        import threading
        from hybridloader.fetching.item_loop import Fanout
        caller, begun = threading.get_ident(), threading.Barrier(2)
        def function(item):
            begun.wait()
            if threading.get_ident() == caller:
                raise SystemExit(7)
            threading.Event().wait()
        Fanout(2).map(function, range(2))
    """
    done = subprocess.run([sys.executable, "-c", code], timeout=LONG, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")


def test_where_no_thread_can_be_started_the_work_is_done_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    mine = Fanout(4)
    with pytest.warns(UserWarning, match="only 1 of its 4 threads .*can't start new thread"):
        assert mine.map(abs, range(-3, 3)) == [3, 2, 1, 0, 1, 2]
    assert mine.map(abs, range(-3, 3)) == [3, 2, 1, 0, 1, 2]
