"""The benchmarks: rounds, processes, words and tables, and each measurement in its smallest form."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

pytest.importorskip("psutil")

from benchmarks import loaders, machine, measure, page, runner
from benchmarks.cases import CASES, Case
from benchmarks.runner import AGAIN, BEFORE, Failed, Mismatch, Process

CASE = Case("a case", "ms", "pace", (), {}, {})


# -- rounds --------------------------------------------------------------------------------------------


class Fake:
    """Process whose answers are listed; an error is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.closed = list(answers), [], False

    def ask(self, measure: str, loader: str, spec: Any, rehearsal: bool) -> Any:
        self.asked.append((loader, rehearsal))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True


def run(fakes: dict[str, Fake], rounds: int, *, quiet: bool = True) -> runner.Result:
    said: list[str] = []
    return runner.run(CASE, [*fakes], {}, rounds, said.append, fakes.__getitem__, lambda: quiet)


def seconds(*values: float) -> list[dict[str, float]]:
    return [{"value": value} for value in values]


def test_each_loader_is_measured_once_a_round_and_each_round_begins_with_the_next() -> None:
    found = list(runner.interleaved("abc", 4))
    assert [name for _, name in found] == list("abcbcacababc")
    assert [number for number, _ in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_values_have_the_unit_of_the_case_and_the_rehearsal_is_not_among_them() -> None:
    fakes = {"torch": Fake({}, *seconds(1, 2)), f"torch{AGAIN}": Fake({}, *seconds(1.2, 2.4))}
    result = run(fakes, 2)
    assert result.values == {"torch": [1000, 2000], f"torch{AGAIN}": [1200, 2400]}
    assert result.noise == pytest.approx(0.2)
    assert result.quiet
    assert fakes[f"torch{AGAIN}"].asked == [("torch", True), ("torch", False), ("torch", False)]
    assert all(fake.closed for fake in fakes.values())


def test_a_loader_that_fails_is_left_out() -> None:
    fakes = {"torch": Fake({}, *seconds(1, 1)), "fork": Fake({}, *seconds(1), Failed("died"))}
    result = run(fakes, 2)
    assert result.values == {"torch": [1000, 1000]}
    assert result.failures == {"fork": "died"}


def test_other_batches_end_the_case() -> None:
    fakes = {"torch": Fake({"digest": "a"}), "fork": Fake({"digest": "b"})}
    with pytest.raises(Mismatch, match="fork did not deliver the batches that torch delivers"):
        run(fakes, 1)
    assert all(fake.closed for fake in fakes.values())


# -- processes -----------------------------------------------------------------------------------------


def test_a_process_answers_and_an_error_has_its_words() -> None:
    spec = {"dataset": "Ints", "length": 12, "batch": 4, "workers": 1}
    with contextlib.closing(Process()) as process:
        assert process.ask("whole", "threads", spec)["value"] > 0
        with pytest.raises(Failed, match="KeyError: 'nothing'"):
            process.ask("nothing", "threads", spec)


def test_a_process_that_dies_is_a_failure() -> None:
    process = Process("benchmarks.no_such_module")
    with pytest.raises(Failed, match=r"died, exit code 1 .*no_such_module"):
        process.ask("pace", "torch", {})


def test_a_process_that_hangs_is_killed() -> None:
    process = Process(prefix=("sh", "-c", "sleep 60", "--"), timeout=0.0)
    with pytest.raises(Failed, match="gave no answer within 0 s, exit code -9"):
        process.ask("pace", "torch", {})


# -- measurements --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_kept", {})


def measured(name: str, loader: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """Answers of a rehearsal and of a round of a case in its quick form."""
    monkeypatch.setattr(measure, "_kept", {})
    case = CASES[name]
    spec = case.spec | case.quick | more
    function = measure.MEASURES[case.measure]
    return [function(loader, spec, rehearsal) for rehearsal in (True, False)]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("small", {"batch": 4}),
        pytest.param("hybrid", {"short": 4}, marks=pytest.mark.full),
        pytest.param("slow", {"length": 16, "workers": 2}, marks=pytest.mark.full),
        pytest.param("epochs", {}, marks=pytest.mark.full),
        ("resume", {}),
        pytest.param("python", {"batch": 2}, marks=pytest.mark.full),
    ],
)
def test_loaders_deliver_the_batches_of_torchs(
    name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [one for one in CASES[name].loaders if page.is_ours(one)][:2]
    found = [measured(name, one, monkeypatch, **more) for one in ("torch", *ours)]
    for answers in found:
        assert isinstance(answers[1]["value"], float)  # of two epochs: on a busy machine any
        digests = [[one.get("digest") for one in both] for both in (answers, found[0])]
        assert digests[0] == digests[1]
        assert any(digests[0])


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(one, marks=() if one == "torchdata threads" else pytest.mark.full)
        for one in loaders.LOADERS
        if loaders.is_rival(one)
    ],
)
def test_rivals_deliver_the_batches_of_torchs(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if loaders.missing(loader):
        pytest.skip("not installed")
    name = "hybrid" if "in processes" in loader or "stages" in loader else "small"
    more = {"batch": 2, "short": 4}
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    spec = CASES[name].spec | CASES[name].quick | more
    expected = measured(name, "torch", monkeypatch, **more)
    with contextlib.closing(Process()) as process:
        assert process.ask("pace", loader, spec, True)["digest"] == expected[0]["digest"]


@pytest.mark.parametrize("name", ["disk", "store", "tables"])
def test_stored_samples_come_once(name: str) -> None:
    if name == "tables":
        pytest.importorskip("pyarrow")
    pytest.importorskip("aiohttp")
    spec = CASES[name].spec | CASES[name].quick
    expected = measure.digest(list(range(spec["samples"])))
    loader = next(one for one in CASES[name].loaders if page.is_ours(one))
    with contextlib.closing(Process()) as process:
        assert process.ask("stored", loader, spec)["digest"] == expected


@pytest.mark.full
def test_memory_of_workers_is_that_of_the_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, answer) = measured("memory", "fork", monkeypatch, start="fork")
    # A forked worker takes a few MB, as much as the system takes from or gives to others meanwhile.
    assert abs(answer["value"]) < 100


