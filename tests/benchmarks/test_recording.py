"""Noise, quiet, and runs that go on: with fake runners, fake clocks and a fake machine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import machine, quiet, recording
from benchmarks.case import Answer, Case, Derived, Measure, Options, Spec, Variant
from benchmarks.harness import Harness, Progress
from benchmarks.measurements import whole_epochs
from benchmarks.names import BACKENDS
from benchmarks.quiet import Quiet
from benchmarks.recording import Recording
from benchmarks.registry import choose
from benchmarks.results import Measurement, Results, Take

# -- noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "noise"),
    [
        ([[1.0, 1.0]], 0.0),
        ([[1.0, 1.25], [2.0, 2.0], [1.0, 4.0]], 0.25),  # the median of the quotients
        ([[1.25, 1.0]], 0.25),  # whichever was slower
        ([[-1.0, 1.0]], None),  # a difference that is smaller than nothing
        ([], None),
    ],
)
def test_noise_is_the_ratio_of_a_loader_to_itself(
    pairs: list[list[float]], noise: float | None
) -> None:
    take = Take("P2", "v", again="torch", pairs=pairs)
    assert take.noise == (noise if noise is None else pytest.approx(noise))
    assert take.quotable is (noise == 0)


def test_what_is_not_timed_can_be_quoted() -> None:
    assert Take("P7", "v").quotable


def test_the_loader_that_takes_part_twice() -> None:
    plain = Variant("v", {}, ("limit", "threads", "torch"))
    assert plain.measured_again(["limit", "threads", "torch"]) == "torch"
    assert plain.measured_again(["limit", "threads"]) == "threads"
    assert plain.measured_again(["limit"]) == ""
    chosen = Variant("v", {}, ("torch", "spawn"), again="spawn")
    assert chosen.measured_again(["torch", "spawn"]) == "spawn"
    assert chosen.measured_again(["torch"]) == "torch"


# -- runs ----------------------------------------------------------------------------------------


class Scripted:
    """Runners whose values are the same for all but for torch's second one."""

    def __init__(self, *noises: float) -> None:
        self.asked: list[tuple[str, str]] = []
        self._noises = itertools.chain(noises, itertools.repeat(1.0))

    def __call__(self) -> Scripted:
        return self

    pid = 0

    def ask(
        self, measure: Measure, loader: str, spec: Spec, idle: Callable[[], None] | None = None
    ) -> Answer:
        if measure is not whole_epochs:
            return {"digest": "the same"}
        self.asked.append((spec["name"], loader))
        return {"value": next(self._noises) if loader == "torch" else 0.5}

    def close(self) -> None:
        pass


def a_case(name: str, *variants: str) -> Case:
    loaders = ("torch", "threads")
    return Case(
        name,
        name,
        "s",
        whole_epochs,
        tuple(Variant(v, {"name": f"{name} {v}"}, loaders) for v in variants),
        derived=Derived(f"{name}d", "", lambda found: [_derived(name, len(found))]),
    )


def _derived(name: str, count: int) -> Measurement:
    return Measurement(f"{name}d", "all", "threads", "rows", [float(count)])


def record(
    results: Results,
    runner: Scripted,
    *cases: Case,
    calm: Callable[[], bool] = lambda: True,
    retakes: int = 0,
    kept: list[list[str]] | None = None,
) -> list[str]:
    """Run the cases; the lines that were said."""
    said: list[str] = []
    ticks = itertools.count()
    measuring = Harness(
        Progress(say=said.append),
        make_runner=runner,
        memory=lambda pid: 1.0,
        quiet=lambda say: calm(),
        clock=lambda: float(next(ticks)),
    )

    def keep(found: Results) -> None:
        if kept is not None:
            kept.append([f"{t.case} {t.variant}" for t in found.takes])

    Recording(
        *(cases, results, 1, measuring), keep=keep, order=["A", "Ad", "B"], retakes=retakes
    ).run()
    return said


def test_the_file_is_written_after_each_variant_in_the_order_of_the_cases() -> None:
    results, kept = Results({}), list[list[str]]()
    said = record(results, Scripted(), a_case("B", "x"), a_case("A", "x", "y"), kept=kept)
    assert kept == [["B x"], ["A x", "B x"], ["A x", "A y", "B x"]]
    assert results.cases() == ["A", "Ad", "B", "Bd"]
    assert said[0] == "B x: 1 s, noise 0.0%; some 0 minutes left"
    (take,) = (t for t in results.takes if t.case == "B")
    assert (take.again, take.pairs, take.quiet, take.takes) == ("torch", [[1.0, 1.0]], True, 1)
    assert {m.loader for m in results.of("B")} == {"torch", "threads"}, "not the second one's"


def test_a_run_goes_on_with_what_is_missing_or_was_too_noisy() -> None:
    results = Results({})
    record(results, Scripted(1.0, 1.5), a_case("A", "x", "y"))
    assert [t.quotable for t in results.takes] == [False, True]
    runner = Scripted()
    record(results, runner, a_case("A", "x", "y"), a_case("B", "x"))
    assert {name for name, _ in runner.asked} == {"A x", "B x"}
    assert [(t.case, t.variant, t.takes, t.quotable) for t in results.takes] == [
        ("A", "x", 2, True),
        ("A", "y", 1, True),
        ("B", "x", 1, True),
    ]
    assert results.of("Ad")[0].values == [4.0], "worked out again, once"
    assert [m.variant for m in results.of("A")] == ["x", "x", "y", "y"]


