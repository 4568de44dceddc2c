"""Work on its way to workers and back: task sizes, readers, threads in workers, flow."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader import Fork, Pipeline, Threads, get_worker_info
from hybridloader.engine import Crew, Task
from hybridloader.errors import NotReady
from hybridloader.testing import Gate

KINDS = ("inline", "threads", "fork")

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


# -- task sizes --------------------------------------------------------------------------------------


def weighed(crew: Any, sizes: list[int]) -> Crew:
    """Return the crew, which notes from now on how many items a task has."""
    send = crew.send

    def note(worker: int, message: Any) -> None:
        if isinstance(message, Task):
            sizes.append(len(message.index))
        send(worker, message)

    crew.send = note
    return crew  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Weighing(Threads):
    """Threads that remember how many items a task had."""

    sizes: list[int] = field(default_factory=list)
    name: ClassVar[str] = "weighing"

    def open(self) -> Crew:
        return weighed(super().open(), self.sizes)


@dataclass(frozen=True)
class WeighingFork(Fork):
    """Forked workers of which it is remembered how many items a task had."""

    sizes: list[int] = field(default_factory=list)
    name: ClassVar[str] = "weighing-fork"

    def open(self) -> Crew:
        return weighed(super().open(), self.sizes)


def sizes_of(count: int, **where: Any) -> list[int]:
    backend = Weighing()
    pipe = Pipeline.from_dataset(range(count)).map(abs, backend=backend, **where)
    assert list(pipe) == list(range(count))
    assert sum(backend.sizes) == count
    return backend.sizes


def sizes_of_items(items: list[Any]) -> list[int]:
    backend = Weighing()
    pipe = Pipeline.from_dataset(items).map(lambda item: item, backend=backend, num_workers=1)
    assert list(pipe) == items
    return backend.sizes


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("threads", [1, 3])
def test_slow_work_is_handed_out_one_by_one_or_one_for_each_thread(threads: int) -> None:
    sizes = sizes_of(30, num_workers=2, threads_per_worker=threads)
    assert sizes == [threads] * (30 // threads)


@pytest.mark.usefixtures("quick")
def test_task_sizes_of_quick_work_grow_by_two_at_most_to_a_limit() -> None:
    sizes = sizes_of(2000, num_workers=1)
    assert sizes[0] == 1
    assert max(sizes) == MOST
    assert all(size <= 2**number for number, size in enumerate(sizes))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("prefetch", [1, 5])
def test_task_sizes_are_no_larger_than_prefetch(prefetch: int) -> None:
    assert max(sizes_of(300, num_workers=1, prefetch=prefetch)) <= prefetch


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("kind", "item", "made"),
    [
        (Weighing, 1 << 20, 1),
        (Weighing, 1, 1 << 22),
        (WeighingFork, 1 << 22, 1),
        (WeighingFork, 1, 1 << 20),
    ],
)
def test_tasks_of_large_items_or_results_are_small(kind: Any, item: int, made: int) -> None:
    """In bytes: no task has more than 4 MiB, or it has a single item."""

    class Blobs:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> bytes:
            return bytes(item)

    backend = kind()
    pipe = Pipeline.from_dataset(Blobs()).map(lambda _: bytes(made), backend=backend, num_workers=1)
    assert len(list(pipe)) == sum(backend.sizes) == 40
    fitting = max(1, MOST_BYTES // (max(item, made) + 33))  # an object of bytes has 33 more
    # The bytes of results are known when the first has come; two tasks are in flight.
    assert max(backend.sizes[2:]) == fitting


@pytest.mark.usefixtures("quick")
def test_few_elements_of_a_long_item_are_weighed() -> None:
    looks = itertools.count()

    class Token:
        @property
        def nbytes(self) -> int:
            next(looks)
            return 1 << 12

    item = [Token()] * 4096  # 16 MiB, so that each is a task of its own
    sizes = sizes_of_items([item] * 20)
    assert max(sizes) == 1
    assert 0 < next(looks) <= 2 * 8 * 20  # eight of each item and of each result


# -- not waiting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "behind"),
    [("threads", "nothing"), ("threads", "batches"), ("threads", "stages"), ("fork", "nothing")],
)
def test_next_nowait_says_not_ready_and_loses_nothing(backend: str, behind: str) -> None:
    gate = Gate()

    def work(item: int) -> int:
        if item in (0, 7, 20):
            gate.arrive()
        return item

    pipe = Pipeline.from_dataset(range(30)).map(work, backend=backend, num_workers=2)
    expected: list[Any] = list(range(30))
    if behind == "batches":
        pipe, expected = pipe.batch(1, collate_fn=list), [[k] for k in expected]
    elif behind == "stages":
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
    st.sampled_from(KINDS),
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


def test_what_readers_had_at_hand_does_not_show_in_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybridloader.running.flow.ReaderTaskSizes.draw", lambda self, most: 5)
    monkeypatch.setattr("hybridloader.fetching.readers._READING", 1e9)
    pipe = Pipeline.from_iterable(range(100), backend="threads", num_workers=1)
    with pipe.epochs(2) as epochs:
        first = next(epochs)
        assert [next(first) for _ in range(7)] == list(range(7))
        assert list(next(epochs)) == list(range(100))


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
