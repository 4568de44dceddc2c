"""Tasks that run over: scripted, on a clock that tests set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.supervised import answer, dead, passing, ready, stage

from hybridloader.engine.messages import Event, Task
from hybridloader.engine.stage import START
from hybridloader.errors import TaskTimeout, WorkerTimeout
from hybridloader.testing import FakeClock, ScriptedBackend, ScriptedCrew


def test_a_task_that_runs_over_is_raised_with_the_stack_and_closes_the_stage() -> None:
    clock = FakeClock()
    script = [ready(), passing(clock, 5.0), passing(clock, 5.0)]
    it, backend = stage(script, policy=None, task_timeout=10, clock=clock)
    backend.crews[0].stack = lambda worker: f"where worker {worker} is"  # type: ignore[method-assign]
    it.begin(iter([["a", "b"]]))
    with pytest.raises(
        TaskTimeout, match=r"(?s)worker 0.*\['a', 'b'\].*10.*where worker 0 is"
    ) as caught:
        next(it)
    assert isinstance(caught.value, WorkerTimeout)
    assert backend.crews[0].closed
    assert backend.crews[0].killed == []


def test_under_restart_a_process_is_killed_and_its_task_done_again() -> None:
    clock = FakeClock()
    script = [
        ready(),
        passing(clock, 10.0),
        [dead()],
        [*ready(), *answer(0)],
    ]
    it, backend = stage(script, task_timeout=10, clock=clock)
    it.begin(iter([["a"]]))
    assert next(it) == "value 0"
    assert backend.crews[0].killed == [0]
    assert backend.crews[0].started == [0, 0]


def test_a_sample_that_is_stuck_again_and_again_is_given_up_with_that_reason() -> None:
    clock = FakeClock()
    stuck = [ready(), passing(clock, 10.0), [dead(task=0, at=1)]]
    it, backend = stage([*stuck, *stuck, [*ready(), *answer(0)]], task_timeout=10, clock=clock)
    it.begin(iter([[7, 8]]))
    assert next(it) == "value 0"
    last = [m for _, m in backend.crews[0].sent if isinstance(m, Task)][-1]
    assert "ran over task_timeout=10 seconds" in last.index[1].text


def test_threads_are_not_killed_under_restart_either() -> None:
    clock = FakeClock()
    script = [ready(), passing(clock, 10.0)]
    it, backend = stage(script, backend=ScriptedBackend, task_timeout=10, clock=clock)
    it.begin(iter([["a"]]))
    with pytest.raises(TaskTimeout):
        next(it)
    assert backend.crews[0].killed == []


def test_only_the_time_since_the_task_before_counts() -> None:
    clock = FakeClock()
    script = [
        passing(clock, 100.0, *ready()),  # starting is not working
        passing(clock, 9.0, *answer(0)),
        passing(clock, 9.0, *answer(1)),
        passing(clock, 9.0, *answer(2)),
    ]
    it, _ = stage(script, policy=None, task_timeout=10, clock=clock)
    it.begin(iter([["a"], ["b"], ["c"]]))
    assert list(it) == ["value 0", "value 1", "value 2"]


def test_a_worker_that_does_not_get_ready_runs_over_as_well() -> None:
    clock = FakeClock()
    killed_after = []

    def late(crew: ScriptedCrew) -> Sequence[Event]:
        killed_after.append((clock.now, list(crew.killed)))
        return [dead()]

    script = [
        [*ready(), dead()],
        passing(clock, START + 9.0),
        lambda crew: killed_after.append((clock.now, list(crew.killed))) or [],
        passing(clock, 1.0),
        late,
        [*ready(), *answer(0)],
    ]
    it, backend = stage(script, task_timeout=10, clock=clock)
    it.begin(iter([["a"]]))
    assert next(it) == "value 0"
    assert killed_after == [(START + 9.0, []), (START + 10.0, [0])]
    assert backend.crews[0].started == [0, 0, 0]


def test_what_has_come_while_nobody_asked_is_not_late() -> None:
    clock = FakeClock()
    script = [[*ready(), *answer(0)], answer(1)]
    it, _ = stage(script, policy=None, task_timeout=10, clock=clock)
    it.begin(iter([["a"], ["b"]]))
    assert next(it) == "value 0"
    clock.now += 1000.0  # a long step of the training loop; the worker was done in time
    assert next(it) == "value 1"


def test_a_wait_is_no_longer_than_the_task_may_take() -> None:
    clock = FakeClock()
    it, backend = stage([], policy=None, task_timeout=10, clock=clock)
    waits: list[float | None] = []
    steps: list[Any] = [ready(), [], answer(0)]

    def wait(timeout: float | None) -> Sequence[Event]:
        waits.append(timeout)
        clock.now += 3.0
        return steps.pop(0)  # type: ignore[no-any-return]

    backend.crews[0].wait = wait  # type: ignore[method-assign]
    it.begin(iter([["a"]]))
    assert next(it) == "value 0"
    assert waits == [START + 10.0, 10.0, 7.0]
