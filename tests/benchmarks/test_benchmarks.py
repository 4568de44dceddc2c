"""The benchmark harness itself: with fake clocks and fake loaders, and once end to end.

No test here looks at how long something took.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("psutil")
pytest.importorskip("matplotlib")

from benchmarks import harness, measurements, plot, registry, report, timing
from benchmarks.__main__ import main
from benchmarks.case import Case, Measure, Options, Spec, Variant
from benchmarks.cases import image_batches
from benchmarks.display import Display, cell, number, steps_of
from benchmarks.harness import Mismatch
from benchmarks.measurements import digest, whole_epochs
from benchmarks.names import BACKENDS
from benchmarks.recording import Recording
from benchmarks.results import Measurement, Results, relate
from benchmarks.runner import Runner, RunnerFailed
from benchmarks.targets import flat, verdicts

ROOT = Path(__file__).parents[2]


class FakeClock:
    """Moves on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeRunner:
    """Answers from a script: loader -> seconds of its rounds."""

    log: list[tuple[str, str]]
    digests: dict[str, str]
    seconds: dict[str, list[float]]

    def __init__(self) -> None:
        self.pid = 0
        self.closed = False
        self._left = copy.deepcopy(FakeRunner.seconds)
        FakeRunner.made.append(self)

    made: list[FakeRunner]

    def ask(
        self, measure: Measure, loader: str, spec: Spec, idle: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        FakeRunner.log.append((measure.__name__, loader))
        if loader in spec.get("dies", ()):
            raise RunnerFailed("died (exit code -9)")
        if loader in spec.get("cannot", ()):
            return {"skipped": "it can't"}
        if measure is measurements.check:
            if idle is not None:
                idle()
            return {"digest": FakeRunner.digests.get(loader, "same")}
        return {"value": self._left[loader].pop(0), "cpu": 0.5}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _fresh_script() -> None:
    FakeRunner.log, FakeRunner.digests, FakeRunner.made = [], {}, []
    FakeRunner.seconds = {
        "limit": [0.001, 0.001, 0.001],
        "torch": [0.010, 0.020, 0.030],
        "threads": [0.001, 0.004, 0.002],
        "SPDL threads": [0.005, 0.005, 0.010],
    }


def a_case(**spec: Any) -> Case:
    variant = Variant("tiny", {"limit_workers": 2, **spec}, tuple(FakeRunner.seconds))
    return Case("P2", "small", "ms / batch", whole_epochs, (variant,), scale=1e3)


def run(case: Case, rounds: int = 3) -> Results:
    results = Results({})
    measuring = harness.Harness(harness.Progress(), make_runner=FakeRunner, memory=lambda pid: 42.0)
    with contextlib.closing(measuring):
        Recording([case], results, rounds, measuring).run()
    relate(results.measurements)
    return results


def run_with(**seconds: list[float]) -> Results:
    FakeRunner.seconds = seconds
    return run(a_case(), len(seconds["torch"]))


def test_rounds_are_interleaved_and_each_begins_with_the_next_one() -> None:
    order = list(timing.interleaved(["a", "b", "c"], 3))
    assert [name for _, name in order] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [number for number, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_turn_runs_from_the_last_batch_to_the_first_of_the_next_epoch() -> None:
    clock = FakeClock()

    def epoch() -> Iterator[int]:
        clock.now += 0.5  # until the first batch
        for place in range(3):
            yield place
            clock.now += 2.0 if place < 2 else 0.125  # and until there are no more

    assert timing.turns(epoch, 4, clock) == [0.625] * 4


def test_medians_spreads_and_ratios() -> None:
    results = run(a_case())
    threads = results.find("P2", "tiny", "threads")
    assert threads is not None
    assert (threads.median, threads.spread) == (2.0, 1.5)
    # Round by round torch took 10, 5 and 15 times as long; of the medians it would be 10, too,
    # and the limit is what two workers could do together: half of what one needs.
    assert threads.versus_torch == pytest.approx(10)
    assert threads.versus_limit == pytest.approx(0.25)
    assert threads.memory_mb == 42.0
    assert threads.cpu == [0.5] * 3


def test_every_loader_is_checked_before_any_is_timed() -> None:
    run(a_case())
    assert [job for job, _ in FakeRunner.log] == ["check"] * 5 + ["whole_epochs"] * 15
    assert [name for _, name in FakeRunner.log[5:10]] == [
        "limit",
        "torch",
        "threads",
        "SPDL threads",
        "torch",
    ], "torch's twice"
    assert FakeRunner.log[10] == ("whole_epochs", "torch")
    assert all(runner.closed for runner in FakeRunner.made)


def test_other_batches_fail_loudly() -> None:
    FakeRunner.digests["SPDL threads"] = "other"
    with pytest.raises(Mismatch, match="P2 tiny: SPDL threads did not deliver"):
        run(a_case())
    assert all(runner.closed for runner in FakeRunner.made)


def test_a_digest_sees_types_shapes_and_bytes() -> None:
    import torch

    ones = torch.ones(4, dtype=torch.int64)
    assert digest([ones]) == digest([ones.clone()])
    different = [digest([x]) for x in (ones, ones.to(torch.int32), ones.view(2, 2), ones * 2)]
    assert len(set(different)) == 4


def test_who_can_t_or_dies_is_left_out_with_the_reason() -> None:
    results = run(a_case(cannot=["SPDL threads"], dies=["threads"]))
    by_name = {m.loader: m for m in results.measurements}
    assert by_name["SPDL threads"].skipped == "it can't"
    assert by_name["threads"].skipped.startswith("died")
    assert not by_name["threads"].values
    assert by_name["torch"].values == [10.0, 20.0, 30.0]
    assert by_name["threads"].details == {"tried_again": ["died (exit code -9)"]}
    assert len(FakeRunner.made) == 7, "the dead runner was replaced, to try again and for the next"
    assert len(results.failures()) == 1, "ours died; what a rival can't do is none"


def test_verdicts_hold_a_run_against_the_targets() -> None:
    found = {v.target: v for v in verdicts(run(a_case()), registry.TARGETS)}
    assert found["threads >= 10x torch"].met is True
    assert found["threads >= 10x torch"].reached == "10x (threads, tiny)"
    assert found["shared-memory and fork >= 10x torch"].met is None
    slower = run_with(torch=[0.009, 0.036, 0.018], threads=[0.001, 0.004, 0.002])
    assert {v.target: v.met for v in verdicts(slower, registry.TARGETS)}[
        "threads >= 10x torch"
    ] is False
    assert {v.case for v in found.values()} == {"P2"}, "only of cases that were run"


def test_every_target_copes_with_a_run_that_measured_nothing() -> None:
    names = sorted({target.case for target in registry.TARGETS})
    rows = [Measurement(name, "v", "threads", "s", skipped="not here") for name in names]
    found = verdicts(Results({}, rows), registry.TARGETS)
    assert [v.met for v in found if v.met] == []
    assert len(found) == len(registry.TARGETS)


def test_flat_targets_compare_sizes() -> None:
    rows = [
        Measurement("P12", f"{workers} workers", "fork", "us", values=[value])
        for workers, value in ((1, 50.0), (2, 20.0), (8, 26.0), (64, 40.0))
    ]
    judged = flat("workers", 2, 1.5, ("fork",))(Results({}, rows), "P12")
    assert judged == ("2x (fork, 64 workers)", False)


def test_results_survive_their_file(tmp_path: Path) -> None:
    results = Results({"cpu": "one", "quick": True}, run(a_case()).measurements, ["a note"])
    results.write(tmp_path / "r.json")
    assert Results.read(tmp_path / "r.json") == results
    row = json.loads((tmp_path / "r.json").read_text())["measurements"][1]
    assert (row["loader"], row["median"], row["spread"]) == ("torch", 20.0, 10.0)


def test_a_cell_shows_median_spread_ratio_and_the_rival_s_best_way() -> None:
    rows = run(a_case()).measurements
    assert cell(rows, "threads") == "10x\n2 ± 1.5\ncpu 500, 42 MB"
    assert cell(rows, "SPDL") == "3x threads\n5 ± 2.5\ncpu 500, 42 MB"
    assert cell(rows, "torch") == "20 ± 10\ncpu 500, 42 MB"
    assert cell(rows, "fork") == ""
    assert [number(v) for v in (0, 0.123456, 12.3456, 1234.5)] == ["0", "0.123", "12.3", "1,234"]


def test_tables_are_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    results = run(a_case())
    results.about = _about()
    Display().tables(results, verdicts(results, registry.TARGETS), {"P2": "small"})
    shown = capsys.readouterr().out
    assert "P2: small, ms / batch" in shown
    assert "threads >= 10x torch" in shown
    assert "met" in shown


def test_an_unknown_case_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        registry.UnknownCase, match=r"no case 'P44'; there are: P1, P2, .*, endurance"
    ):
        registry.choose(["P44"], Options())
    with pytest.raises(SystemExit) as caught:
        main(["--case", "P44"])
    assert caught.value.code == 2
    assert "no case 'P44'" in capsys.readouterr().err


def test_all_cases_can_be_made() -> None:
    for options in (Options(), Options(3, quick=True, rivals=False)):
        made = registry.choose([], options)
        assert steps_of(made, 2) > 0
        for case in made:
            for variant in case.variants:
                assert json.loads(json.dumps(variant.spec)) == variant.spec
    assert [case.name for case in registry.choose(["p2", "P2"], Options())] == ["P2"]


def test_cpu_per_gigabyte_comes_from_the_runs_of_p1() -> None:
    row = Measurement("P1", "38 MB uint8", "torch", "ms", values=[9.0], cpu=[0.0385351680])
    (found,) = image_batches.cpu_per_gigabyte(
        [row, Measurement("P1", "10 MB uint8", "torch", "ms")]
    )
    assert found.case == "P9"
    assert found.values == pytest.approx([1.0])


def _about() -> dict[str, Any]:
    return {
        "cpu": "A CPU",
        "cores": 2,
        "memory_gb": 24,
        "os": "an OS",
        "python": "3.11",
        "versions": {"torch": "2.13", "grain": None},
        "date": "2026-01-01",
        "rounds": 3,
        "quick": True,
    }


def test_report_rewrites_the_blocks_and_nothing_else(tmp_path: Path) -> None:
    results = run(a_case())
    results.about = _about()
    results.write(tmp_path / "r.json")
    page = tmp_path / "page.md"
    begin, end = "<!-- benchmarks:begin {} -->", "<!-- benchmarks:end {} -->"
    page.write_text(
        "\n".join(
            (
                *("before", begin.format("P2"), "old", end.format("P2"), "between"),
                *(begin.format("machine"), end.format("machine"), "after", ""),
            )
        )
    )
    arguments = [str(tmp_path / "r.json"), str(page)]
    assert report.main([*arguments, "--check"]) == 1
    assert "old" in page.read_text(), "--check changes nothing"
    assert report.main(arguments) == 0
    once = page.read_text()
    assert "| tiny<br>noise < 1 % |" in once
    assert "A CPU, 2 cores, 24 GB" in once
    assert "quick" in once
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert report.main(arguments) == 0
    assert page.read_text() == once
    assert report.main([*arguments, "--check"]) == 0


def test_report_refuses_a_run_that_was_too_noisy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(a_case())
    results.about = _about()
    results.takes[0].pairs = [[1.0, 1.2]]
    results.write(tmp_path / "r.json")
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmarks:begin P2 -->\nold\n<!-- benchmarks:end P2 -->\n")
    for more in ([], ["--check"]):
        assert report.main([str(tmp_path / "r.json"), str(page), *more]) == 2
        said = capsys.readouterr().err
        assert "P2, tiny: torch differs from itself by 20%" in said
        assert f"--json {tmp_path / 'r.json'} --case P2" in said
    assert "old" in page.read_text()


def test_documents_tell_ratios_first_then_noise_and_what_was_missed_and_why() -> None:
    results = run_with(torch=[0.02], threads=[0.004], **{"SPDL threads": [0.01]})
    results.about = _about() | {"quick": False}
    results.takes[0].pairs = [[1.05, 1.0]]
    results.takes[0].quiet = False
    assert "| P2, tiny | **5x** | 2.5x |  | 5 % | 20 ms / batch |" in report.block(
        "summary", results
    )
    assert "| tiny<br>noise 5 % | 20 ± 0<br>" in report.block("P2", results)
    said = report.block("machine", results)
    assert "differs from itself by 5 % in the median line" in said
    assert "not quiet in: P2 (tiny)" in said
    missed = report.block("missed", results)
    assert "- **P2, threads >= 10x torch**: 5x (threads, tiny). A batch takes" in missed
    assert report.block("notes", results) == "No notes."
    (line,) = plot.lines(results)
    assert (line.noise, line.target) == (pytest.approx(0.05), 10)
    assert line.ratios == {"torch": (pytest.approx(5), ""), "best rival": (2.5, "SPDL")}


def test_a_run_of_before_noise_was_measured_says_so() -> None:
    results = run(a_case())
    results.about = _about()
    results.takes.clear()
    assert "noise of this machine was not measured" in report.block("machine", results)
    assert report.unquotable(results) == []


QUOTING = (
    "README.md",
    "docs/backends.md",
    "docs/benchmarks.md",
    "docs/comparison.md",
    "docs/randomness.md",
    "docs/samplers.md",
)
"""Pages with figures of the kept run: whole tables, or one figure within a sentence."""


@pytest.mark.parametrize("page", QUOTING)
def test_quoted_figures_are_those_of_the_kept_run(page: str) -> None:
    text = (ROOT / page).read_text()
    assert re.search("<!-- (benchmarks:begin|figure)", text)
    results = Results.read(ROOT / "benchmarks" / "results.json")
    assert report.rewrite(text, results) == text, (
        f"run: python -m benchmarks.report benchmarks/results.json {page}"
    )


@pytest.mark.parametrize("case", registry.CASES)
def test_each_case_has_a_table_in_the_page(case: str) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert f"<!-- benchmarks:begin {case} -->" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- benchmarks:begin P2 -->\nno end\n", "no end"),
        ("<!-- benchmarks:begin nonsense -->\n<!-- benchmarks:end nonsense -->\n", "nonsense"),
        ("nothing\n", "no block"),
        ("<!-- figure P2; no such; threads -->1 s<!-- end -->\n", "no figure for P2; no such"),
    ],
)
def test_report_refuses_what_it_can_t_fill(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(a_case())
    results.about = _about()
    results.write(tmp_path / "r.json")
    (tmp_path / "page.md").write_text(text)
    assert report.main([str(tmp_path / "r.json"), str(tmp_path / "page.md")]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == text


def test_a_runner_that_dies_says_so() -> None:
    runner = Runner(prefix=["sh", "-c", "echo oh no >&2; exit 3"])
    with pytest.raises(RunnerFailed, match=r"died \(exit code 3\) oh no"):
        runner.ask(whole_epochs, "torch", {})
    runner.close()


def test_a_runner_that_does_not_answer_is_ended() -> None:
    runner = Runner(prefix=["sh", "-c", "exec sleep 60"], timeout=0.2)
    with pytest.raises(RunnerFailed, match="no answer within"):
        runner.ask(whole_epochs, "torch", {})


def test_a_run_shows_tables_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaders = ("torch", *BACKENDS)
    variant = Variant("64 ints", {}, loaders)
    case = Case("P2", "small batches", "us / batch", whole_epochs, (variant,), scale=1e6)
    monkeypatch.setattr(registry, "choose", lambda names, options: [case])
    monkeypatch.setattr(harness, "Runner", FakeRunner)
    FakeRunner.seconds = {loader: [0.001] for loader in loaders} | {"torch": [0.02]}
    drawn: list[Path] = []
    monkeypatch.setattr(plot, "draw", lambda results, file: drawn.append(file))
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "f.png")]
    assert main(["--quick", "--no-rivals", "--rounds", "1", *files]) == 0
    assert drawn == [tmp_path / "f.png"]
    shown = capsys.readouterr().out
    assert "P2: small batches, us / batch (x faster than torch)" in shown
    assert "threads >= 10x torch" in shown
    results = Results.read(tmp_path / "r.json")
    assert results.about["quick"] is True
    assert {m.loader for m in results.of("P2")} == set(loaders)
    assert all(runner.closed for runner in FakeRunner.made)


_DRAW = """
import sys
from pathlib import Path
from benchmarks import __main__
from benchmarks.plot import draw
from benchmarks.recording import Recording
from benchmarks.results import Results
draw(Results.read(Path("benchmarks/results.json")), Path(sys.argv[1]))
print("torch" in sys.modules)
"""


def test_a_figure_is_drawn_and_torch_is_not_imported(tmp_path: Path) -> None:
    # In a process of its own: matplotlib keeps the files of its fonts open.
    file = tmp_path / "f.png"
    command = [sys.executable, "-c", _DRAW, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
    assert file.read_bytes().startswith(b"\x89PNG")


def test_ratios_are_taken_round_by_round() -> None:
    torchs = Measurement("P1", "v", "torch", "s", values=[1.0, 10.0, 2.0])
    ours = Measurement("P1", "v", "fork", "s", values=[0.5, 5.0, 2.0])
    relate([torchs, ours])
    assert ours.versus_torch == 2.0
