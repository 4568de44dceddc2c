"""The benchmark cases about the start, memory and replacement of workers, in their smallest form.

No test here looks at how long something took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")

from benchmarks import harness, measurements, registry
from benchmarks.case import Answer, Case, Measure, Options, Spec, Variant
from benchmarks.cases import fresh_start, many_workers, replacement, worker_memory
from benchmarks.display import cell
from benchmarks.results import Measurement, Results
from benchmarks.targets import Target, flat

SMALL: Spec = {"dataset": "ints", "arguments": {"length": 64}, "batch": 4, "workers": 2}


@pytest.fixture(autouse=True)
def _no_dataset_stays() -> Iterator[None]:
    yield
    measurements.forget_datasets()


def test_the_first_batch_comes_after_iter_and_before_each_worker_has_delivered() -> None:
    found = fresh_start.first_batches("threads", SMALL)
    details = found["details"]
    assert 0 < details["iter"] <= found["value"] <= details["every_worker"]


def test_a_life_goes_through_epochs_and_ends() -> None:
    found = many_workers.life("threads", SMALL | {"keep": True, "turns": 1})
    details = found["details"]
    assert 0 < details["iter"] <= details["first_batch"] <= details["every_worker"]
    assert found["value"] == pytest.approx((details["every_worker"] + details["close"]) / 2)


def test_further_workers_are_weighed_against_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100.0, 101.0, 130.0, 161.0])
    monkeypatch.setattr("benchmarks.usage.memory_mb", lambda pid, *, files: next(sizes))
    found = worker_memory.of_a_further_worker("threads", SMALL | {"workers": 3})
    assert found == {"value": 15.0, "details": {"end_of_epoch_mb": 30.0, "one_worker_mb": 100.0}}


@pytest.mark.parametrize("dataset", ["dying", "dying tensors"])
def test_a_worker_dies_once_and_another_takes_its_place(dataset: str) -> None:
    found = replacement.back_to_work("fork", {"dataset": dataset, "workers": 2})
    assert found["value"] > 0
    assert found["details"] == {"processes": 3}


class Weighing:
    """Runner that answers with a value."""

    pid = 0

    def ask(
        self, measure: Measure, loader: str, spec: Spec, idle: Callable[[], None] | None = None
    ) -> Answer:
        assert measure is worker_memory.of_a_further_worker, "nothing is held, so none is released"
        return {"value": 12.0, "details": {"end_of_epoch_mb": 13.0}}

    def close(self) -> None:
        pass


def test_a_measurement_that_weighs_itself_is_not_weighed_again() -> None:
    measure = worker_memory.of_a_further_worker
    variant = Variant("tiny", {}, ("torch", "spawn"))
    case = Case("footprint", "memory", "MB of PSS", measure, (variant,), "weigh", check=False)
    measuring = harness.Harness(harness.Progress(), make_runner=Weighing)
    take, rows = measuring.measure(case, variant, 2)
    assert (take.again, take.quotable) == ("", True), "memory has no noise that is a time's"
    assert [row.values for row in rows] == [[12.0] * 2] * 2
    assert rows[0].details == {"end_of_epoch_mb": [13.0] * 2}


def test_torch_starts_no_more_workers_than_two_cores_bear() -> None:
    (case,) = registry.choose(["fresh"], Options())
    blank = {variant.name for variant in case.variants if variant.blanks}
    assert blank == {"64 workers, tensors", "64 workers, ints"}
    assert all(set(v.blanks) <= {"torch", "torch forkserver"} for v in case.variants)


def rows_of(case: str, loader: str, **values: float) -> list[Measurement]:
    return [
        Measurement(case, name.replace("_", " "), loader, "s", values=[value])
        for name, value in values.items()
    ]


def verdict(target: Target, rows: list[Measurement]) -> Any:
    return target.judge(Results({}, rows), target.case)


def test_a_flat_target_may_end_at_a_number() -> None:
    values = dict(zip(("1_ints", "16_ints", "64_ints"), (1.0, 1.4, 2.0), strict=True))
    rows = rows_of("fresh", "spawn", **values)
    for last, expected in ((16, ("1.4x (spawn, 16 ints)", True)), (math.inf, (..., False))):
        found = flat("ints", 1, 1.5, ("spawn",), last)(Results({}, rows), "fresh")
        assert found[1] is expected[1]
        assert expected[0] in (..., found[0])


def test_sooner_than_torch_means_both_ways_in_which_torch_starts_fresh_workers() -> None:
    target = next(target for target in fresh_start.TARGETS if "torch" in target.text)
    ours = rows_of("fresh", "spawn", **{"16_workers": 1.0, "64_workers": 9.0})
    spawn = rows_of("fresh", "torch", **{"16_workers": 9.0})
    server = rows_of("fresh", "torch forkserver", **{"16_workers": 4.0})
    assert verdict(target, [*ours, *spawn]) == ("9x torch (16 workers)", True)
    assert verdict(target, [*ours, *spawn, *server]) == (
        "4x torch forkserver (16 workers)",
        False,
    )


def test_a_cell_shows_the_first_batch_and_the_end() -> None:
    row = Measurement("P17", "v", "spawn", "ms / worker", values=[2.0])
    row.details = {"first_batch": [0.5], "close": [0.25]}
    assert cell([row], "spawn") == "2 ± 0\nfirst after 0.5 s, closed in 0.25 s"


def test_details_are_compared_by_worker_if_they_are_of_the_whole_loader() -> None:
    def row(workers: int, turn: float, memory: float) -> Measurement:
        details = {"turn": [turn], "memory_mb_per_worker": [memory]}
        return Measurement("P17", f"{workers} workers", "fork", "ms", [1.0], details=details)

    results = Results({}, [row(64, 0.5, 4.0), row(256, 4.0, 5.0)])
    assert many_workers.flat_detail("turn", 1.5)(results, "P17") == ("2x (fork)", False)
    memory = many_workers.flat_detail("memory_mb_per_worker", 1.5, shared=False)
    assert memory(results, "P17") == ("1.25x (fork)", True)
    assert memory(Results({}), "P17") == ("not measured", None)
