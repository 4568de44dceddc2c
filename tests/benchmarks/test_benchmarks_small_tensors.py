"""P19: its samples, the batches of every loader, and its targets."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")

from benchmarks import measurements
from benchmarks.cases import small_tensors
from benchmarks.results import Measurement, Results
from benchmarks.runner import Runner

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FEWER = {"keys": {"keys": 30}, "small tensors": {"keys": 20}, "ragged": {"count": 10}}
SPECS = [
    spec
    | {"workers": 2, "batch": 4, "look": 0.0, "batch_bytes": 1 << 20}
    | {"arguments": FEWER.get(spec["dataset"], {})}
    for spec in small_tensors.VARIANTS.values()
]
FIRST_OF_THEM = [SPECS[0], *(pytest.param(spec, marks=pytest.mark.full) for spec in SPECS[1:])]


@pytest.mark.parametrize("spec", FIRST_OF_THEM, ids=lambda spec: spec["dataset"])
def test_ours_deliver_the_batches_of_the_plain_loop(spec: Any) -> None:
    expected = measurements.check("limit", spec)["digest"]
    for loader in ("threads", "fork"):
        assert measurements.check(loader, spec)["digest"] == expected
    measurements.forget_datasets()


@pytest.mark.parametrize("loader", small_tensors.RIVALS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["dataset"])
def test_rivals_deliver_them_or_say_why_not(spec: Any, loader: str) -> None:
    # In a runner: they leave threads, trackers, processes and warnings behind.
    pytest.importorskip(loader.partition(" ")[0].lower())
    with closing(Runner(timeout=60)) as runner:
        expected = runner.ask(measurements.check, "limit", spec)
    with closing(Runner(timeout=60)) as runner:
        found = runner.ask(measurements.check, loader, spec)
    if (loader, spec["dataset"]) == ("Grain threads", "texts"):
        assert "digest" not in found
    else:
        assert found.get("digest") == expected["digest"], found


def test_targets_are_held_against_torch_s_cpu_time() -> None:
    def row(loader: str, cpu: float) -> Measurement:
        return Measurement("P19", "keys", loader, "us / batch", [1.0], cpu=[cpu])

    results = Results({}, [row("torch", 4.0), row("fork", 1.0), row("spawn", 3.0)])
    judge = small_tensors.less_than_torch(0.5, ("fork",), small_tensors._cpu)
    assert judge(results, "P19") == ("0.25x (fork, keys)", True)
    judge = small_tensors.less_than_torch(0.5, ("fork", "spawn"), small_tensors._cpu)
    assert judge(results, "P19") == ("0.75x (spawn, keys)", False)
