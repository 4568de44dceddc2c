"""Headroom of a loop with scripted times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.manual_clock import Clock
from support.recordings import CoreUsage, CoreUse
from torch.utils.data import IterableDataset

import hybridloader
from hybridloader import DataLoader, Pipeline
from hybridloader.observe import Headroom, headroom_trials

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}


class Scripted:
    """Batches that take a while to load, by a scripted clock, and a device that works behind."""

    def __init__(self, length: int, load: float, work: float, queued: float = 0.0) -> None:
        self.length, self.load, self.work, self.queued = length, load, work, queued
        self.clock = Clock()
        self.behind = 0.0  # seconds that the device has to do
        self.given = 0
        self.seen: list[int] = []
        self.closed = False

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(self.length):
                self.clock.now += self.load
                self.behind = max(0.0, self.behind - self.load)
                self.given += 1
                yield number
        finally:
            self.closed = True

    def step(self, batch: int) -> None:
        self.clock.now += self.work
        self.behind += self.queued
        self.seen.append(batch)

    def wait(self) -> None:
        self.clock.now += self.behind
        self.behind = 0.0

    def headroom(self, steps: int = 10, batches: int = 3) -> Headroom:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(headroom_trials, "perf_counter", self.clock)
            patch.setattr(headroom_trials, "synchronize", self.wait)
            return headroom_trials.headroom(self, self.step, steps=steps, batches=batches)


def test_the_time_of_loading_is_what_goes() -> None:
    script = Scripted(100, load=0.3, work=0.1)
    found = script.headroom()
    assert (found.loading, found.ready) == (pytest.approx(0.4), pytest.approx(0.1))
    assert found.speedup == pytest.approx(4.0)
    assert found.share == pytest.approx(0.75)
    assert (found.steps, found.batches) == (10, 3)
    assert script.seen == [*range(14), *([0, 1, 2] * 4)[:10]]
    assert script.given == 14, "no more than it needs"
    assert script.closed


def test_the_device_is_waited_for() -> None:
    """Steps that only queue their work: it takes 0.5 s each, and loading hides behind it."""
    found = Scripted(100, load=0.1, work=0.0, queued=0.5).headroom()
    assert found.ready == pytest.approx(0.5)
    assert found.loading == pytest.approx(0.5, abs=0.02)
    assert found.speedup < 1.05


class Lengthless(IterableDataset[int]):
    """Dataset whose class has a `__len__` that is only there to be overridden."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(80))

    def __len__(self) -> int:
        raise NotImplementedError


def test_of_real_loaders() -> None:
    data: Any = range(80)
    started: list[int] = []
    kept = DataLoader(data, 2, persistent_workers=True, worker_init_fn=started.append, **THREADS)
    loaders: list[Any] = [
        *(DataLoader(data, 2, **THREADS), kept, DataLoader(Lengthless(), 2)),
        *(Pipeline.from_iterable(data).map(abs, **THREADS), [*range(40)]),
    ]
    for made in loaders:
        seen: list[Any] = []
        found = hybridloader.observe.headroom(made, seen.append, steps=20)
        assert (found.steps, found.batches, len(seen)) == (20, 4, 44)
    assert len(list(kept)) == 40
    assert sorted(started) == [0, 1], "persistent workers stayed for the loop"
    kept._iterator.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("use", "others"),
    [
        (CoreUse(2.0, 1.9, 0.5), 1.4),
        (CoreUse(2.0, 1.9, 1.5), 0.0),
        (CoreUse(8.0, 3.0, 1.5), 0.0),
        (CoreUse(2.0), 0.0),
    ],
)
def test_cores_that_others_keep_busy_are_named(
    use: CoreUse, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's threads, which wait for each other, made a step of 16 threads 60 times as slow."""
    monkeypatch.setattr(CoreUsage, "use", lambda usage: use)
    found = Scripted(100, load=0.3, work=0.1).headroom()
    assert found.others == pytest.approx(others)
    assert ("Other programs kept 1.4 cores busy" in str(found)) == (others > 0)


def test_forms() -> None:
    found = Headroom(loading=0.4, ready=0.1, steps=10, batches=3)
    assert json.loads(json.dumps(found.to_dict()))["speedup"] == 4.0
    shown = str(found)
    assert "2.5 batches/s with loading (400.0 ms a step)" in shown
    assert "at most 4.00 times as fast" in shown


class Broken:
    def __iter__(self) -> Any:
        raise TypeError("my own")


def fails(batch: Any) -> None:
    raise ArithmeticError(batch)


@pytest.mark.parametrize(
    ("loader", "step", "options", "kind", "says"),
    [
        (5, print, {}, TypeError, "takes a loader or a pipeline as `loader`, not 5"),
        (Broken(), print, {}, TypeError, "^my own$"),
        ([1, 2], 7, {}, TypeError, "step must be a function that takes one batch"),
        ([1, 2], print, {"steps": 0}, ValueError, "steps"),
        ([1, 2], print, {"batches": 1.5}, TypeError, "batches"),
        ([], print, {}, ValueError, "needs at least 1 batches, but the loader returned 0"),
        (iter([1, 2]), abs, {}, ValueError, "needs at least 5 batches, but the loader returned 2"),
        ([1, 2], fails, {}, ArithmeticError, "1"),
    ],
)
def test_bad_input(loader: Any, step: Any, options: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        hybridloader.observe.headroom(loader, step, **options)
