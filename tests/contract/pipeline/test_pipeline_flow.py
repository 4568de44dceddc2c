"""Work on its way to workers and back: how far ahead, in which tasks, by readers, by threads."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader import Pipeline, Threads, get_worker_info
from hybridloader.engine import Crew, Task
from hybridloader.errors import NotReady
from hybridloader.testing import Gate

TASKS = 64
"""Results of each worker that may wait behind a late one."""

MOST = 64
"""Items in one task at most."""

MOST_BYTES = 1 << 22
"""Bytes of the items of a task of several at most, and of its results."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task takes some seconds, for the engine."""
    monkeypatch.setattr("hybridloader.engine.worker.perf_counter", itertools.count().__next__)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task takes no time, for the engine."""
    monkeypatch.setattr("hybridloader.engine.worker.perf_counter", lambda: 0.0)


def until(condition: Callable[[], bool]) -> None:
    Gate._until(condition, "it never came to that")


class Reading:
    """Counts what is read, and how far that is ahead of what was taken."""

    def __init__(self, count: int) -> None:
        self.count, self.read, self.taken, self.furthest = count, 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        for k in range(self.count):
            self.read += 1
            self.furthest = max(self.furthest, self.read - self.taken)
            yield k

    def take_all(self, run: Iterator[int]) -> list[int]:
        found = []
        for item in run:
            self.taken += 1
            found.append(item)
        return found


# -- how far it reads ------------------------------------------------------------------------------

RELAY = 3
"""Items that a relay of the usual depth has: two that wait and one in the thread's hand."""


@pytest.mark.parametrize(("workers", "prefetch"), [(1, None), (4, None), (2, 1), (2, 3), (2, 20)])
@pytest.mark.usefixtures("slow")
def test_it_reads_no_further_than_window_and_relay(workers: int, prefetch: int | None) -> None:
    gate, source = Gate(), Reading(200)

    def work(item: int) -> int:
        if item < workers:
            gate.arrive()
        return item

    pipe = Pipeline.from_iterable(source)
    pipe = pipe.map(work, backend="threads", num_workers=workers, prefetch=prefetch)
    most = min(2 * workers, prefetch or 2 * workers) + RELAY
    with pipe.run() as run:
        until(lambda: source.read >= most)
        for _ in range(50):
            with pytest.raises(NotReady):
                run.next_nowait()
            assert source.read == most
        gate.open()
        assert source.take_all(run) == list(range(200))
    # Behind the stage there may be another relay.
    waiting = 0 if prefetch else TASKS * workers  # behind a late one; by chance, few
    assert source.furthest <= (prefetch or 2 * workers) + waiting + RELAY + RELAY


@pytest.mark.usefixtures("slow")
def test_prefetch_keeps_as_many_items_at_hand_as_it_says_and_no_more() -> None:
    source = Reading(100)
    with Pipeline.from_iterable(source).prefetch(7).run() as run:
        until(lambda: source.read == 8)
        assert source.take_all(run) == list(range(100))
    assert source.furthest <= 9  # one that was taken may be counted late


# -- who waits for whom ----------------------------------------------------------------------------


@pytest.mark.usefixtures("slow")
def test_without_limits_a_slow_item_holds_up_no_other_worker_for_long() -> None:
    gate, made, workers = Gate(), list[int](), 2
    most = 2 * workers + TASKS * workers - 2  # but for the slow one, and that at hand behind it

    def work(item: int) -> int:
        if item == 0:
            gate.arrive()
        made.append(item)
        return item

    pipe = Pipeline.from_dataset(range(400)).map(work, backend="threads", num_workers=workers)
    with pipe.run() as run:

        def come() -> bool:
            with pytest.raises(NotReady):
                run.next_nowait()
            return len(made) >= most

        until(come)
        for _ in range(50):
            come()
        assert len(made) == most
        gate.open()
        assert list(run) == list(range(400))


@pytest.mark.parametrize("stages", [1, 2])
def test_results_that_are_there_are_not_held_up_by_a_source_that_has_stopped(stages: int) -> None:
    gate = Gate()

    def source() -> Iterator[int]:
        yield from range(9)
        gate.arrive()
        yield from range(9, 20)

    pipe = Pipeline.from_iterable(source)
    for _ in range(stages):
        pipe = pipe.map(abs, backend="threads", num_workers=2, fuse=False)
    with pipe.run() as run:
        assert [next(run) for _ in range(9)] == list(range(9))
        gate.open()
        assert list(run) == list(range(9, 20))


# -- what items weigh ------------------------------------------------------------------------------


class Unweighable:
    @property
    def nbytes(self) -> int:
        raise NotImplementedError


def test_an_item_that_can_not_be_weighed_holds_nothing_up() -> None:
    inside_itself: list[Any] = []
    inside_itself.append(inside_itself)
    for item in (Unweighable(), inside_itself):
        pipe = Pipeline.from_iterable(range(9)).map(
            lambda _, item=item: item,
            backend="threads",
            num_workers=2,
            timeout=30,
        )
        assert len(list(pipe)) == 9


# -- task sizes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weighing(Threads):
    """Threads that remember how many items a task had."""

    sizes: list[int] = field(default_factory=list)
    name: ClassVar[str] = "weighing"

    def open(self) -> Crew:
        crew: Any = super().open()
        send = crew.send

        def note(worker: int, message: Any) -> None:
            if isinstance(message, Task):
                self.sizes.append(len(message.index))
            send(worker, message)

        crew.send = note
        return crew  # type: ignore[no-any-return]


def sizes_of(count: int, **where: Any) -> list[int]:
    backend = Weighing()
    pipe = Pipeline.from_dataset(range(count)).map(abs, backend=backend, **where)
    assert list(pipe) == list(range(count))
    assert sum(backend.sizes) == count
    return backend.sizes


