"""The benchmarks: rounds, processes, words and tables, and each measurement in its smallest form."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

pytest.importorskip("psutil")

from benchmarks import machine, measure, page, runner
from benchmarks.cases import CASES, Case
from benchmarks.runner import AGAIN, Failed, Mismatch, Process

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


# -- words and tables ----------------------------------------------------------------------------------


def test_the_pages_quote_the_kept_results() -> None:
    rows = json.loads(page.RESULTS.read_text())
    for file in page.pages():
        text = file.read_text()
        assert page.rewritten(text, rows) == text, f"{file}: run python -m benchmarks.page"


def test_the_kept_results_are_of_a_recent_commit() -> None:
    if machine.commits_since("HEAD") is None:
        pytest.skip("a shallow clone does not know how old a commit is")
    assert not page.stale(json.loads(page.RESULTS.read_text()))