def test_what_was_noisy_or_not_quiet_is_taken_again_at_the_end() -> None:
    runner, results = Scripted(1.0, 1.5), Results({})
    answers = iter([True, False, True, True])
    record(results, runner, a_case("A", "x", "y", "z"), calm=lambda: next(answers, True), retakes=2)
    order = list(dict.fromkeys(name for name, _ in runner.asked))
    assert order == ["A x", "A y", "A z"]
    assert [name for name, loader in runner.asked if loader == "threads"] == [
        *("A x", "A y", "A z"),
        *("A x", "A y"),
    ]
    assert [(t.takes, t.quotable, t.quiet) for t in results.takes] == [
        (2, True, True),
        (2, True, True),
        (1, True, True),
    ]


def test_the_take_with_less_noise_is_kept() -> None:
    results = Results({})
    said = record(results, Scripted(1.0, 1.2, 1.0, 1.4), a_case("A", "x"), retakes=1)
    (take,) = results.takes
    assert take.noise == pytest.approx(0.2)
    assert take.takes == 2
    assert "noise 40.0%: not to be quoted" in said[1]


def test_takes_survive_their_file_and_old_files_have_none(tmp_path: Path) -> None:
    results = Results({})
    record(results, Scripted(1.0, 1.02), a_case("A", "x"))
    results.write(tmp_path / "r.json")
    assert Results.read(tmp_path / "r.json") == results
    assert results.noise("A") == pytest.approx(0.02)
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"], "nothing lies beside it"
    (tmp_path / "old.json").write_text('{"about": {}, "notes": [], "measurements": []}')
    assert Results.read(tmp_path / "old.json").noise("A") is None


def test_a_run_differs_by_its_code_machine_and_options() -> None:
    about = dict.fromkeys(recording.SETTINGS, 1)
    assert recording.differences(about, about | {"date": 2}) == []
    assert recording.differences(about, about | {"revision": 2, "rounds": 3}) == [
        "revision",
        "rounds",
    ]


def test_a_revision_is_of_all_code_that_a_figure_depends_on(tmp_path: Path) -> None:
    for name in (
        "hybridloader/a.py",
        "backends/b.py",
        "benchmarks/timing.py",
        "benchmarks/plot.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    found = {machine.revision(tmp_path)}
    (tmp_path / "benchmarks/plot.py").write_text("2")
    found.add(machine.revision(tmp_path))
    assert len(found) == 1, "the figure of a run may be drawn otherwise"
    for name in ("hybridloader/a.py", "backends/b.py", "benchmarks/timing.py"):
        (tmp_path / name).write_text("2")
        found.add(machine.revision(tmp_path))
    assert len(found) == 4


def test_every_case_has_an_estimate() -> None:
    cases = choose([], Options())
    assert all(recording.estimate(case, v, 5) > 0 for case in cases for v in case.variants)


# -- quiet ---------------------------------------------------------------------------------------


class Machine:
    """A machine whose time passes while one waits; others use it until a given time."""

    def __init__(self, until: float, seconds: Iterator[float] | None = None) -> None:
        self.now, self._until = 0.0, until
        self._seconds = seconds or itertools.repeat(0.01)

    def quiet(self, **more: Any) -> Quiet:
        return Quiet(
            share=lambda: 0.5 if self.now < self._until else 0.0,
            loop=lambda: next(self._seconds),
            clock=lambda: self.now,
            sleep=self._sleep,
            **more,
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_quiet_machine_is_not_waited_for() -> None:
    said: list[str] = []
    waiting = Machine(0.0).quiet()
    assert waiting.wait(said.append)
    assert said == []


def test_a_run_waits_until_others_are_done() -> None:
    said: list[str] = []
    running = Machine(3.0)
    assert running.quiet().wait(said.append)
    assert running.now == 3.0
    assert said[-1] == "waiting for quiet, 2 of 60 s: others use 50% of the cores"


def test_a_run_waits_until_the_machine_is_as_fast_as_it_was() -> None:
    said: list[str] = []
    running = Machine(0.0, iter([0.010, 0.020, 0.012, 0.011]))
    waiting = running.quiet()
    assert waiting.wait(said.append)
    assert waiting.wait(said.append)
    assert running.now == 2.0
    assert said[0].endswith("a loop takes 2.00 times as long as before")


def test_a_run_does_not_wait_for_ever() -> None:
    running = Machine(1000.0)
    waiting = running.quiet(limit=10.0, budget=15.0)
    assert [waiting.wait(lambda text: None) for _ in range(3)] == [False] * 3
    assert running.now == 15.0, "5 s were left of the budget at the second time, then none"


def test_the_loop_runs_on_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "LOOPS", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert quiet.loop_on_all_cores() > 0


def test_a_share_is_a_part_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "PAUSE", 0.0)
    assert 0 <= quiet.busy_share() <= 1


# -- the command ---------------------------------------------------------------------------------


def test_a_command_goes_on_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import __main__, harness, registry

    runner = Scripted()
    case = Case(
        "P2", "small", "s", whole_epochs, (Variant("v", {"name": "v"}, ("torch", *BACKENDS)),)
    )
    monkeypatch.setattr(registry, "choose", lambda names, options: [case])
    monkeypatch.setattr(harness, "Runner", runner)
    monkeypatch.setattr(__main__, "Quiet", lambda **_: Machine(0.0).quiet())
    file = tmp_path / "r.json"

    def run(*more: str) -> int:
        runner.asked.clear()
        return __main__.main(["--quick", "--rounds", "1", "--json", str(file), *more])

    assert run() == 0
    assert len(runner.asked) == 5
    assert run() == 0
    assert runner.asked == []
    assert "0 variants to measure, 1 are there" in capsys.readouterr().out
    assert run("--afresh") == 0
    assert len(runner.asked) == 5
    with pytest.raises(SystemExit):
        run("--workers", "3")
    assert "a run that differs in workers: --afresh replaces it" in capsys.readouterr().err
    assert run("--workers", "3", "--afresh") == 0
    assert Results.read(file).about["workers"] == 3
