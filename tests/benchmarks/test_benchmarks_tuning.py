"""The case `tune`: pipelines with the options of Grain's picker, and rates without a burst.

No test here looks at how long something took.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import multiprocessing
import weakref
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch.utils.data

pytest.importorskip("psutil")
pytest.importorskip("rich")

from benchmarks.case import Options
from benchmarks.cases import tuning
from benchmarks.cases.tuning import GRAIN, GUESSES, TORCH_AS_GRAIN, chosen_rate, rate
from benchmarks.datasets.tuned import Shards, Work
from benchmarks.display import cost_of
from benchmarks.results import Measurement


class Producer:
    """Batches of which the first `ready` take no time, and each other one a second."""

    def __init__(self, ready: int) -> None:
        self.now = 0.0
        self.taken = 0
        self._ready = ready

    def clock(self) -> float:
        return self.now

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.now += number >= self._ready
            self.taken += 1
            yield number


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_batches_made_ahead_do_not_count(ahead: int) -> None:
    producer = Producer(ready=ahead)
    assert rate(iter(producer), ahead, 1.0, producer.clock) == 1.0


@pytest.mark.parametrize(
    ("ahead", "seconds", "timed"), [(1, 3.0, 3), (5, 3.0, 5), (50, 3.0, 30), (0, 0.0, 1)]
)
def test_timed_batches_are_as_many_as_are_made_ahead_within_a_limit(
    ahead: int, seconds: float, timed: int
) -> None:
    producer = Producer(ready=ahead)
    rate(iter(producer), ahead, seconds, producer.clock)
    assert producer.taken == ahead + timed


def test_without_rivals_grain_takes_no_part() -> None:
    for options, expected in ((Options(), True), (Options(rivals=False), False)):
        for variant in tuning.tuning(options).variants:
            assert (GRAIN in variant.loaders) is expected
            assert (TORCH_AS_GRAIN in variant.loaders) is expected
            assert set(GUESSES) <= set(variant.loaders)


def test_the_plan_and_the_load_are_in_the_cell() -> None:
    details = {"plan": ["2 x 16 threads"], "load": [1.5]}
    row = Measurement("tune", "Python", GRAIN, "ms / batch", [1.0], details=details)
    assert cost_of(row) == "2 x 16 threads, load 1.5"


@pytest.fixture
def picker() -> Any:
    """The module that imports Grain, where that is installed."""
    pytest.importorskip("grain", reason="not available. Install it with: pip install grain")
    return importlib.import_module("benchmarks.loaders.grain_picked")


def test_memory_for_no_element_is_a_plan_without_processes(picker: Any) -> None:
    dataset = Work(length=18)
    picked = picker.pick(dataset, 4, memory=1)
    assert (picked.processes, picked.plan) == (0, "0 x 0 threads")
    with picked.batches() as batches:
        found = list(batches)
    expected = list(torch.utils.data.DataLoader(dataset, 4))
    assert len(found) == len(expected) == 5
    assert all(map(torch.equal, found, expected))


def test_the_picker_s_answer_follows_from_sizes_alone(
    picker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grain._src.python.dataset.transformations import prefetch_autotune

    monkeypatch.setattr(prefetch_autotune, "cpu_count", lambda: 3)
    light, slow = Work(size=1 << 20, length=40), Work(size=1 << 20, loops=1000, length=40)
    for dataset in (light, slow):
        # Elements are batches of 2 MB, of which the memory has room for 2; and for 5 samples of 1 MB.
        picked = picker.pick(dataset, 2, memory=5 << 20)
        assert (picked.processes, picked.plan) == (2, "2 x 5 threads")
        assert picked.ahead == 2 * (2 + 1 + 1)
        assert picker.pick(dataset, 2, memory=1 << 30).plan == "3 x 16 threads"


def test_fewer_than_five_elements_are_a_process_for_each_cpu(picker: Any) -> None:
    assert picker.pick(Work(length=16), 4, memory=1).processes == multiprocessing.cpu_count()


def test_shards_are_read_at_the_same_time(picker: Any) -> None:
    dataset = Shards(shards=3, length=12)
    assert dataset.sizes == [6, 3, 3]
    picked = picker.pick(dataset, 2, memory=1)
    assert (picked.processes, picked.plan) == (0, f"0 x {picker.CYCLE} shards")
    with picked.batches() as batches:
        first, *rest = [batch.tolist() for batch in batches]
    assert first == [0, 0]
    assert sorted(sum(rest, first)) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 5]
    assert sorted(Shards(shards=3, length=12)) == sorted(sum(rest, first))


class Holder:
    """An iterator that its collection ends, and that refers to itself."""

    def __init__(self) -> None:
        self.ended = Event()
        self.itself = self
        weakref.finalize(self, self.ended.set)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No collection but those that are asked for."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_threads_of_the_picker_end_before_torch_forks(
    picker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def leaves_a_thread(dataset: Any, **budget: Any) -> Any:
        threads.append(Thread(target=Holder().ended.wait))
        threads[0].start()
        return picked(dataset, **budget)

    picked = picker.pick_performance_config
    monkeypatch.setattr(picker, "pick_performance_config", leaves_a_thread)
    picker.pick(Work(length=18), 4, memory=1)
    assert not threads[0].is_alive()


def test_a_thread_of_the_picker_that_does_not_end_is_an_error(
    picker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Event()
    monkeypatch.setattr(picker, "PATIENCE", 0.0)
    monkeypatch.setattr(
        picker,
        "pick_performance_config",
        lambda dataset, **budget: Thread(target=gate.wait, name="a reader").start(),
    )
    with pytest.raises(RuntimeError, match="a reader of Grain's picker still reads after 0 s"):
        picker.pick(Work(length=18), 4, memory=1)
    gate.set()


@pytest.mark.parametrize(
    ("loader", "detail"), [(GRAIN, ("plan", "0 x 0 threads")), (TORCH_AS_GRAIN, ("workers", 0))]
)
def test_grain_and_torch_are_measured_with_the_picked_workers(
    picker: Any, loader: str, detail: tuple[str, Any]
) -> None:
    spec = {"arguments": {}, "batch": 4, "memory": 1, "trial": 0.001, "seconds_of_search": 1.0}
    answer = chosen_rate(loader, spec)
    assert answer["value"] > 0
    assert answer["details"][detail[0]] == detail[1]
    assert answer["details"]["load"] >= 0
    # A training step is slower than the loader.
    assert chosen_rate(loader, spec | {"rate": 1.0})["value"] == 1.0
