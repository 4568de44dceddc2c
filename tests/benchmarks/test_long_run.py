"""P18: the parts of the long run, in their smallest form, on a fake clock."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")

from benchmarks import report
from benchmarks.case import Answer, Measure, Spec
from benchmarks.long_run import __main__ as command
from benchmarks.long_run import part, record, work
from benchmarks.results import Results
from benchmarks.runner import ROOT, RunnerFailed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Clock:
    """Clock that moves while something sleeps or works, and a meter of the time that work took."""

    def __init__(self) -> None:
        self.now, self.worked, self.slept = 0.0, 0.0, [0.0][:0]

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)

    def start(self) -> None:
        self.worked = 0.0

    def stop(self) -> float:
        return self.worked


def test_a_part_works_looks_and_rests_for_its_time() -> None:
    clock = Clock()
    numbers = []

    def one(number: int) -> None:
        numbers.append(number)
        clock.work(1.0)

    looks = part.work_and_look(
        7.0, one, lambda: {"threads": 3}, clock, share=0.5, clock=clock, sleep=clock.sleep
    )
    assert numbers == [0, 1, 2, 3]
    assert looks == [{"at": at, "threads": 3} for at in (1.0, 3.0, 5.0, 7.0)]
    assert clock.slept == [1.0] * 4


def test_work_that_waits_is_followed_by_no_rest() -> None:
    clock = Clock()
    looks = part.work_and_look(
        2.0, lambda number: clock.sleep(1.0), dict, clock, clock=clock, sleep=clock.sleep
    )
    assert len(looks) == 2
    assert clock.slept == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("backend", ["inline", "threads"])
@pytest.mark.parametrize("kind", work.KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_work_delivers_every_sample(
    kind: Callable[[work.Job], None], backend: str
) -> None:
    kind(work.Job(backend, random.Random(3)))


@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.full) for name in ("fork", "shared-memory", "spawn")],
)
def test_a_cycle_does_all_of_them(backend: str) -> None:
    tally: Counter[str] = Counter()
    work.cycle(backend, 0, 0, tally)
    assert tally["cycles"] == 1
    for name in ("batches", "samples", "skipped", "retried", "resumed", "broken off"):
        assert tally[name], name


def test_wrong_samples_are_told_with_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(job: work.Job) -> None:
        job.expect([1, 1], [0, 1])

    monkeypatch.setattr(work, "KINDS", (lossy,))
    message = r"lossy on threads, seed 7, cycle 2: WrongSamples: lost \[0\], too many \[1\]"
    with pytest.raises(work.WrongSamples, match=message):
        work.cycle("threads", 7, 2, Counter())


@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_latencies_are_those_of_the_loader_and_of_the_plain_loop(backend: str) -> None:
    with part.Steady(backend) as steady:
        found = steady.latencies()
    assert 0 < found["p50_us"] <= found["p99_us"]
    assert 0 < found["reference_p50_us"] <= found["reference_p99_us"]


def test_segments_are_those_of_one_process(tmp_path: Path) -> None:
    for name in ("hl-12-a-0", "hl-12-b-1", "hl-123-a-0", "torch_12_1"):
        (tmp_path / name).touch()
    assert part.segments(tmp_path, 12) == 2


# -- the record ------------------------------------------------------------------------------------


def _part(backend: str = "fork", **more: list[float]) -> record.Part:
    """A part of 20 looks in which nothing grows, but for what is given."""
    looks = {name: [10.0] * 20 for name in part.COLUMNS}
    looks["at"] = [60.0 * number for number in range(20)]
    return record.Part(backend, looks | more, {"cycles": 20})


def _grown(end: float) -> list[float]:
    return [10.0] * 18 + [end] * 2


@pytest.mark.parametrize(("values", "which", "expected"), [
    (list(range(20)), 1, [2, 3]),
    (list(range(20)), 9, [18, 19]),
    ([5, 6, 7], 1, [5]),
    ([5, 6, 7], 9, [7]),
])  # fmt: skip
def test_tenths_of_a_run(values: list[float], which: int, expected: list[float]) -> None:
    assert record.tenth(values, which) == expected


def test_a_part_that_ends_as_it_began_says_so() -> None:
    assert record.verdict(_part()) == "as at the beginning"
    assert record.verdict(_part(memory_mb=_grown(17.9))) == "as at the beginning"


@pytest.mark.parametrize("name", ["memory_mb", *record.COUNTS])
def test_what_is_more_at_the_end_is_named(name: str) -> None:
    end = 18.1 if name == "memory_mb" else 11.0
    assert record.verdict(_part(**{name: _grown(end)})) == f"more at the end: {name}"


def test_a_latency_has_grown_if_it_has_beside_the_reference_too() -> None:
    slow = _grown(13.0)
    assert record.verdict(_part(p50_us=slow)) == "more at the end: p50"
    assert record.verdict(_part(p50_us=slow, reference_p50_us=slow)) == "as at the beginning"
    busy_before = [20.0] * 10 + [10.0] * 10
    assert record.verdict(_part(reference_p99_us=busy_before)) == "as at the beginning"


class FakeRunner:
    """Runner that answers at once, or dies at one backend."""

    pid = 0
    asked: ClassVar[list[str]] = []
    dies_at = ""

    def ask(
        self, measure: Measure, loader: str, spec: Spec, idle: Callable[[], None] | None = None
    ) -> Answer:
        assert measure is part.part
        assert spec == {"seconds": 120.0, "seed": 5}
        FakeRunner.asked.append(loader)
        if loader == FakeRunner.dies_at:
            raise RunnerFailed("died")
        done = _part(loader)
        return {"looks": done.looks, "tally": done.tally}

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    FakeRunner.asked, FakeRunner.dies_at = [], ""

    def main(*arguments: str) -> int:
        file = str(tmp_path / "run.json")
        options = ["--minutes", "2", "--seed", "5", "--json", file, *arguments]
        return command.main(options, lambda timeout: FakeRunner())

    return main


def test_a_run_goes_on_with_what_is_missing_or_has_failed(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeRunner.dies_at = "threads"
    assert run("--backends", "fork", "threads") == 1
    assert "threads: failed: died" in capsys.readouterr().out
    FakeRunner.dies_at = ""
    assert run() == 0
    assert FakeRunner.asked == ["fork", "threads", "inline", "threads", "spawn", "shared-memory"]
    kept = record.Run.read(tmp_path / "run.json")
    assert [done.backend for done in kept.parts] == list(record.BACKENDS)


def test_other_settings_do_not_go_on_with_a_run(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    with pytest.raises(SystemExit):
        run("--minutes", "3")
    assert "a run of 2 minutes a backend with seed 5" in capsys.readouterr().err


def test_the_page_gets_a_table(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LONG_RUN", tmp_path / "run.json")
    nothing: Any = Results({})
    assert report.block("P18", nothing) == "*Not run yet.*"
    run()
    text = report.block("P18", nothing)
    assert text.startswith("2 minutes a backend, seed 5, ")
    assert "| fork | 20 | 0 | 0 | 10 -> 10 | " in text
    assert "10 -> 10 (1.00x) | as at the beginning |" in text


def test_the_picture_is_drawn_of_a_run_that_is_done(
    run: Callable[..., int], tmp_path: Path
) -> None:
    # In a process of its own: matplotlib keeps the files of its fonts open.
    pytest.importorskip("matplotlib")
    run()
    picture = tmp_path / "picture.png"
    command = [sys.executable, "-m", "benchmarks.long_run", "--minutes", "2", "--seed", "5"]
    files = ["--json", str(tmp_path / "run.json"), "--plot", str(picture)]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
