"""The benchmark cases that are about pipelines, in their smallest form.

No test here looks at how long something took.
"""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL")

import psutil

from benchmarks import harness, measurements, registry, report, timing
from benchmarks.case import CannotDo, Case, Measure, Options, Variant
from benchmarks.cases import hybrid, observing, resuming, resuming_pipelines, stages, training_loop
from benchmarks.datasets.catalogue import remote as remote_dataset
from benchmarks.datasets.remote import POOL, SIDE, Remote, close_servers, files, server_of
from benchmarks.names import HYBRIDS, PIPELINE
from benchmarks.results import Measurement, Results, Take, relate
from benchmarks.runner import Runner
from benchmarks.targets import Judge, verdicts

ROOT = Path(__file__).parents[2]

WIDTH = 32

SMALL: dict[str, Any] = {
    "dataset": "remote",
    "arguments": {"width": WIDTH, "loops": 3, "delay_ms": 1},
    "stages": 3,
    "batch": 2,
    "batch_bytes": 2 * 3 * SIDE * SIDE,
    "cores": 1,
    "workers": 1,
    "seconds": 0.0,
    "look": 0.0,
}


@pytest.fixture(scope="module", autouse=True)
def _one_server() -> Iterator[None]:
    """A server that all tests use, and that ends with them."""
    process = psutil.Process(server_of(WIDTH)._pid)
    yield
    close_servers()
    process.wait(60)


@pytest.fixture
def served() -> Iterator[Remote]:
    """A dataset whose connections end with the test."""
    dataset = remote_dataset(**SMALL["arguments"])
    yield dataset
    dataset.close()
    measurements.forget_datasets()


# -- the work ------------------------------------------------------------------------------------


def test_a_sample_is_what_its_parts_make(served: Remote) -> None:
    expected = files(WIDTH)
    assert [served.read(index) for index in (0, 5, POOL + 5)] == [expected[i] for i in (0, 5, 5)]
    pixels = served.decode(expected[5])
    assert pixels.shape == (SIDE, SIDE, 3)
    sample = served[5]
    assert (sample == pixels).all() or (sample == pixels[:, ::-1]).all()
    turned = {bool((served[i] == served.decode(expected[i])).all()) for i in range(POOL)}
    assert turned == {True, False}, "the loop decides nothing"


def test_answers_wait_and_without_waiting_they_do_not(served: Remote) -> None:
    assert (served.delay_ms, served.without_waiting().delay_ms) == (1, 0)
    at_once = served.without_waiting()
    assert at_once.read(3) == served.read(3)
    at_once.close()


def test_connections_belong_to_a_thread_and_do_not_travel(served: Remote) -> None:
    served.read(0)
    mine = served._connections.connection(served.port)
    assert mine is served._connections.connection(served.port)
    found: list[object] = []
    thread = Thread(target=lambda: found.append(served._connections.connection(served.port)))
    thread.start()
    thread.join()
    assert found != [mine]
    found.clear()
    there = pickle.loads(pickle.dumps(served))
    assert (there.delay_ms, there.loops, len(there)) == (1, 3, len(served))
    assert there.read(1) == served.read(1)
    assert there._connections.connection(served.port) is not mine
    there.close()


