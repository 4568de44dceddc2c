"""Report of a stage on its workers, and the table at the end of its errors."""

from __future__ import annotations

import pytest
from support.supervised import answer, dead, ready, stage

from hybridloader.errors import WorkerDied
from hybridloader.testing import FakeClock


def test_the_report_tells_what_each_worker_is_doing() -> None:
    clock = FakeClock(100.0)
    script = [
        [*ready(0, 1), *answer(0), *answer(1, worker=1), *answer(3, worker=1), dead(0)],
        ready(0),
    ]
    it, _ = stage(script, workers=2, clock=clock)
    it.begin(iter([["a"], ["b"], ["c"], ["d"]]))
    assert next(it) == "value 0"
    clock.now += 2.5
    assert it.report().splitlines() == [
        "worker  where  pid     state  done  restarts     for  task",
        "------  -----  ---  --------  ----  --------  ------  -----",
        "0                -  starting     1         1  2.50 s  ['c']",
        "1                -      idle     2         0       -  -",
    ]


def busy(index: object, seconds: float = 0.0) -> str:
    """Report on a worker that was asked for `index` so many seconds ago, and on one without a task."""
    clock = FakeClock(100.0)
    it, _ = stage([], workers=2, clock=clock)
    it.begin(iter([index]))
    clock.now += seconds
    return it.report()


class Lines:
    def __repr__(self) -> str:
        return "many\nlines" * 50


@pytest.mark.parametrize("index", [["a\nb" * 50, "c"], Lines(), [Lines()]])
def test_a_long_task_stays_on_its_line(index: object) -> None:
    long = busy(index)
    assert len(long.splitlines()) == 4
    assert max(map(len, long.splitlines())) < 120


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00 s"), (9.99, "9.99 s"), (59.9, "59.9 s"), (307, "5 min 7 s"), (7384, "2 h 3 min")],
)
def test_times(seconds: float, text: str) -> None:
    assert text in busy([1], seconds)


def test_a_task_without_an_index_is_told_from_no_task() -> None:
    *_, first, second = busy(None).splitlines()
    assert first.endswith("None")
    assert second.endswith("-")


def test_an_error_ends_with_the_table_of_the_workers() -> None:
    it, _ = stage([[*ready(0, 1), *answer(0)], [dead(1)]], workers=2, policy=None)
    it.begin(iter([["a"], ["b"], ["c"], ["d"]]))
    assert next(it) == "value 0"
    with pytest.raises(WorkerDied) as caught:
        next(it)
    heading, _, *rows = str(caught.value).splitlines()[-5:-1]  # before the link
    assert heading.split() == ["worker", "where", "pid", "state", "done", "restarts", "for", "task"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert "gone" in rows[1]
