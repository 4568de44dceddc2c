"""P13: the times of its samples, its epochs, and its targets. Nothing sleeps here."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")

from benchmarks import measurements
from benchmarks.cases import slow_samples
from benchmarks.datasets import waiting
from benchmarks.display import cost_of
from benchmarks.names import BY_SAMPLES, FEW_PROCESSES, SEEDED, TORCH_ANY_ORDER
from benchmarks.results import Measurement, Results
from benchmarks.runner import Runner

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SMALL = {
    "dataset": "slow samples",
    "arguments": {"length": 48, "spread": "few"},
    "batch": 4,
    "workers": 4,
}


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    times: list[float] = []
    monkeypatch.setattr(waiting, "sleep", times.append)
    yield times
    measurements.forget_datasets()


def test_both_spreads_take_as_long_in_all_and_are_the_same_every_time() -> None:
    few, tail = waiting.few_slow(1600), waiting.heavy_tail(1600)
    assert sorted(set(few)) == [0.003, 0.06]
    assert few.count(0.06) == 100
    assert sum(few) == pytest.approx(10.5)
    assert sum(tail) == pytest.approx(10.5)
    assert max(tail) > 20 * statistics.mean(tail) > 50 * statistics.median(tail)
    assert (few, tail) == (waiting.few_slow(1600), waiting.heavy_tail(1600))


def test_an_epoch_waits_for_each_sample_once_and_knows_the_bound(slept: list[float]) -> None:
    found = slow_samples.whole_epoch("threads", SMALL)
    assert sorted(slept) == [0.003] * 45 + [0.06] * 3
    assert found["value"] > 0
    assert found["details"]["bound"] == pytest.approx((45 * 0.003 + 3 * 0.06) / 4)
    assert 0 <= found["details"]["next_p99_ms"] <= found["details"]["next_max_ms"]


@pytest.mark.parametrize(
    "loader",
    [
        *("torch", SEEDED),
        *(
            pytest.param(loader, marks=pytest.mark.full)
            for loader in (TORCH_ANY_ORDER, *BY_SAMPLES, FEW_PROCESSES)
        ),
    ],
)
def test_every_form_delivers_each_sample(loader: str) -> None:
    assert slow_samples.whole_epoch(loader, SMALL)["value"] > 0


def test_batches_in_any_order_are_compared_with_nobody() -> None:
    assert "digest" not in measurements.check(TORCH_ANY_ORDER, SMALL)
    assert "digest" in measurements.check("torch", SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("loader", slow_samples.RIVALS)
def test_rivals_deliver_each_sample(loader: str) -> None:
    # In a runner: they leave threads, trackers, processes and warnings behind.
    pytest.importorskip(loader.partition(" ")[0].lower())
    with closing(Runner(timeout=60)) as runner:
        answer = runner.ask(slow_samples.whole_epoch, loader, SMALL)
    assert answer.get("value"), answer


def test_samples_that_are_missing_or_out_of_order_are_noticed() -> None:
    with pytest.raises(slow_samples.WrongSamples, match="3 samples"):
        slow_samples._check("threads", [[0, 1], [2]], 4)
    with pytest.raises(slow_samples.WrongSamples, match="another order"):
        slow_samples._check("threads", [[2, 3], [0, 1]], 4)
    slow_samples._check(TORCH_ANY_ORDER, [[2, 3], [0, 1]], 4)


def _row(loader: str, seconds: float, p99: float) -> Measurement:
    details: dict[str, Any] = {"bound": [2.0], "next_p99_ms": [p99]}
    return Measurement("P13", "few", loader, "s / epoch", [seconds], details=details)


def test_targets_are_held_against_the_bound_and_torch_s_longest_waits() -> None:
    results = Results({}, [_row("torch", 3.0, 100.0), _row("threads", 2.2, 60.0)])
    assert slow_samples.within(1.1, ("threads",))(results, "P13") == ("1.1x (threads, few)", True)
    assert slow_samples.within(1.1, ("torch",))(results, "P13") == ("1.5x (torch, few)", False)
    calm = slow_samples.calmer_than_torch(0.5, ("threads",))
    assert calm(results, "P13") == ("0.6x (threads, few)", False)


def test_a_cell_shows_the_part_of_the_bound_and_the_longest_waits() -> None:
    assert cost_of(_row("threads", 2.2, 60.0)) == "1.1 of the bound, p99 of next() 60 ms"
