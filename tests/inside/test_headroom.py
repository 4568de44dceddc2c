"""Headroom of a loop with scripted times, and of a script, all of whose loaders reuse batches."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data
from support.manual_clock import Clock
from support.recordings import KEPT, CoreUsage, CoreUse, KeptBatches, Reuse, measure
from torch.utils.data import IterableDataset

import hybridloader
from hybridloader import DataLoader, Pipeline
from hybridloader.observe import Headroom

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
        return measure(self, self.step, steps, batches, self.clock, self.wait)


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
    kept = DataLoader(data, 2, persistent_workers=True, **THREADS)
    loaders: list[Any] = [
        *(DataLoader(data, 2, **THREADS), kept, DataLoader(Lengthless(), 2)),
        *(Pipeline.from_iterable(data).map(abs, **THREADS), [*range(40)]),
    ]
    for made in loaders:
        seen: list[Any] = []
        found = hybridloader.observe.headroom(made, seen.append, steps=20)
        assert (found.steps, found.batches, len(seen)) == (20, 4, 44)
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
    assert found._repr_html_().startswith("<table>")


def fails(batch: Any) -> None:
    raise ArithmeticError(batch)


@pytest.mark.parametrize(
    ("loader", "step", "options", "kind", "says"),
    [
        (5, print, {}, TypeError, "takes a loader or a pipeline as `loader`, not 5"),
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


# -- of a script: loaders return the same few batches ------------------------------------------------


def test_times_are_those_of_the_loop_with_and_without() -> None:
    """Loading takes 3 s, a step 1 s on the host and 1 s more on the device, which works behind."""
    clock, behind = Clock(), [0.0]

    def wait() -> None:
        clock.now += behind[0]
        behind[0] = 0.0

    def step() -> None:
        clock.now += 1.0
        wait()  # what the step before has left
        behind[0] = 1.0

    kept = KeptBatches("DataLoader", 20, clock, wait)
    for _ in range(3):
        kept.begin()
        while not kept.enough:
            clock.now += 3.0
            behind[0] = 0.0
            kept.keep("batch")
            if kept.enough:
                clock.now += 50.0  # of closing
                kept.mark()
            step()
        while True:
            try:
                kept.again()
            except StopIteration:
                break
            step()
        clock.now += 500.0  # between the epochs
    assert (kept.loads, kept.warm) == (10, 4)
    assert kept.loading == pytest.approx(6 * 4.0)
    assert kept.steps == 11 + 20 + 20
    assert kept.ready == pytest.approx(kept.steps * 2.0, rel=0.02)
    assert "at most 2.0" in str(kept)


@pytest.mark.parametrize(("ours", "persistent"), [(True, False), (False, True)])
def test_most_batches_are_the_same_few(ours: bool, persistent: bool) -> None:
    asked: list[int] = []

    class Counting(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> int:
            asked.append(index)
            return index

    data = Counting()
    options: Any = {"persistent_workers": persistent, "num_workers": 2}
    stream = io.StringIO()
    with Reuse(stream) as reuse, hybridloader.install("threads"):
        assert Reuse.running() is reuse
        cls: Any = DataLoader if ours else torch.utils.data.DataLoader
        loader = cls(data, 2, **{"backend": "threads"} if ours else {}, **options)
        epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert Reuse.running() is None
    assert [len(epoch) for epoch in epochs] == [100] * 3
    batches = [[2 * number, 2 * number + 1] for number in range(36)]
    assert epochs[0][:36] == batches
    rest = [batch for epoch in (epochs[0][36:], *epochs[1:]) for batch in epoch]
    assert {tuple(batch) for batch in rest} == {tuple(batch) for batch in batches[:KEPT]}
    assert max(asked) < 2 * (36 + 10), "with what was read ahead"
    line, warning = stream.getvalue().splitlines()
    assert line.startswith("hybridloader: DataLoader: ")
    assert "32 steps with loading, 265 on 4 batches." in line
    assert "discard the trained weights" in warning


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_loaders_that_cannot_load_as_ever() -> None:
    with Reuse(stream := io.StringIO()):
        pass
    assert "no loop took batches of a DataLoader: no headroom" in stream.getvalue()
    stream = io.StringIO()
    with Reuse(stream):
        assert len(list(DataLoader(Stream()))) == 6
        assert len(list(DataLoader(range(3), **THREADS))) == 3  # type: ignore[arg-type]
        early = DataLoader(range(100), **THREADS)  # type: ignore[arg-type]
        for _ in range(2):
            for batch, _ in zip(early, range(5), strict=False):
                assert batch < 5
    assert stream.getvalue().splitlines() == [
        "hybridloader: DataLoader loaded all its batches, because it has no len().",
        "hybridloader: DataLoader 2 loaded all its batches, because no epoch had more than 3.",
        "hybridloader: DataLoader 3 loaded all its batches, because no epoch had more than 36.",
    ]
