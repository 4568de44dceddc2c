"""The parts of the long run, in their smallest form, and its verdicts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("psutil")

from benchmarks.long_run import __main__ as command
from benchmarks.long_run import part, work
from benchmarks.runner import Failed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize("backend", ["inline", "threads"])
@pytest.mark.parametrize("kind", work.KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_work_delivers_every_sample(
    kind: Callable[[work.Job], None], backend: str
) -> None:
    kind(work.Job(backend, random.Random(3)))


def test_wrong_samples_are_reported_with_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(job: work.Job) -> None:
        job.expect([1, 1], [0, 1])

    monkeypatch.setattr(work, "KINDS", (lossy,))
    message = r"lossy on threads, seed 7, cycle 2: WrongSamples: lost \[0\], too many \[1\]"
    with pytest.raises(work.WrongSamples, match=message):
        work.cycle("threads", 7, 2, Counter())


def test_a_part_looks_after_each_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "cycle", lambda *given: given[-1].update(cycles=1))
    found = part.part("threads", 0.0, 5)
    assert found["tally"] == {"cycles": 1}
    assert [*found["looks"]] == [*part.COLUMNS]
    assert found["looks"]["memory_mb"][0] > 10
    assert found["looks"]["threads"][0] >= found["looks"]["processes"][0] >= 1


def looks(**more: float) -> dict[str, list[float]]:
    """20 looks in which nothing grows, but for what is more at the end."""
    return {name: [10.0] * 18 + [10.0 + more.get(name, 0)] * 2 for name in part.COLUMNS}


class Answering:
    """Process of a part that has one answer."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.closed = answer, False

    def ask(self, measure: str, loader: str, spec: dict[str, Any], rehearsal: bool) -> Any:
        assert (measure, spec) == ("part", {"seconds": 60.0, "seed": 5})
        if isinstance(self.answer, Failed):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("answer", "code", "line"),
    [
        ({"looks": looks(), "tally": {"cycles": 3}}, 0, "fork: as at the beginning (3 cycles)"),
        (
            {"looks": looks(descriptors=1), "tally": {}},
            1,
            "fork: more at the end: descriptors 10 -> 11 ()",
        ),
        (Failed("died"), 1, "fork: failed: died ()"),
    ],
)
def test_a_part_has_a_verdict(
    answer: Any, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    process = Answering(answer)
    arguments = ["--minutes", "1", "--backends", "fork", "--seed", "5"]
    assert command.main(arguments, lambda timeout: process) == code
    assert capsys.readouterr().out == f"{line}\n"
    assert process.closed
