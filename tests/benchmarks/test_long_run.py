"""The parts of the long run, in their smallest form, and its verdicts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

pytest.importorskip("psutil")

from benchmarks.long_run import part, work

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
