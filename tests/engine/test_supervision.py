"""Workers that die, and their replacement: scripted, on a clock that tests set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.supervised import answer, dead, passing, ready, stage, tasks, watch_specs

from hybridloader.engine.messages import Begin, Exhausted, GivenUp, PartlyGivenUp, Task, WorkerSpec
from hybridloader.engine.stage import RestartPolicy
from hybridloader.errors import WorkerDied, WorkerPicklingError
from hybridloader.testing import FakeClock


def test_a_new_worker_is_sent_again_just_what_the_dead_one_had() -> None:
    script = [
        ready(0, 1),
        answer(1, worker=1),
        [dead(1)],
        [*ready(1), *answer(0), *answer(3, worker=1), *answer(2)],
    ]
    it, backend = stage(script, workers=2)
    it.begin(iter([["a"], ["b"], ["c"], ["d"]]))
    assert list(it) == [f"value {seq}" for seq in range(4)]
    assert backend.crews[0].started == [0, 1, 1]
    assert tasks(backend) == [(0, 0), (1, 1), (0, 2), (1, 3), (1, 3)]


def test_a_worker_that_dies_while_it_starts_is_replaced_too() -> None:
    script = [ready(0), [dead(1)], [dead(1)], [*ready(1), *answer(0), *answer(1, worker=1)]]
    it, backend = stage(script, workers=2, lookahead=2)
    it.begin(iter([["a"], ["b"]]))
    assert list(it) == ["value 0", "value 1"]
    assert backend.crews[0].started == [0, 1, 1, 1]


def test_the_first_workers_are_replaced_as_well_and_no_sample_is_blamed() -> None:
    script = [[dead()], [dead()], [dead()], [*ready(), *answer(0)]]
    it, backend = stage(script)
    it.begin(iter([["a"]]))
    assert list(it) == ["value 0"]
    assert backend.crews[0].started == [0] * 4
    sent = [message for _, message in backend.crews[0].sent if isinstance(message, Task)]
    assert sent == [Task(0, ["a"])] * 4


def test_where_no_worker_ever_gets_ready_the_error_says_so_in_the_end() -> None:
    it, backend = stage([[dead()]] * 4, policy=RestartPolicy(max_restarts=3))
    it.begin(iter([["a"]]))
    with pytest.raises(WorkerDied, match=r"3 workers .* None of them ever became ready"):
        next(it)
    assert backend.crews[0].started == [0] * 4


def test_without_a_policy_a_death_is_raised() -> None:
    it, backend = stage([ready(), [dead()]], policy=None)
    it.begin(iter([["a"]]))
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        next(it)
    assert backend.crews[0].started == [0]
    assert "was not restarted" not in str(caught.value)


def test_workers_that_end_with_one_process_count_as_one_restart() -> None:
    workers = 16
    everyone = range(workers)

    def all_die(with_it: str) -> list[Any]:
        return [dead(worker, at=-1, with_it=with_it) for worker in everyone]

    answers = [event for seq in everyone for event in answer(seq, worker=seq)]
    script = [
        ready(*everyone),
        all_die("process 1"),
        all_die("process 2"),
        ready(*everyone),
        answers,
    ]
    policy = RestartPolicy(max_restarts=2)
    it, backend = stage(script, workers=workers, lookahead=workers, policy=policy)
    it.begin(iter([[seq] for seq in everyone]))
    assert list(it) == [f"value {seq}" for seq in everyone]
    assert len(backend.crews[0].started) == 3 * workers

    it, _ = stage(script[:3], workers=workers, policy=RestartPolicy(max_restarts=1))
    it.begin(iter([[seq] for seq in everyone]))
    with pytest.raises(WorkerDied, match="1 workers of this stage were restarted"):
        next(it)


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


def test_a_sample_that_kills_its_workers_is_given_up_and_named() -> None:
    script = [
        ready(),
        [dead(task=0, at=1)],
        ready(),
        [dead(task=0, at=1)],
        [*ready(), *answer(0, 1)],
    ]
    it, backend = stage(script)
    it.begin(iter([[7, 8, 9], [10]]))
    assert list(it) == ["value 0", "value 1"]
    sent = [message for _, message in backend.crews[0].sent if isinstance(message, Task)]
    assert [task.seq for task in sent] == [0, 1, 0, 1, 0, 1]
    assert [task.index for task in sent[:4]] == [[7, 8, 9], [10], [7, 8, 9], [10]]
    spared = sent[4].index
    assert type(spared) is PartlyGivenUp
    assert (spared[0], spared[2]) == (7, 9)
    assert type(spared[1]) is GivenUp
    assert spared[1].index == 8
    assert "2 workers died at this sample" in spared[1].text
    assert "SIGKILL" in spared[1].text
    assert sent[5].index == [10]


def test_two_samples_of_one_task_can_be_given_up() -> None:
    deaths = [[*ready(), dead(task=0, at=at)] for at in (0, 0, 2, 2)]
    it, backend = stage([*deaths, [*ready(), *answer(0)]])
    it.begin(iter([[7, 8, 9]]))
    assert next(it) == "value 0"
    *_, last = [message for _, message in backend.crews[0].sent if isinstance(message, Task)]
    assert [type(index) is GivenUp for index in last.index] == [True, False, True]


def test_where_it_is_not_known_which_sample_kills_the_whole_task_is_given_up() -> None:
    script = [[*ready(), dead()], [*ready(), dead()], [*ready(), *answer(0, 1)]]
    it, backend = stage(script)
    it.begin(iter([[7, 8], [9]]))
    assert list(it) == ["value 0", "value 1"]
    last, other = [m for _, m in backend.crews[0].sent if isinstance(m, Task)][-2:]
    assert [index.index for index in last.index] == [7, 8]
    assert "at a task that contains this sample" in last.index[0].text
    assert other.index == [9]


def test_an_index_that_is_one_sample_is_given_up_itself() -> None:
    script = [[*ready(), dead()], [*ready(), dead()], [*ready(), *answer(0)]]
    it, backend = stage(script, batched=False)
    it.begin(iter(["a"]))
    assert next(it) == "value 0"
    last = [m for _, m in backend.crews[0].sent if isinstance(m, Task)][-1]
    assert type(last.index) is GivenUp
    assert last.index.index == "a"


@pytest.mark.parametrize("known", [{"task": None, "at": -1}, {"task": 5, "at": 0}])
def test_nobody_is_blamed_for_a_death_between_two_samples_or_at_a_task_that_is_done(
    known: dict[str, Any],
) -> None:
    deaths = [[*ready(), dead(**known)] for _ in range(5)]
    it, backend = stage([*deaths, [*ready(), *answer(0)]])
    it.begin(iter([[7, 8]]))
    assert next(it) == "value 0"
    assert {tuple(m.index) for _, m in backend.crews[0].sent if isinstance(m, Task)} == {(7, 8)}


def test_blame_is_forgotten_with_the_epoch() -> None:
    script = [[*ready(), dead(task=0, at=0)], [*ready(), *answer(0)]]
    script += [[dead(task=1, at=0)], [*ready(), *answer(1)]]
    it, backend = stage(script, persistent=True)
    for seq in range(2):
        it.begin(iter([[7]]))
        assert list(it) == [f"value {seq}"]
    assert all(m.index == [7] for _, m in backend.crews[0].sent if isinstance(m, Task))


def test_a_shard_goes_on_behind_what_was_delivered() -> None:
    script = [
        ready(),
        answer(0, position=3),
        [dead()],
        [*ready(), *answer(1, position=6)],
        answer(2),
    ]
    it, backend = stage(script, in_turn=True, lookahead=3)
    specs = watch_specs(backend)
    it.begin(iter([[None]] * 3))
    assert list(it) == ["value 0", "value 1", "value 2"]
    assert [spec.skip for spec in specs] == [3]


def test_a_new_epoch_reads_the_shard_from_its_beginning_and_tells_its_seed() -> None:
    script = [
        ready(),
        answer(0, position=3),
        [dead()],
        [*ready(), *answer(1, position=6)],
        [dead()],
        [*ready(), *answer(2, position=3)],
    ]
    it, backend = stage(script, in_turn=True, persistent=True, lookahead=2)
    specs = watch_specs(backend)
    it.begin(iter([[None]] * 2), 11)
    assert list(it) == ["value 0", "value 1"]
    it.begin(iter([[None]]), 22)
    assert list(it) == ["value 2"]
    assert [(spec.skip, spec.shared_seed) for spec in specs] == [(3, 11), (0, 22)]


def test_what_kills_the_reader_of_a_shard_can_not_be_passed_over() -> None:
    script = [[*ready(), dead(task=0, at=0)], [*ready(), dead(task=0, at=0)]]
    it, _ = stage(script, in_turn=True)
    it.begin(iter([[None]]))
    with pytest.raises(WorkerDied, match="2 workers died at this position of their shard"):
        next(it)


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


@pytest.mark.parametrize(
    "error",
    [OSError(11, "Resource temporarily unavailable"), RuntimeError("can't start new thread")],
    ids=lambda error: type(error).__name__,
)
def test_that_no_other_worker_can_be_had_is_told_with_the_death(error: Exception) -> None:
    it, backend = stage([[*ready(), dead()]])
    it.begin(iter([["a"]]))

    def refuse(worker: int, spec: WorkerSpec) -> None:
        raise error

    backend.crews[0].start = refuse  # type: ignore[method-assign]
    with pytest.raises(WorkerDied, match=rf"could not be restarted: .*{error.args[-1]}"):
        next(it)
    assert backend.crews[0].closed


def test_that_nothing_can_be_sent_to_the_other_worker_is_told_with_the_death() -> None:
    """Otherwise the stage would wait forever for a task that no worker does."""
    it, backend = stage([[*ready(), dead()]])
    it.begin(iter([["a"]]))

    def refuse(worker: int, message: Any) -> None:
        raise MemoryError("no room for a copy")

    backend.crews[0].send = refuse  # type: ignore[method-assign]
    with pytest.raises(WorkerDied, match="sent to the restarted worker: no room for a copy"):
        next(it)
    assert backend.crews[0].closed


def test_a_dataset_that_can_not_be_shipped_again_ends_it_as_well() -> None:
    it, backend = stage([[*ready(), dead()]])
    it.begin(iter([["a"]]))

    def refuse(worker: int, spec: WorkerSpec) -> None:
        raise WorkerPicklingError("the dataset.handle can't be pickled")

    backend.crews[0].start = refuse  # type: ignore[method-assign]
    with pytest.raises(WorkerDied, match=r"the dataset\.handle can't be pickled"):
        next(it)


def test_an_interrupted_stage_replaces_nobody() -> None:
    it, backend = stage([lambda crew: it.close() or [dead()]])  # type: ignore[func-returns-value]
    it.begin(iter([["a"]]))
    with pytest.raises(Exception, match="closed"):
        next(it)
    assert backend.crews[0].started == [0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_restarts": 0}, "max_restarts.*0"),
        ({"max_restarts": True}, "max_restarts.*True"),
        ({"max_restarts": 1.5}, "max_restarts.*1.5"),
        ({"window_seconds": 0}, "window_seconds.*0"),
        ({"window_seconds": float("nan")}, "window_seconds.*nan"),
        ({"window_seconds": "60"}, "window_seconds.*'60'"),
        ({"deaths_per_sample": 0}, "deaths_per_sample.*0"),
    ],
)
def test_a_policy_refuses_what_is_no_number_or_too_small(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        RestartPolicy(**wrong)


@pytest.mark.parametrize("wrong", ["Restart", True, 3, RestartPolicy])
def test_what_names_no_policy_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="on_worker_death must be"):
        RestartPolicy.of(wrong)


def test_the_names_of_policies() -> None:
    assert RestartPolicy.of("raise") is None
    assert RestartPolicy.of(None) is None
    assert RestartPolicy.of("restart") == RestartPolicy()
    mine = replace(RestartPolicy(), max_restarts=3)
    assert RestartPolicy.of(mine) is mine


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
