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
    first, second = it.report()
    assert (first.state, first.done, first.restarts) == ("starting", 1, 1)
    assert (first.index, first.seconds) == (["c"], 2.5)
    assert (second.state, second.done, second.restarts) == ("idle", 2, 0)
    assert (second.index, second.seconds) == (None, None)


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