def test_a_connection_of_before_a_fork_is_not_used_after_it(
    served: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = served._connections.connection(served.port)
    monkeypatch.setattr("benchmarks.datasets.remote.os.getpid", lambda: -1)
    assert served._connections.connection(served.port) is not mine


def test_the_server_is_no_child_of_whoever_started_it() -> None:
    process = psutil.Process(server_of(WIDTH)._pid)
    assert process not in psutil.Process().children(recursive=True)


def test_the_server_ends_soon_after_who_started_it() -> None:
    module = "benchmarks.datasets.remote"
    script = f"from {module} import Server; print(Server('{module}', '{WIDTH}')._pid)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    try:
        psutil.Process(int(done.stdout)).wait(60)
    except psutil.NoSuchProcess:
        pass


# -- who takes part --------------------------------------------------------------------------------

RIVALS = (
    *("torchdata threads", "torchdata processes", "torchdata stages"),
    *("SPDL threads", "SPDL subprocess", "SPDL processes", "SPDL stages"),
    *("Grain threads", "Grain processes"),
)


@pytest.mark.parametrize(
    "loader",
    ["together", PIPELINE, *(pytest.param(name, marks=pytest.mark.full) for name in HYBRIDS[1:])],
)
def test_every_form_delivers_torch_s_batches(loader: str, served: Remote) -> None:
    assert (
        measurements.check(loader, SMALL)["digest"] == measurements.check("torch", SMALL)["digest"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("loader", RIVALS)
def test_rivals_deliver_torch_s_batches(loader: str, served: Remote) -> None:
    # In a runner: they leave threads, trackers, processes and warnings behind.
    pytest.importorskip(loader.partition(" ")[0].lower())
    with closing(Runner(timeout=60)) as runner:
        theirs = runner.ask(measurements.check, loader, SMALL)
    assert theirs == measurements.check("torch", SMALL)


def test_an_item_has_its_part_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"value": 0.5, "cpu": 0.25, "details": {"first_batch": 0.1}}
    monkeypatch.setattr(measurements, "whole_epochs", lambda *_: told)
    answer = measurements.per_item("together", SMALL)
    assert (answer["value"], answer["cpu"]) == (0.25, 0.125)
    assert answer["details"] == {"first_batch": 0.1}


# -- what the machinery costs ------------------------------------------------------------------------

EMPTY: dict[str, Any] = {
    "workers": 1,
    "stages": 1,
    "seconds": 0.0,
    "repeats": 2,
    "warmup": 3,
    "ahead": 1,
}


@pytest.mark.parametrize("loader", ["inline", "threads", "fork"])
def test_an_empty_stage_can_be_measured(loader: str) -> None:
    answer = stages.empty_stage(loader, EMPTY)
    assert answer["details"]["with"] > 0
    assert answer["details"]["without"] > 0


def test_what_a_stage_adds_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([1.0, 1.5, 3.0, 3.25, 2.0, 3.0])  # without, with, without, ...
    monkeypatch.setattr(timing, "window", lambda *_, **__: timing.Timing(next(told), 0.0, 4))
    assert stages.empty_stage("inline", EMPTY | {"repeats": 3})["value"] == 0.5


@pytest.mark.parametrize(
    ("loader", "count", "expected"),
    [
        ("threads", 0, []),
        ("threads", 6, [6]),
        ("threads, not fused", 6, [1] * 6),
        ("threads, by hand", 6, [1]),
    ],
)
def test_stages_are_fused_or_not(loader: str, count: int, expected: list[int]) -> None:
    with stages.pipeline_of(loader, count, 1) as run:
        assert [next(run) for _ in range(3)] == [0, 1, 2]
        kept = [running.node for running in run._executor.stages.values()]
    assert [node.name.count("map(") for node in kept] == expected


@pytest.mark.parametrize("loader", ["torch", "threads", "fork"])
def test_ticks_are_late_by_what_they_take_longer(
    loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_loop, "fastest", lambda *_: -1000.0)  # alone it takes that long
    spec = {
        "dataset": "spinning",
        "arguments": {"loops": 3},
        "stages": 1,
        "workers": 1,
        "batch": 2,
        "tick_loops": 3,
        "ticks": 5,
        "seconds": 0.0,
    }
    answer = training_loop.lateness(loader, spec)
    assert answer["value"] >= 1000
    assert answer["details"]["max"] >= 1e6
    assert answer["details"]["ticks"] == 5


@pytest.mark.parametrize("backend", ["inline", "threads"])
@pytest.mark.parametrize("pipeline", [False, True])
def test_what_observing_costs_is_measured_beside_the_noise(backend: str, pipeline: bool) -> None:
    spec: dict[str, Any] = {"dataset": "ints", "batch": 4, "workers": 1, "pipeline": pipeline}
    if pipeline and backend == "inline":
        backend = "fork"
    more = {"seconds": 0.0, "repeats": 3, "warmup": 1}
    answer = observing.times_as_long(backend, spec | more)
    details = answer["details"]
    assert answer["value"] > 0
    assert details["noise"] > 0
    assert details["batch_us"] > 0
    with closing(observing.running(backend, spec, observing.ON)) as run:
        first = next(run)
        assert first.tolist() == [0, 1, 2, 3]
        assert run.stats().items == 1
    with closing(observing.running(backend, spec, observing.OFF)) as run:
        assert next(run).tolist() == first.tolist()
        if pipeline:
            (stage,) = run._executor.stages.values()
            assert stage.stage.spec.metering is None
            assert stage.stage._observer is None
        with pytest.raises(RuntimeError, match="observe=True"):
            run.stats()


# -- targets and documents ---------------------------------------------------------------------------


def row(variant: str, loader: str, *values: float, **more: Any) -> Measurement:
    return Measurement("P4", variant, loader, "ms / item", list(values), **more)


def a_run() -> Results:
    rows = [
        row("2 processes", "together", 2.0, 2.0),
        row("2 processes", "torch", 12.0, 12.0),
        row("2 processes", "SPDL stages", 3.0, 5.0),
        row("2 processes", "pipeline", 2.0, 2.5, memory_mb=150),
        row("2 processes", "pipeline spread", 2.5, 2.5, memory_mb=150),
        row("8 processes", "torch", 3.0, 3.0, memory_mb=300),
        row("8 processes", "pipeline", 2.0, 2.0, memory_mb=160),
        row("16 processes", "torch", 1.0, 2.6, memory_mb=500),
        row("16 processes", "pipeline", 2.0, 2.0, memory_mb=150),
    ]
    relate(rows)
    takes = [Take("P4", "16 processes", again="torch", pairs=[[1.0, 1.0], [1.2, 1.0]])]
    return Results({}, rows, takes=takes)


@pytest.mark.parametrize(
    ("judge", "met", "missed", "said"),
    [
        # Round by round: 3 of 2, and 5 of 2.5.
        (hybrid.ahead_with_as_many, 1.7, 1.75, "1.75x SPDL stages (pipeline)"),
        (hybrid.of_its_memory, 0.54, 0.5, "0.53x: 160 of 300 MB (8 processes)"),
    ],
)
def test_the_hybrid_is_held_against_the_others_of_the_same_rounds(
    judge: Callable[[float], Judge], met: float, missed: float, said: str
) -> None:
    assert judge(met)(a_run(), "P4") == (said, True)
    assert judge(missed)(a_run(), "P4") == (said, False)


def test_level_means_within_the_noise() -> None:
    results = a_run()
    found = hybrid.level_with_torch(results, "P4")
    assert found == ("0.90x, noise 0.10 (16 processes)", True)
    results.takes.clear()
    assert hybrid.level_with_torch(results, "P4") == ("0.90x, noise 0.00 (16 processes)", False)


def test_stages_and_metrics_have_bounds() -> None:
    def empty(variant: str, loader: str, value: float) -> Measurement:
        return Measurement("stage", variant, loader, "us / item", [value])

    rows = [
        empty("an empty stage", "threads", 9.0),
        empty("an empty stage", "fork", 30.0),
        empty("an empty stage", "shared-memory", 50.0),
        empty("six empty stages", "threads", 90.0),
        Measurement("metrics", "loader, 64 ints", "fork", "times as long", [1.005]),
        Measurement("metrics", "loader, 64 ints", "threads", "times as long", [1.03]),
    ]
    found = {v.target: (v.reached, v.met) for v in verdicts(Results({}, rows), registry.TARGETS)}
    assert found == {
        "inline <= 2 us": ("not measured", None),
        "threads <= 15 us": ("9 us / item (threads)", True),
        "processes <= 40 us": ("50 us / item (shared-memory)", False),
        "<= 1.01 times as long": ("1.03 times as long (threads)", False),
    }


def test_a_case_that_was_not_run_leaves_its_place_in_a_document() -> None:
    page = "<!-- benchmarks:begin {0} -->\nold\n<!-- benchmarks:end {0} -->\n"
    assert "Not in the run" in report.rewrite(page.format("stage"), a_run())
    assert "| 2 processes |" in report.rewrite(page.format("P4"), a_run())
    with pytest.raises(report.BadBlock, match="nonsense"):
        report.rewrite(page.format("nonsense"), a_run())


def test_the_hybrid_s_cases_allow_more_processes_to_others_only() -> None:
    (case,) = registry.choose(["P4"], Options())
    assert [v.spec["workers"] for v in case.variants][1:] == [8, 16, 24]
    assert {v.spec["cores"] for v in case.variants} == {Options().cores}
    assert all({"torch", "pipeline"} <= set(v.loaders) for v in case.variants)
    assert len({json.dumps(v.spec["arguments"]) for v in case.variants}) == 1, (
        "the same work for all"
    )


@pytest.mark.parametrize(
    ("measure", "loader"),
    [
        (stages.empty_stage, "SPDL threads"),
        (measurements.check, "Grain threads"),
        (resuming.go_on_in_the_middle, resuming.TORCHDATA),
    ],
)
def test_what_is_not_installed_is_left_out(
    measure: Measure, loader: str, served: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(CannotDo, match="not installed: pip install"):
        measure(loader, SMALL | EMPTY | {"length": 10})


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("loader", ["threads", "threads, ours", resuming.TORCHDATA])
def test_a_state_leads_to_the_middle_of_the_samples(loader: str) -> None:
    if loader == resuming.TORCHDATA:
        pytest.importorskip("torchdata")
    assert resuming.go_on_in_the_middle(loader, {"length": 10_000})["value"] > 0


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("step", resuming_pipelines.STEPS)
@pytest.mark.parametrize(
    ("loader", "package", "lacks"),
    [
        ("inline", "hybridloader", ()),
        (resuming_pipelines.TORCHDATA, "torchdata", ("filter", "batch_by", "shuffle")),
        (resuming_pipelines.GRAIN, "grain", ("batch_by",)),
    ],
)
def test_a_state_of_a_pipeline_leads_to_the_item_after_it(
    loader: str, package: str, lacks: tuple[str, ...], step: str
) -> None:
    pytest.importorskip(package)
    spec = {"step": step, "length": 2_000, "parts": (0.1, 0.9), "repeats": 1}
    if step in lacks:
        with pytest.raises(CannotDo):
            resuming_pipelines.next_item_after_a_state(loader, spec)
        return
    found = resuming_pipelines.next_item_after_a_state(loader, spec)
    assert found["value"] > 0
    if step != "shuffle":
        assert found["details"]["calls"] <= resuming_pipelines.MOST


@pytest.mark.full
def test_the_hybrid_runs_in_runners() -> None:
    variant = Variant("1 process", SMALL, ("torch", "pipeline"))
    case = Case("P4", "small", "ms / item", measurements.per_item, (variant,), scale=1e3)
    with closing(harness.Harness(harness.Progress())) as measuring:
        take, found_rows = measuring.measure(case, variant, 1)
    assert take.noise is not None
    rows = {m.loader: m for m in found_rows}
    assert not [m.skipped for m in rows.values() if m.skipped]
    for found in rows.values():
        assert found.values
        assert found.memory_mb
        assert found.details["first_batch"][0] > 0
