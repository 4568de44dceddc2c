"""Samples of several batches of one worker, in work at once on its threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridloader import DataLoader, WorkerDied
from hybridloader.testing import Gate

LONG = 60.0
"""Seconds after which a test gives up; never reached when all is well."""

LENGTHY = 23
WARM = [21, 22, LENGTHY]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
places = pytest.mark.parametrize(
    "backend",
    ["threads", "fork", pytest.param("spawn", marks=pytest.mark.full), "shared-memory"],
)


class Numbers:
    """Samples of which some wait at the first gate, and some others at the second."""

    def __init__(self, folder: Path, first: set[int], second: set[int] | None = None) -> None:
        self.gates = []
        for name, those in (("first", first), ("second", second or set())):
            (folder / name).mkdir()
            self.gates.append((Gate(folder / name), those))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        for gate, those in self.gates:
            if index in those:
                gate.arrive()
        if index == LENGTHY:
            time.sleep(0.005)  # with a task that takes a while, the next ones are begun early
        if index == 6:
            raise KeyError("six")
        if index == 17:
            raise SystemExit("seventeen")
        return index


def loader(dataset: Any, backend: str, order: Any = range(6), **options: Any) -> Any:
    options = {"sampler": [*WARM, *order], "threads_per_worker": 3, "num_workers": 1, **options}
    return DataLoader(dataset, 3, backend=backend, collate_fn=list, **options)


def warmed(loader: Any) -> Any:
    iterator = iter(loader)
    assert next(iterator) == WARM
    return iterator


@places
def test_the_second_batch_is_begun_while_a_sample_of_the_first_is_stuck(
    backend: str, tmp_path: Path
) -> None:
    dataset = Numbers(tmp_path, {0}, {3, 5})
    iterator = warmed(loader(dataset, backend))
    (first, _), (second, _) = dataset.gates
    first.await_arrivals(1)
    second.await_arrivals(2)
    second.open()
    first.open()
    assert list(iterator) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("backend", ["threads", "fork"])
@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"seeding": "sample"}])
def test_an_error_of_a_batch_behind_a_stuck_one_comes_in_its_place(
    backend: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    dataset = Numbers(tmp_path, {1}, {7})
    order = [0, 1, 2, 6, 7, 8, 9, 10, 11]
    iterator = warmed(loader(dataset, backend, order, **options))
    (first, _), (second, _) = dataset.gates
    first.await_arrivals()
    second.open()
    first.open()
    assert next(iterator) == [0, 1, 2]
    if "on_error" in options:
        assert sorted(index for batch in iterator for index in batch) == [7, 8, 9, 10, 11]
        return
    with pytest.raises(KeyError) as caught:
        next(iterator)
    assert "sample 6" in caught.value.__notes__
    assert list(iterator) == [[9, 10, 11]]


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_a_batch_of_no_list_among_those_that_are_begun_early_comes_in_its_place(
    backend: str, tmp_path: Path
) -> None:
    batches: Any = [WARM, WARM, [], [0, 1], np.array([2, 3]), [4]]
    options: dict[str, Any] = {"threads_per_worker": 2, "num_workers": 1, "collate_fn": list}
    dataset: Any = Numbers(tmp_path, set())
    found = list(DataLoader(dataset, batch_sampler=batches, backend=backend, **options))
    assert found == [WARM, WARM, [], [0, 1], [2, 3], [4]]


def test_a_worker_that_is_killed_was_at_its_oldest_task(tmp_path: Path) -> None:
    dataset = Numbers(tmp_path, {1}, {4})
    iterator = warmed(loader(dataset, "fork"))
    for gate, _ in dataset.gates:
        gate.await_arrivals()
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"SIGKILL[\s\S]*\[0, 1, 2\]"):
        next(iterator)


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_closing_while_samples_of_two_batches_are_stuck_leaves_nothing(
    backend: str, tmp_path: Path
) -> None:
    dataset, before = Numbers(tmp_path, {0}, {3, 4}), set(threading.enumerate())
    iterator = warmed(loader(dataset, backend))
    (first, _), (second, _) = dataset.gates
    first.await_arrivals()
    second.await_arrivals(2)
    iterator.close()
    first.open()  # for threads, which can't be killed
    second.open()
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG)
        assert not thread.is_alive()


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_an_epoch_begun_while_samples_are_in_work_has_all_its_own(
    backend: str, tmp_path: Path
) -> None:
    dataset = Numbers(tmp_path, {9}, {10})
    ours = loader(dataset, backend, [9, 0, 1, 2, 10, 3], persistent_workers=True)
    (first, _), (second, _) = dataset.gates
    iterator = warmed(ours)
    first.await_arrivals()
    second.await_arrivals()  # of the third batch
    opening = threading.Timer(0.0, first.open)
    opening.start()
    second.open()
    assert list(ours) == [WARM, [9, 0, 1], [2, 10, 3]]
    opening.join(LONG)
    del iterator


@pytest.mark.parametrize("options", [{"task_timeout": LONG}, {"on_worker_death": "restart"}])
def test_tasks_that_are_watched_are_worked_at_one_by_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    dataset = Numbers(tmp_path, {0}, {3})
    iterator = warmed(loader(dataset, "fork", **options))
    (first, _), (second, _) = dataset.gates
    first.await_arrivals()
    second.open()
    assert not list((tmp_path / "second").glob("arrived-*"))
    first.open()
    assert list(iterator) == [[0, 1, 2], [3, 4, 5]]
