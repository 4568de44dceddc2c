"""P11 without a device: what it works out, on one whose time the test makes; and that it says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import device_steps, harness, registry
from benchmarks.__main__ import main
from benchmarks.case import CannotDo, Options
from benchmarks.cases import device as device_case
from benchmarks.results import Measurement, Results, relate
from benchmarks.targets import verdicts
from benchmarks.timing import percentile

COPY, PRODUCT = 0.010, 0.001


class Clock:
    """Goes on by a microsecond whenever it is read, and by more if it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Point:
    def __init__(self, clock: Clock, at: float) -> None:
        self.clock, self.at = clock, at

    def query(self) -> bool:
        return self.clock() >= self.at

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)


class Device:
    """Does one thing after the other; a copy on its own stream takes no time of the others'."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.busy = 0.0  # until when
        self.copying = 0.0
        self.ready: list[float] = []  # when each batch is there
        self.used: list[Any] = []

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.busy, self.copying)

    def step(self, batch: Any, products: int) -> Point:
        self.used.append(batch)
        there = 0.0 if batch is None else self.ready[batch]
        self.busy = max(self.busy, self.clock.now, there) + products * PRODUCT
        return Point(self.clock, self.busy)

    def batches(self, *, beside: bool) -> Iterator[int]:
        """Copied on the stream of the steps, or beside and two ahead."""
        for number in range(10_000):
            while beside and len(self.ready) <= number + 2:
                self.copying = max(self.copying, self.clock.now) + COPY
                self.ready.append(self.copying)
            if not beside:
                self.busy = max(self.busy, self.clock.now) + COPY
                self.ready.append(self.busy)
            yield number


def measured(device: Device, *, beside: bool) -> Any:
    spec = {"seconds": 1.0, "workers": 2, "steps": 40}
    batches = device.batches(beside=beside)
    return device_steps.measure(batches, device, spec, COPY, device.clock)


@pytest.mark.parametrize(("beside", "hidden"), [(True, 1.0), (False, 0.0)])
def test_overlap_is_the_part_of_the_copy_that_costs_the_step_nothing(
    beside: bool, hidden: float
) -> None:
    found = measured(Device(), beside=beside)
    assert found["value"] == pytest.approx(COPY, rel=0.02)
    assert found["details"]["overlap"] == pytest.approx(hidden, abs=0.05)


def test_the_first_product_may_take_long() -> None:
    class Cold(Device):
        def step(self, batch: Any, products: int) -> Point:
            if products and None not in self.used:
                self.busy = max(self.busy, self.clock.now) + 1000 * PRODUCT
            return super().step(batch, products)

    assert measured(Cold(), beside=True)["details"]["overlap"] == pytest.approx(1.0, abs=0.05)


def test_who_waits_in_next_and_who_is_held_up_is_told_apart() -> None:
    device = Device()
    device.ready = [0.0] * 50

    def slow(seconds: float) -> Iterator[int]:
        for number in range(50):
            device.clock.now += seconds if number % 2 else 0.0
            yield number

    class Stutters(Point):
        def query(self) -> bool:
            self.clock.now += 0.003
            return super().query()

    seconds, waits, late = device_steps.stepping(slow(0.014), device, 5, 50, device.clock)
    assert seconds == pytest.approx((0.005 + 0.014) / 2, rel=0.02)
    seconds, waits, late = device_steps.stepping(slow(0.004), device, 5, 50, device.clock)
    assert seconds == pytest.approx(0.005, rel=0.02), "what is shorter than a step costs nothing"
    assert percentile(waits, 0.99) == pytest.approx(0.004, rel=0.01)
    assert percentile(late, 0.99) < 1e-5
    device.step = lambda batch, products: Stutters(device.clock, device.clock.now + 0.02)  # type: ignore[method-assign,assignment]
    _, _, late = device_steps.stepping(iter(range(9)), device, 5, 9, device.clock)
    assert percentile(late, 0.5) == pytest.approx(0.003, abs=2 * device_steps.TICK)


def test_every_batch_is_used_once_and_in_order() -> None:
    device = Device()
    measured(device, beside=True)
    batches = [batch for batch in device.used if batch is not None]
    assert batches == list(range(len(batches)))


def test_percentiles() -> None:
    assert percentile([], 0.99) == 0
    assert percentile(list(range(100)), 0.99) == 98
    assert percentile([3, 1, 2], 0.5) == 2


def test_without_a_device_it_says_so_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_case, "device_in_sight", lambda: False)
    monkeypatch.setattr(harness, "Runner", lambda: pytest.fail("a runner was started"))
    assert main(["--case", "P11", "--no-rivals", "--json", str(tmp_path / "r.json")]) == 0
    assert f"P11 {device_case.NEEDED}" in capsys.readouterr().out
    kept = json.loads((tmp_path / "r.json").read_text())
    assert kept["notes"][-1] == f"P11 {device_case.NEEDED}"
    assert {row["skipped"] for row in kept["measurements"]} == {device_case.NEEDED}
    assert not any(row["values"] for row in kept["measurements"])


def test_a_runner_without_a_device_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CannotDo, match="needs a CUDA device"):
        device_case.a_round("torch", {})


def test_with_a_device_everybody_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_case, "device_in_sight", lambda: True)
    [case] = registry.choose(["P11"], Options())
    assert [variant.name for variant in case.variants] == ["10 MB", "38 MB", "150 MB"]
    for variant in case.variants:
        assert variant.blanks == {}
        assert set(variant.loaders) <= set(device_case._OPENERS)
    assert harness.not_run([case]) == []


def row(loader: str, value: float, **details: float) -> Measurement:
    kept: dict[str, Any] = {key: [value] for key, value in details.items()}
    return Measurement("P11", "38 MB", loader, "ms / batch", values=[value], details=kept)


def test_targets_are_held_against_the_fastest_of_ours() -> None:
    slow = row("shared-memory", 9.0, overlap=0.1, next_p99_ms=7, late_p99_ms=7)
    fast = row("threads", 1.0, overlap=0.95, next_p99_ms=0.4, late_p99_ms=2.5)
    results = Results({}, [row("limit", 0.97), row("torch", 2.0), slow, fast])
    relate(results.measurements)
    found = [(v.target, v.met) for v in verdicts(results, registry.TARGETS)]
    assert found == [
        (">= 0.95 of a pinned copy alone", True),
        (">= 0.9 of the copy behind the step", True),
        ("p99 of next() <= 1 ms", True),
        ("training thread late < 2 ms (p99)", False),
    ]


def test_targets_claim_nothing_where_it_was_not_run() -> None:
    results = Results({}, [Measurement("P11", "38 MB", "threads", "ms", skipped="no device")])
    assert {v.met for v in verdicts(results, registry.TARGETS)} == {None}
    said = device_case.detail("overlap", 0.9, least=True)(results, "P11")
    assert said == ("not run: needs a CUDA device", None)