@pytest.mark.usefixtures("slow")
def test_slow_work_is_handed_out_one_by_one_or_one_for_each_thread() -> None:
    for threads in (1, 3):
        sizes = sizes_of(30, num_workers=2, threads_per_worker=threads)
        assert sizes == [threads] * (30 // threads)


@pytest.mark.usefixtures("quick")
def test_task_sizes_of_quick_work_grow_by_two_at_most_to_a_limit() -> None:
    sizes = sizes_of(2000, num_workers=1)
    assert sizes[0] == 1
    assert max(sizes) == MOST
    assert all(size <= 2**number for number, size in enumerate(sizes))
    for prefetch in (1, 5):
        assert max(sizes_of(300, num_workers=1, prefetch=prefetch)) <= prefetch


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("item", "made"), [(1 << 20, 1), (1, 1 << 22)])
def test_tasks_of_large_items_or_results_are_small(item: int, made: int) -> None:
    """In bytes: no task has more than 4 MiB, or it has a single item."""
    backend, blobs = Weighing(), [bytes(item)] * 40
    pipe = Pipeline.from_dataset(blobs).map(lambda _: bytes(made), backend=backend, num_workers=1)
    assert len(list(pipe)) == sum(backend.sizes) == 40
    fitting = max(1, MOST_BYTES // (max(item, made) + 33))  # an object of bytes has 33 more
    # The bytes of results are known when the first has come; two tasks are in flight.
    assert max(backend.sizes[2:]) == fitting


# -- not waiting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "stages"), [("threads", 2), ("fork", 1)])
def test_next_nowait_says_not_ready_and_loses_nothing(backend: str, stages: int) -> None:
    gate = Gate()

    def work(item: int) -> int:
        if item in (0, 7, 20):
            gate.arrive()
        return item

    pipe = Pipeline.from_dataset(range(30)).map(work, backend=backend, num_workers=2)
    expected: list[Any] = list(range(30))
    if stages == 2:
        pipe = pipe.flat_map(lambda k: [k, -k], backend=backend, num_workers=2, fuse=False)
        expected = [sign * k for k in expected for sign in (1, -1)]
    with pipe.run() as run:
        gate.await_arrivals()
        for _ in range(20):
            with pytest.raises(NotReady):
                run.next_nowait()
        gate.open()
        assert list(_patiently(run, itertools.cycle([True, False]))) == expected
        with pytest.raises(StopIteration):
            run.next_nowait()


def _patiently(run: Any, ways: Iterator[bool]) -> Iterator[Any]:
    """All items, some asked for without waiting."""
    while True:
        try:
            yield next(run) if next(ways) else run.next_nowait()
        except NotReady:
            continue
        except StopIteration:
            return


# -- readers ---------------------------------------------------------------------------------------


class Shards:
    """Items of several readers: each says whose it is."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        assert info is not None
        return ((info.id, k) for k in range(self.lengths[info.id]))


@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=4),
    st.sampled_from(["inline", "threads", "fork"]),
    st.sampled_from([1e9, 0.01, "as little as can be"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_readers_are_read_in_turn_whatever_comes_at_once(
    lengths: list[int], backend: str, patience: float | str, chunks: list[int]
) -> None:
    rows = itertools.zip_longest(*([(w, k) for k in range(n)] for w, n in enumerate(lengths)))
    expected = [item for row in rows for item in row if item is not None]
    with pytest.MonkeyPatch.context() as patch:
        sizes = itertools.cycle(chunks)
        patch.setattr(
            "hybridloader.running.flow.ReaderTaskSizes.draw",
            lambda self, most: next(sizes),
        )
        if isinstance(patience, float):
            patch.setattr("hybridloader.fetching.readers._READING", patience)
        pipe = Pipeline.from_iterable(Shards(lengths), backend=backend, num_workers=len(lengths))
        assert list(pipe) == expected
        assert list(pipe.enumerate().map(list)) == [[*pair] for pair in enumerate(expected)]


def test_a_reader_that_was_held_up_before_its_first_item_has_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stalling:
        """The thread loses the processor for a second between any two looks at the clock."""

        monotonic = staticmethod(itertools.count().__next__)

    monkeypatch.setattr("hybridloader.fetching.readers.time", Stalling)
    assert list(Pipeline.from_iterable(range(9), backend="threads", num_workers=1)) == list(
        range(9)
    )


# -- threads in workers ----------------------------------------------------------------------------


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_threads_of_a_worker_work_at_the_same_time(backend: str) -> None:
    together = threading.Barrier(3, timeout=30)

    def meet(item: int) -> tuple[int, int, int]:
        together.wait()
        return item, os.getpid(), threading.get_ident()

    where: dict[str, Any] = {"backend": backend, "num_workers": 1, "threads_per_worker": 3}
    found = list(Pipeline.from_dataset(range(12)).map(meet, **where))
    assert [item for item, _, _ in found] == list(range(12))
    assert len({pid for _, pid, _ in found}) == 1
    # The first task is done by two helpers and the worker's own thread, the next ones by three helpers.
    assert len({thread for _, _, thread in found[:3]}) == 3
    assert len({thread for _, _, thread in found}) <= 4


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_a_slow_item_holds_up_one_thread_and_not_the_tasks_behind_it(backend: str) -> None:
    later = threading.Event()

    def wait_for_later(item: int) -> int:
        if item == 9:  # in the third task at hand
            later.set()
        return item if item != 4 or later.wait(30) else -1

    where: dict[str, Any] = {"backend": backend, "num_workers": 1, "threads_per_worker": 2}
    assert list(Pipeline.from_dataset(range(12)).map(wait_for_later, **where)) == list(range(12))
