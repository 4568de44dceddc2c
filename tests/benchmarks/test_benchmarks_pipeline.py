"""The benchmark cases that are about pipelines, in their smallest form.

No test here looks at how long something took.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL")

import psutil

from benchmarks import harness, pipeline_targets, report, timing
from benchmarks import measurements as jobs
from benchmarks import registry as cases
from benchmarks.cases import overhead
from benchmarks.cases import stage_metrics as books
from benchmarks.cases.pipelines import ALONE
from benchmarks.datasets.remote import POOL, SIDE, Remote, Server, close_servers, files
from benchmarks.datasets.tensors import remote as remote_dataset
from benchmarks.harness import Case, Variant
from benchmarks.loaders.dataloaders import CannotDo
from benchmarks.results import HYBRIDS, Measurement, Results, relate
from hybridloader.pipeline.running.plan import WorkerNode, lay_out

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


@pytest.fixture
def served() -> Iterator[Remote]:
    """A dataset whose server, and connections, end with the test."""
    dataset = remote_dataset(**SMALL["arguments"])
    yield dataset
    dataset.close()
    jobs._datasets.clear()
    close_servers()


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
    mine = served._here.connection(served.port)
    assert mine is served._here.connection(served.port)
    found: list[object] = []
    thread = Thread(target=lambda: found.append(served._here.connection(served.port)))
    thread.start()
    thread.join()
    assert found != [mine]
    found.clear()
    there = pickle.loads(pickle.dumps(served))
    assert (there.delay_ms, there.loops, len(there)) == (1, 3, len(served))
    assert there.read(1) == served.read(1)
    assert there._here.connection(served.port) is not mine
    there.close()


def test_a_connection_of_before_a_fork_is_not_used_after_it(
    served: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = served._here.connection(served.port)
    monkeypatch.setattr("benchmarks.datasets.remote.os.getpid", lambda: -1)
    assert served._here.connection(served.port) is not mine


def test_the_server_is_no_child_and_ends_with_close() -> None:
    server = Server(WIDTH)
    process = psutil.Process(server._pid)
    assert process not in psutil.Process().children(recursive=True)
    server.close()
    process.wait(10)


def test_the_server_ends_soon_after_who_started_it() -> None:
    script = f"from benchmarks.datasets.remote import Server; print(Server({WIDTH})._pid)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    try:
        psutil.Process(int(done.stdout)).wait(30)
    except psutil.NoSuchProcess:
        pass


# -- who takes part --------------------------------------------------------------------------------

RIVALS = (
    *("torchdata threads", "torchdata processes", "torchdata stages"),
    *("SPDL threads", "SPDL subprocess", "SPDL processes", "SPDL stages"),
    *("Grain threads", "Grain processes"),
)


@pytest.mark.parametrize("loader", ["together", *HYBRIDS])
def test_every_form_delivers_torch_s_batches(loader: str, served: Remote) -> None:
    assert jobs.check(loader, SMALL)["digest"] == jobs.check("torch", SMALL)["digest"]


_IN_ITS_OWN = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from benchmarks import measurements as jobs
from benchmarks.datasets.remote import close_servers
if __name__ == "__main__":
    found = [jobs.check(loader, json.loads(sys.argv[1]))["digest"] for loader in sys.argv[2:]]
    close_servers()
    print(json.dumps(found), flush=True)
    os._exit(0)  # torchdata's queues may wait for ever at exit for workers that have gone
"""


@pytest.mark.slow
@pytest.mark.parametrize("loader", RIVALS)
def test_rivals_deliver_torch_s_batches(loader: str, tmp_path: Path) -> None:
    # In a process of its own: they leave threads, trackers and warnings behind.
    pytest.importorskip(loader.partition(" ")[0].lower())
    script = tmp_path / "script.py"
    script.write_text(_IN_ITS_OWN)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(SMALL), "torch", loader],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    theirs, torchs = json.loads(done.stdout.splitlines()[-1])
    assert theirs == torchs


@pytest.mark.parametrize("loader", ALONE)
def test_a_stage_alone_is_compared_with_nobody(loader: str, served: Remote) -> None:
    answer = jobs.check(loader, SMALL)
    assert answer == {"items": 2}


def test_sustained_tells_an_item_s_time_and_that_of_the_first_batch(served: Remote) -> None:
    answer = jobs.sustained("pipeline", SMALL)
    assert answer["value"] > 0
    assert answer["details"]["first_batch"] > 0
    assert answer["details"]["batches"] >= 4