# -- words and tables ----------------------------------------------------------------------------------


def row(**loaders: list[float]) -> page.Row:
    return {
        "commit": "abc",
        "date": "2026-01-02",
        "machine": "a machine",
        "rounds": 3,
        "unit": "ms",
        "quiet": True,
        "noise": 0.02,
        "failures": {},
        "loaders": loaders,
    }


@pytest.mark.parametrize(
    ("other", "ours", "unit", "words"),
    [
        (12.0, 1.0, "ms", "**12 times faster**"),
        (1.0, 2.0, "ms", "2 times slower"),
        (1.0, 1.04, "ms", "level: a reason"),
        (20.0, 1.0, "MB", "**20 times less**"),
        (None, 1.0, "ms", ""),
    ],
)
def test_loaders_are_compared_in_words(
    other: float | None, ours: float, unit: str, words: str
) -> None:
    assert page.against(other, ours, row() | {"unit": unit}, "a reason") == words


def test_a_row_has_the_best_of_ours_and_of_the_rivals() -> None:
    named = {"torch": [9.0], "fork": [3.0], "threads": [2.0]}
    named |= {"Grain threads": [4.0], "SPDL threads": [5.0], f"threads{BEFORE}": [1.0]}
    cells = page.cells("small", row(**named))
    assert cells[1:4] == ["9 ms", "4 ms (Grain)", "2 ms (`threads`)"]
    assert cells[4:] == ["**4.5 times faster**", "**2 times faster**"]


def test_a_row_without_quiet_or_with_noise_is_left_out() -> None:
    rows = {
        "small": row(torch=[2.0], fork=[1.0]),
        "large": row(torch=[2.0], fork=[1.0]) | {"quiet": False},
        "jpeg": row(torch=[2.0], fork=[1.0]) | {"noise": 0.11},
    }
    text = "<!-- benchmarks:begin summary -->\nold\n<!-- benchmarks:end summary -->\n"
    found = page.rewritten(text, rows)
    assert CASES["small"].title in found
    assert CASES["large"].title not in found
    assert CASES["jpeg"].title not in found


def test_a_figure_is_written_and_one_that_is_missing_is_an_error() -> None:
    rows = {"small": row(torch=[2.0, 4.0, 3.0])}
    text = "takes <!-- figure small;\ntorch -->9 ms<!-- end -->."
    assert page.rewritten(text, rows) == "takes <!-- figure small;\ntorch -->3 ms<!-- end -->."
    with pytest.raises(page.BadPage, match="figure of small, fork: not measured"):
        page.rewritten("<!-- figure small; fork -->9 ms<!-- end -->", rows)
    with pytest.raises(page.BadPage, match="no block is called 'other'"):
        page.rewritten("<!-- benchmarks:begin other -->\n<!-- benchmarks:end other -->", rows)


@pytest.mark.parametrize(("age", "lines"), [(20, 0), (21, 1), (None, 0)])
def test_a_result_of_an_old_commit_is_stale(age: int | None, lines: int) -> None:
    assert len(page.stale({"small": row()}, lambda commit: age)) == lines
    assert not page.stale({"small": row() | {"quiet": False}}, lambda commit: age)


def test_the_pages_quote_the_kept_results() -> None:
    rows = json.loads(page.RESULTS.read_text())
    for file in page.pages():
        text = file.read_text()
        assert page.rewritten(text, rows) == text, f"{file}: run python -m benchmarks.page"


def test_the_kept_results_are_of_a_recent_commit() -> None:
    if machine.commits_since("HEAD") is None:
        pytest.skip("a shallow clone does not know how old a commit is")
    assert not page.stale(json.loads(page.RESULTS.read_text()))
