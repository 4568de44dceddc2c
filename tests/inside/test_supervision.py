"""Workers that die or run over, their replacement, and the words: scripted, on a clock of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.scripted import FakeClock, ScriptedCrew
from support.supervised import START, answer, dead, passing, ready, stage

from hybridloader import RestartPolicy, WorkerDied
from hybridloader.engine import Begin, Event, Exhausted, Exited, Task, WorkerSpec


def test_where_no_worker_ever_gets_ready_the_error_says_so_in_the_end() -> None:
    it, backend = stage([[dead()]] * 4, policy=RestartPolicy(max_restarts=3))
    it.begin(iter([["a"]]))
    with pytest.raises(WorkerDied, match=r"3 workers .* None of them ever became ready"):
        next(it)
    assert backend.crews[0].started == [0] * 4


def test_too_many_restarts_within_the_window_raise_and_older_ones_do_not_count() -> None:
    clock = FakeClock()

    def later(seconds: float) -> Sequence[Any]:
        return [passing(clock, seconds, dead()), ready()]

    script = [ready(), *later(1), *later(1), *later(100), *later(1), *later(1)]
    policy = RestartPolicy(max_restarts=2, window_seconds=50, deaths_per_sample=99)
    it, backend = stage(script, policy=policy, clock=clock)
    it.begin(iter([["a"]]))
    with pytest.raises(
        WorkerDied, match="2 workers of this stage were restarted within 50 seconds"
    ):
        next(it)
    assert (
        backend.crews[0].started == [0] * 5
    )  # the third death came when the first two were forgotten


@pytest.mark.parametrize("known", [{"task": None, "at": -1}, {"task": 5, "at": 0}])
def test_nobody_is_blamed_for_a_death_between_two_samples_or_at_a_task_that_is_done(
    known: dict[str, Any],
) -> None:
    deaths = [[*ready(), dead(**known)] for _ in range(5)]
    it, backend = stage([*deaths, [*ready(), *answer(0)]])
    it.begin(iter([[7, 8]]))
    assert next(it) == "value 0"
    assert {tuple(m.index) for _, m in backend.crews[0].sent if isinstance(m, Task)} == {(7, 8)}


def test_a_worker_at_the_end_of_its_shard_is_replaced_only_for_the_next_epoch() -> None:
    script = [
        [*ready(0, 1), Exhausted(1, 1), dead(1), *answer(0)],
        [Exhausted(0, 2)],
        [*ready(1), *answer(3), *answer(4, worker=1)],
    ]
    it, backend = stage(script, workers=2, lookahead=2, persistent=True, in_turn=True)
    it.begin(iter([[None]] * 3))
    assert list(it) == ["value 0"]
    assert backend.crews[0].started == [0, 1]
    it.begin(iter([[None]] * 2))
    assert list(it) == ["value 3", "value 4"]
    assert backend.crews[0].started == [0, 1, 1]
    begun = [worker for worker, message in backend.crews[0].sent if isinstance(message, Begin)]
    assert begun == [0]  # the new one opens its shard when it starts


@pytest.mark.parametrize("method", ["start", "send"])
def test_why_no_other_worker_can_be_had_or_sent_its_tasks_is_told_with_the_death(
    method: str,
) -> None:
    """Otherwise the stage would wait forever for a task that no worker does."""
    it, backend = stage([[*ready(), dead()]])
    it.begin(iter([["a"]]))

    def refuse(worker: int, message: Any) -> None:
        raise MemoryError("no room for a copy")

    setattr(backend.crews[0], method, refuse)
    words = "restarted: .*no room" if method == "start" else "could not be restarted: no room"
    with pytest.raises(WorkerDied, match=words):
        next(it)
    assert backend.crews[0].closed


def test_policies_are_named_and_refuse_what_is_no_number_or_too_small() -> None:
    for wrong in ("max_restarts", "window_seconds", "deaths_per_sample"):
        for value in (0, True, float("nan")):
            with pytest.raises((TypeError, ValueError), match=f"{wrong}.*{value}"):
                RestartPolicy(**{wrong: value})
    for name in ("Restart", True, 3, RestartPolicy):
        with pytest.raises(ValueError, match="on_worker_death must be"):
            RestartPolicy.of(name)  # type: ignore[arg-type]
    assert RestartPolicy.of("raise") is RestartPolicy.of(None) is None
    assert RestartPolicy.of("restart") == RestartPolicy()
    mine = replace(RestartPolicy(), max_restarts=3)
    assert RestartPolicy.of(mine) is mine


# -- tasks that run over -----------------------------------------------------------------------------


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


def test_a_stage_waits_no_longer_than_until_a_task_runs_over() -> None:
    clock, waits = FakeClock(), list[float | None]()
    script = [
        ready(0, 1),
        passing(clock, 3.0, *answer(0)),
        passing(clock, 6.5),
        answer(1, worker=1),
    ]
    it, backend = stage(script, workers=2, task_timeout=10, clock=clock)
    crew = backend.crews[0]
    wait = crew.wait

    def noted(timeout: float | None) -> Sequence[Event]:
        waits.append(timeout)
        return wait(timeout)

    crew.wait = noted  # type: ignore[method-assign]
    it.begin(iter([["a"], ["b"], ["c"]]))
    assert [next(it), next(it)] == ["value 0", "value 1"]
    assert waits == [START + 10, 10, 7, 0.5]


# -- words -------------------------------------------------------------------------------------------


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
    assert it.table.report().splitlines() == [
        "worker  where  pid     state  done  restarts     for  task",
        "------  -----  ---  --------  ----  --------  ------  -----",
        "0                -  starting     1         1  2.50 s  ['c']",
        "1                -      idle     2         0       -  -",
    ]
    for seconds, words in ((300.0, "5 min 2 s"), (7000.0, "2 h 1 min")):
        clock.now += seconds
        assert words in it.table.report()


KERNEL = "Likely cause: OOM."


@pytest.mark.parametrize(
    ("cause", "known", "words", "never"),
    [
        ("SIGTERM (15)", {}, ["It was to fetch [7, 8]; [9]."], ["sample", "Native code", "slots"]),
        (
            "SIGABRT (6)",
            {"task": 0, "at": 1},
            ["It was at sample 1 of [7, 8]: 8.", "Native code"],
            [],
        ),
        ("SIGSEGV (11)", {"task": 9, "at": 1}, ["Native code"], ["sample"]),
        ("SIGFPE (8)", {"task": 0, "at": -1}, ["Native code"], ["sample"]),
        ("SIGILL (4)", {"slots": (1_000, 20_000)}, ["Its slots took 1,000 of 20,000 bytes."], []),
        ("SIGKILL (9)", {}, ["Likely the system ran out of memory"], []),
        ("SIGKILL (9)", {"memory": KERNEL}, [f"\n{KERNEL}"], ["Likely the system", "'threads'"]),
        ("SIGBUS (7)", {}, ["shared-memory mount"], []),
        ("SIGBUS (7)", {"memory": KERNEL}, [f"\n{KERNEL}"], ["shared-memory mount"]),
        ("SIGSEGV (11)", {"evidence": "Fatal\n  File\n"}, ["\nFatal\n  File\n"], []),
    ],
)
def test_a_death_is_told_with_what_is_known_and_no_guess_beside_it(
    cause: str, known: dict[str, Any], words: list[str], never: list[str]
) -> None:
    cause = f"was killed by signal {cause}"
    it, _ = stage([ready(), [Exited(0, cause, **known)]], policy=None)
    it.begin(iter([[7, 8], [9]]))
    with pytest.raises(WorkerDied) as caught:
        next(it)
    told = str(caught.value).partition("\nworker ")[0] + "\n"  # without the table
    assert told.startswith(f"In stage 'scripted', worker 0 {cause}. It was to fetch")
    assert [word for word in words if word not in told] == []
    assert [word for word in never if word in told] == []


def test_what_kills_the_reader_of_a_shard_can_not_be_passed_over() -> None:
    script = [[*ready(), dead(task=0, at=0)], [*ready(), dead(task=0, at=0)]]
    it, _ = stage(script, in_turn=True)
    it.begin(iter([[None]]))
    with pytest.raises(WorkerDied, match="2 workers died at this position of their shard"):
        next(it)


def test_a_stage_whose_epoch_could_not_begin_with_all_workers_is_closed() -> None:
    """Else the next epoch would wait for a worker that nobody starts."""
    script = [[*ready(0, 1), Exhausted(1, 1), dead(1), *answer(0)], [Exhausted(0, 2)]]
    it, backend = stage(script, workers=2, lookahead=2, persistent=True, in_turn=True)
    it.begin(iter([[None]] * 3))
    assert list(it) == ["value 0"]

    def refuse(worker: int, spec: WorkerSpec) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    backend.crews[0].start = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="temporarily unavailable"):
        it.begin(iter([[None]] * 2))
    assert it.closed
    assert backend.crews[0].closed