def test_sustained_is_of_items(served: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "steady", lambda *_, **__: timing.Timing(0.5, 0.25, 4))
    answer = jobs.sustained("together", SMALL)
    assert (answer["value"], answer["cpu"]) == (0.25, 0.125)


# -- what the machinery costs ------------------------------------------------------------------------

EMPTY: dict[str, Any] = {"workers": 1, "stages": 1, "seconds": 0.0, "repeats": 2, "warmup": 3}


@pytest.mark.parametrize("loader", ["inline", "threads", "fork"])
def test_an_empty_stage_can_be_measured(loader: str) -> None:
    answer = overhead.empty_stage(loader, EMPTY)
    assert answer["details"]["with"] > 0
    assert answer["details"]["without"] > 0


def test_what_a_stage_adds_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([1.0, 1.5, 3.0, 3.25, 2.0, 3.0])  # without, with, without, ...
    monkeypatch.setattr(timing, "steady", lambda *_, **__: timing.Timing(next(told), 0.0, 4))
    assert overhead.empty_stage("inline", EMPTY | {"repeats": 3})["value"] == 0.5


@pytest.mark.parametrize(
    ("loader", "stages", "expected"),
    [
        ("threads", 0, []),
        ("threads", 6, [6]),
        ("threads, not fused", 6, [1] * 6),
        ("threads, by hand", 6, [1]),
    ],
)
def test_stages_are_fused_or_not(loader: str, stages: int, expected: list[int]) -> None:
    with overhead._ours(loader, stages, 1) as run:
        nodes = lay_out(run._machine.pipeline)
        assert [len(node.works) for node in nodes if isinstance(node, WorkerNode)] == expected
        assert [next(run) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("loader", ["torch", "threads", "fork"])
def test_ticks_are_late_by_what_they_take_longer(
    loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "least", lambda *_: -1000.0)  # alone it takes that long
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
    answer = overhead.tick(loader, spec)
    assert answer["value"] >= 1000
    assert answer["details"]["max"] >= 1e6
    assert answer["details"]["ticks"] == 5


def test_every_task_is_in_the_books() -> None:
    calls = books.record("threads", 1, 4, 5)
    sent = [told[0] for name, told, _ in calls if name == "sent"]
    came = [told[0].seq for name, told, _ in calls if name == "came"]
    left = [told[0] for name, told, _ in calls if name == "left"]
    assert len(came) >= 5
    assert sent == sorted(set(left)), "what was asked for was handed out, or dropped in the end"
    assert set(came) <= set(sent)
    assert {"room", "idle", "listening"} <= {name for name, _, _ in calls}
    assert books.replay(calls, 1) > 0


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_a_run_without_books_gives_the_same_batches(backend: str) -> None:
    def first() -> list[Any]:
        with books.running(backend, 1, 4) as run:
            return [next(run).tolist() for _ in range(3)]

    with books._kept_by(lambda: books.Unkept(1)):
        without = first()
    assert first() == without == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_books_are_a_part_of_the_time() -> None:
    spec = {"workers": 1, "batch": 4, "batches": 5, "seconds": 0.0, "repeats": 1}
    answer = overhead.books("threads", spec)
    details = answer["details"]
    assert answer["value"] == pytest.approx(details["us_per_batch"] / details["batch_us"])
    assert details["calls_per_batch"] > 0


# -- targets and documents ---------------------------------------------------------------------------


def row(variant: str, loader: str, *values: float, **more: Any) -> Measurement:
    return Measurement("P4", variant, loader, "ms / item", list(values), **more)


def a_run() -> Results:
    rows = [
        row("2 processes", "together", 2.0, 2.0),
        row("2 processes", "read alone", 1.0, 1.0),
        row("2 processes", "augment alone", 1.9, 2.1),
        row("2 processes", "torch", 12.0, 12.0),
        row("2 processes", "SPDL stages", 3.0, 5.0, memory_mb=300, details={"first_batch": [1, 2]}),
        row("2 processes", "pipeline", 2.0, 2.5, memory_mb=150, details={"first_batch": [0.1] * 2}),
        row("16 processes", "torch", 1.0, 3.0, memory_mb=500, details={"first_batch": [2, 2]}),
        row(
            "16 processes", "pipeline", 2.0, 2.0, memory_mb=150, details={"first_batch": [0.4] * 2}
        ),
    ]
    relate(rows)
    return Results({}, rows)


def test_the_whole_is_held_against_its_slowest_stage() -> None:
    # Round by round: 1.9 of 2.0, and 2.1 of 2.5.
    said, met = pipeline_targets.of_the_slowest_stage(a_run(), 0.95)
    assert (said, met) == ("0.90 of augment alone", False)
    assert pipeline_targets.of_the_slowest_stage(a_run(), 0.89)[1] is True


def test_others_are_held_against_ours_of_the_same_rounds() -> None:
    assert pipeline_targets.beside_cores(a_run(), 1.5) == ("1.75x SPDL stages", True)
    assert pipeline_targets.beside_cores(a_run(), 1.8)[1] is False
    said, met = pipeline_targets.keeps_up(a_run(), 0.95)
    assert (said, met) == ("1.00x torch, 16 processes", True)
    assert pipeline_targets.keeps_up(a_run(), 1.01)[1] is False


def test_memory_and_start_are_those_of_the_best() -> None:
    said, met = pipeline_targets.memory_of_best(a_run(), 0.3)
    assert (said, met) == ("150 of 500 MB (torch, 16 processes)", True)
    assert pipeline_targets.memory_of_best(a_run(), 0.29)[1] is False
    said, met = pipeline_targets.start_of_best(a_run(), 0.2)
    assert (said, met) == ("0.40 of 2.00 s (torch, 16 processes)", True)
    assert pipeline_targets.start_of_best(a_run(), 0.19)[1] is False


def test_stages_and_books_have_bounds() -> None:
    def empty(variant: str, loader: str, value: float) -> Measurement:
        return Measurement("stage", variant, loader, "us / item", [value])

    results = Results(
        {},
        [
            empty("an empty stage", "threads", 9.0),
            empty("an empty stage", "fork", 30.0),
            empty("an empty stage", "shared-memory", 50.0),
            empty("six empty stages", "threads", 90.0),
            Measurement("books", "64 ints", "fork", "% of the time", [0.5]),
            Measurement("books", "64 ints", "threads", "% of the time", [1.5]),
        ],
    )
    assert pipeline_targets.adds_at_most(results, 15, ("threads",)) == ("9 us (threads)", True)
    processes = pipeline_targets.adds_at_most(results, 40, ("fork", "shared-memory"))
    assert processes == ("50 us (shared-memory)", False)
    assert pipeline_targets.books_take(results, 1) == ("1.50 % (threads)", False)


def test_a_case_that_was_not_run_leaves_its_place_in_a_document() -> None:
    page = "<!-- benchmarks:begin {0} -->\nold\n<!-- benchmarks:end {0} -->\n"
    assert "Not in the run" in report.rewrite(page.format("stage"), a_run())
    assert "| 2 processes |" in report.rewrite(page.format("P4"), a_run())
    with pytest.raises(report.BadBlock, match="nonsense"):
        report.rewrite(page.format("nonsense"), a_run())


def test_the_hybrid_s_cases_allow_more_processes_to_others_only() -> None:
    (case,) = cases.choose(["P4"], cases.Options())
    assert [v.spec["workers"] for v in case.variants][1:] == [8, 16, 32]
    assert {v.spec["cores"] for v in case.variants} == {cases.Options().cores}
    assert all({"torch", "pipeline"} <= set(v.loaders) for v in case.variants)
    assert len({json.dumps(v.spec["arguments"]) for v in case.variants}) == 1, (
        "the same work for all"
    )


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("spdl", "spdl.pipeline", "torchdata", "torchdata.nodes"):
        monkeypatch.setitem(sys.modules, name, None)
    for loader in ("SPDL threads", "torchdata threads"):
        with pytest.raises(CannotDo, match="not installed"):
            overhead.empty_stage(loader, EMPTY)


@pytest.mark.slow
def test_the_hybrid_runs_in_lanes() -> None:
    variant = Variant("1 process", SMALL, ("torch", "pipeline", "read alone"))
    case = Case("P4", "small", "ms / item", "sustained", (variant,), scale=1e3)
    rows = {m.loader: m for m in harness.run_case(case, 1, harness.Progress())}
    assert not [m.skipped for m in rows.values() if m.skipped]
    for found in rows.values():
        assert found.values
        assert found.memory_mb
        assert found.details["first_batch"][0] > 0
