"""`async def` functions in `map`: coroutines in work at a time, with order, errors and ends as ever."""

from __future__ import annotations

import asyncio
import os
import threading
from itertools import islice
from typing import Any

import pytest

from hybridloader import Pipeline

WHERE: dict[str, Any] = {
    "nowhere": {},
    "inline": {"backend": "inline"},
    "threads": {"backend": "threads", "num_workers": 2},
    "one thread": {"backend": "threads", "num_workers": 1},
    "fork": {"backend": "fork", "num_workers": 2},
    "spawn": {"backend": "spawn", "num_workers": 1},
}
everywhere = pytest.mark.parametrize(
    "where",
    [
        pytest.param(where, id=name, marks=pytest.mark.full if name == "spawn" else ())
        for name, where in WHERE.items()
    ],
)


class Meeting:
    """A function whose coroutines of `size` items wait for each other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def setup(self) -> None:
        self.most = self.here = 0
        self.gate = asyncio.Event()

    async def __call__(self, item: int) -> tuple[int, int, int, int]:
        self.here += 1
        self.most = max(self.most, self.here)
        if self.here == self.size:
            self.gate.set()
        await self.gate.wait()
        await asyncio.sleep(0)
        self.here -= 1
        loop = id(asyncio.get_running_loop())
        return item, self.most, loop, threading.get_ident() * 10**7 + os.getpid()


async def double(item: int) -> int:
    for _ in range(item % 3):
        await asyncio.sleep(0)
    return 2 * item


async def fails(item: int) -> int:
    await asyncio.sleep(0)
    if item % 4 == 1:
        raise ValueError(f"item {item}")
    return item


@everywhere
def test_several_are_in_work_at_a_time_on_one_loop_and_in_order(where: Any) -> None:
    pipe = Pipeline.from_iterable(range(40)).map(Meeting(4), concurrency=4, **where)
    for found in (list(pipe), list(pipe)):
        assert [item for item, *_ in found] == [*range(40)]
        assert {most for _, most, *_ in found} == {4}
        loops = {(loop, worker) for _, _, loop, worker in found}
        assert len(loops) <= where.get("num_workers", 1)


class Behind:
    """A function whose first item waits until a later one is in work."""

    def __init__(self, later: int) -> None:
        self.later = later

    def setup(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(self, item: int) -> int:
        if item == self.later:
            self.gate.set()
        elif item == 0:
            await self.gate.wait()
        return item


@pytest.mark.parametrize(
    "where",
    [
        {"backend": backend, "num_workers": 1, "concurrency": 2}
        for backend in ("threads", "fork", "shared-memory")
    ],
    ids=lambda where: str(where["backend"]),
)
def test_items_of_several_tasks_are_in_work_at_a_time(where: Any) -> None:
    """A task has two items, or one if the source is late; a worker has eight tasks."""
    pipe = Pipeline.from_iterable(range(40)).map(Behind(7), timeout=60, **where)
    for _ in range(2):
        assert list(pipe) == [*range(40)]


def test_an_interrupt_in_a_coroutine_goes_through_and_the_run_can_be_resumed() -> None:
    interrupts = [2]

    async def interrupted_at_2(item: int) -> int:
        await asyncio.sleep(60 if item == 3 and interrupts else 0)  # in work beside item 2
        if item in interrupts:
            raise KeyboardInterrupt
        return item

    pipe = Pipeline.from_iterable(range(4)).map(interrupted_at_2, concurrency=2)
    with pipe.run() as run:
        with pytest.raises(KeyboardInterrupt):
            list(run)
        state = run.state_dict()
    interrupts.clear()
    assert list(pipe.run(state=state)) == [2, 3]


class Stuck:
    """Coroutines that never end, and tell when they are cancelled, which takes a turn of the loop."""

    def __init__(self) -> None:
        self.begun, self.cancelled = threading.Semaphore(0), threading.Semaphore(0)

    async def __call__(self, item: int) -> None:
        self.begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.cancelled.release()


@pytest.mark.parametrize("where", [{}, {"backend": "threads", "num_workers": 1}])
def test_closing_cancels_what_is_in_work(where: Any) -> None:
    stuck = Stuck()
    run = Pipeline.from_iterable(range(9)).map(stuck, concurrency=3, **where).run()
    closing = threading.Timer(0, lambda: (stuck.begun.acquire(), run.close()))
    closing.start()
    with pytest.raises(Exception, match=r"clos"):
        next(run)
    closing.join()
    run.close()
    assert all(stuck.cancelled.acquire(timeout=60) for _ in range(3))


def test_a_slow_one_holds_up_only_so_many() -> None:
    """Behind it, items are begun up to four times as many as may be in work."""
    begun: list[int] = []
    gate = asyncio.Event()

    async def function(item: int) -> int:
        begun.append(item)
        if item == 0:
            await gate.wait()
        elif item == 11:
            gate.set()
        return item

    assert list(islice(Pipeline.from_iterable(range(99)).map(function, concurrency=3), 1)) == [0]
    assert begun == [*range(12)]


closed: list[Any] = []


class Session:
    """Session that the coroutines of one worker share in an epoch, closed on their loop."""

    fails = False

    def setup(self) -> None:
        self.loop: Any = None

    async def __call__(self, item: int) -> int:
        self.loop = asyncio.get_running_loop()
        return item

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        closed.append(asyncio.get_running_loop() is self.loop)
        if self.fails:
            raise OSError("while it was closed")


@pytest.mark.parametrize("where", [{}, {"backend": "inline"}, WHERE["one thread"]], ids=str)
def test_what_coroutines_opened_is_closed_on_their_loop(where: Any, capfd: Any) -> None:
    for taken in (9, 3):
        closed.clear()
        with Pipeline.from_iterable(range(9)).map(Session(), concurrency=2, **where).run() as run:
            assert list(islice(run, taken)) == [*range(taken)]
        assert closed == [True]
    if where == WHERE["one thread"]:
        session = Session()
        session.fails = True
        pipe = Pipeline.from_iterable(range(9)).map(session, concurrency=2, **where)
        assert list(pipe) == [*range(9)]
        assert "OSError: while it was closed" in capfd.readouterr().err


def two_steps(number: int) -> list[int]:
    """Iterate a pipeline of two `async def` steps, the second of which pulls the first."""
    pipe = Pipeline.from_iterable(range(4)).map(double, concurrency=2)
    return list(pipe.map(double, concurrency=3))


async def two_steps_within_one(number: int) -> list[int]:
    await asyncio.sleep(0)
    return two_steps(number)


@pytest.mark.parametrize("where", [{}, WHERE["threads"], WHERE["fork"]], ids=str)
def test_a_worker_or_a_notebook_whose_loop_runs_may_iterate_a_pipeline_of_coroutines(
    where: Any,
) -> None:
    wanted = [[0, 4, 8, 12]] * 3
    assert list(Pipeline.from_iterable(range(3)).map(two_steps, **where)) == wanted
    nested = Pipeline.from_iterable(range(3)).map(two_steps_within_one, concurrency=2, **where)
    assert list(nested) == wanted
    assert asyncio.run(two_steps_within_one(0)) == wanted[0]


def test_a_coroutine_that_cancels_itself_is_an_error() -> None:
    async def function(item: int) -> int:
        raise asyncio.CancelledError

    pipe = Pipeline.from_iterable(range(3)).map(function, concurrency=2)
    with (
        pipe.run() as run,
        pytest.raises(RuntimeError, match="code outside this pipeline cancelled the coroutine"),
    ):
        next(run)


def test_bad_arguments_are_told() -> None:
    pipe = Pipeline.from_iterable(range(3))
    for make, told in [
        (lambda: pipe.map(str, concurrency=3), r"concurrency is for an async def function"),
        (lambda: pipe.filter(double), r"got an async def function; await it in a map\(\)"),
        (
            lambda: pipe.map(double, concurrency=2, threads_per_worker=2, backend="threads"),
            "threads_per_worker and an async def",
        ),
        (
            lambda: pipe.map(double, concurrency=2, seeding="sample"),
            r"seeding='sample' and an async def",
        ),
        (lambda: pipe.map(double, concurrency=0), "concurrency"),
    ]:
        with pytest.raises((TypeError, ValueError), match=told):
            make()  # type: ignore[no-untyped-call]
