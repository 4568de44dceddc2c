"""One slow item of a pipeline: how many others may be done and wait for it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hybridloader import Pipeline
from hybridloader.errors import NotReady
from hybridloader.testing import Gate

TASKS = 64
"""Results of each worker that may wait behind a late one."""

WORKERS = 2
WINDOW = 2 * WORKERS


@pytest.fixture(autouse=True)
def one_item_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridloader.engine.worker.perf_counter", itertools.count().__next__)


def made_beside_a_slow_item(wanted: int, length: int = 400, **where: Any) -> tuple[int, list[int]]:
    """Let item 0 be slow until `wanted` others are made, and nothing more happens.

    Returns how many were made, and the results.
    """
    gate, made = Gate(), list[int]()

    def work(item: int) -> bytes:
        if item == 0:
            gate.arrive()
        made.append(item)
        return item.to_bytes(1000, "big")

    pipe = Pipeline.from_dataset(range(length))
    with pipe.map(work, backend="threads", num_workers=WORKERS, **where).run() as run:

        def come() -> bool:
            with pytest.raises(NotReady):
                run.next_nowait()
            return len(made) >= wanted

        Gate._until(come, "workers rest beside a slow item")
        for _ in range(50):
            come()
        count = len(made)
        gate.open()
        return count, [int.from_bytes(item, "big") for item in run]


def test_a_slow_item_holds_up_no_other_worker() -> None:
    most = WINDOW + TASKS * WORKERS - 2  # but for the slow one, and that at hand behind it
    made, results = made_beside_a_slow_item(most)
    assert made == most
    assert results == list(range(400))


@pytest.mark.parametrize("prefetch", [4, 20])
def test_a_number_that_was_given_is_kept_to(prefetch: int) -> None:
    made, results = made_beside_a_slow_item(prefetch - 2, prefetch=prefetch)
    assert made == prefetch - 2
    assert results == list(range(400))


def test_so_are_bytes_that_were_given() -> None:
    made, results = made_beside_a_slow_item(10, buffer_bytes=20_000)
    assert made <= 19
    assert results == list(range(400))


def test_without_order_nothing_waits_for_it() -> None:
    gate = Gate()

    def work(item: int) -> int:
        if item == 0:
            gate.arrive()
        return item

    pipe = Pipeline.from_dataset(range(50))
    pipe = pipe.map(work, backend="threads", num_workers=2, in_order=False)
    with pipe.run() as run:
        assert sorted(itertools.islice(run, 48)) == [1, *range(3, 50)]
        gate.open()
        assert sorted(run) == [0, 2]
