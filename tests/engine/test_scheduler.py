"""The scheduler alone: no thread, no clock, no worker."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridloader._support.user_objects import Failure
from hybridloader.engine.messages import ByReference, Done, Exhausted, Exited, Failed, Ready
from hybridloader.engine.scheduler import (
    ACTIVE,
    FADE,
    RUN_TABLE,
    WORK_TABLE,
    RunState,
    Scheduler,
    WorkerState,
    least_busy,
    round_robin,
    round_robin_with_room,
    run_after,
    worker_after,
)
from hybridloader.errors import IllegalTransition

RUN_EVENTS = sorted({event for _, event in RUN_TABLE})
WORK_EVENTS = sorted({event for _, event in WORK_TABLE})


def done(worker: int, seq: int) -> Done:
    return Done(worker, seq, ByReference(seq))


def assign(scheduler: Scheduler) -> tuple[int, int]:
    """Give the next task to whom the scheduler's rule says: its number, and the worker."""
    worker = scheduler.dispatch(scheduler)
    assert worker is not None
    return scheduler.assign(worker), worker


def wants_a_task(scheduler: Scheduler) -> bool:
    return scheduler.free > 0 and scheduler.dispatch(scheduler) is not None


def head_is_late(scheduler: Scheduler) -> bool:
    """True if the oldest task that can still come out has no result."""
    return min(scheduler.sent, default=1 << 62) < min(scheduler.done, default=1 << 61)


def snapshot(scheduler: Scheduler) -> str:
    return repr(vars(scheduler))


def test_it_imports_nothing_that_waits_or_computes() -> None:
    code = (
        "import sys; before = set(sys.modules); import hybridloader.engine.scheduler; "
        "new = set(sys.modules) - before; "
        "print([m for m in ('threading', 'time', 'multiprocessing', 'torch', 'numpy') if m in new])"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", "import site; site.main()\n" + code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RunState, RUN_EVENTS)))
def test_a_run_moves_as_its_table_says_and_an_illegal_move_changes_nothing(
    state: RunState, event: str
) -> None:
    target = RUN_TABLE.get((state, event))
    if target is None:
        with pytest.raises(IllegalTransition, match=f"{state.value}.*{event}"):
            run_after(state, event)
    else:
        assert run_after(state, event) is target


@pytest.mark.parametrize(("state", "event"), list(itertools.product(WorkerState, WORK_EVENTS)))
def test_a_worker_moves_as_its_table_says(state: WorkerState, event: str) -> None:
    target = WORK_TABLE.get((state, event))
    if target is None:
        with pytest.raises(IllegalTransition, match=f"worker 0 is {state.value}.*{event}"):
            worker_after(0, state, event)
    else:
        assert worker_after(0, state, event) is target


def test_illegal_calls_raise_and_leave_everything_as_it_was() -> None:
    scheduler = Scheduler(2, 2)
    illegal = [
        lambda: scheduler.assign(0),
        scheduler.source_ended,
        lambda: scheduler.handle(done(0, 0)),
        lambda: scheduler.handle(Exhausted(0, 0)),
    ]
    for call in illegal:
        before = snapshot(scheduler)
        with pytest.raises(IllegalTransition):
            call()
        assert snapshot(scheduler) == before
    scheduler.begin()
    seq, worker = assign(scheduler)
    scheduler.handle(Ready(worker))
    for wrong in (done(1 - worker, seq), done(worker, seq + 1), Ready(worker)):
        before = snapshot(scheduler)
        with pytest.raises(IllegalTransition):
            scheduler.handle(wrong)
        assert snapshot(scheduler) == before


def test_begin_is_refused_whole_when_one_worker_is_gone() -> None:
    scheduler = Scheduler(2, 2)
    scheduler.begin()
    for worker in range(2):
        scheduler.handle(Ready(worker))
    scheduler.stop(1)
    scheduler.handle(Exited(1))
    before = snapshot(scheduler)
    with pytest.raises(IllegalTransition, match="worker 1 is GONE"):
        scheduler.begin()
    assert snapshot(scheduler) == before


def test_tasks_go_round_the_workers_and_no_further_than_the_window() -> None:
    scheduler = Scheduler(3, 6)
    scheduler.begin()
    assigned = []
    while scheduler.free:
        assigned.append(assign(scheduler))
    assert assigned == [(seq, seq % 3) for seq in range(6)]
    before = snapshot(scheduler)
    with pytest.raises(IllegalTransition):
        scheduler.assign(0)
    assert snapshot(scheduler) == before


def test_an_epoch_begins_again_with_the_first_worker() -> None:
    scheduler = Scheduler(3, 4)
    for _ in range(2):
        scheduler.begin()
        assert assign(scheduler)[1] == 0


def test_an_exhausted_worker_is_passed_over_and_its_tasks_are_counted_as_skipped() -> None:
    scheduler = Scheduler(2, 4)
    scheduler.begin()
    for _ in range(4):
        assign(scheduler)
    for worker in range(2):
        scheduler.handle(Ready(worker))
    scheduler.handle(Exhausted(0, 0))
    assert scheduler.skipped == 2  # tasks 0 and 2
    with pytest.raises(IllegalTransition, match="worker 0 can take no task"):
        scheduler.assign(0)
    assert [assign(scheduler)[1] for _ in range(2)] == [1, 1]
    scheduler.handle(done(1, 1))
    result = scheduler.pop()
    assert result is not None
    assert result.seq == 1
    scheduler.handle(Exhausted(1, 3))
    assert scheduler.drain()
    assert scheduler.run is RunState.IDLE


def test_without_order_results_come_as_they_arrive() -> None:
    scheduler = Scheduler(2, 4, ordered=False, dispatch=round_robin_with_room)
    scheduler.begin()
    for _ in range(4):
        assign(scheduler)
    popped = []
    for seq in (3, 1, 0, 2):
        scheduler.handle(done(seq % 2, seq))
        result = scheduler.pop()
        assert result is not None
        popped.append(result.seq)
    assert popped == [3, 1, 0, 2]


def active(scheduler: Scheduler) -> bytearray:
    return bytearray(state in ACTIVE for state in scheduler.workers)


def placed(
    states: list[WorkerState], load: list[int], last: int, busy: list[int] | None = None
) -> Scheduler:
    """A scheduler with a window of 4 in the middle of a run."""
    scheduler = Scheduler(len(states), 4)
    scheduler.workers, scheduler.load, scheduler.last = states, load, last
    scheduler.active = active(scheduler)
    scheduler.busy = load if busy is None else busy
    return scheduler


def test_without_order_a_worker_gets_no_more_than_its_share() -> None:
    states = [WorkerState.READY, WorkerState.READY]
    assert round_robin_with_room(placed(states, [2, 1], 1)) == 1
    assert round_robin_with_room(placed(states, [2, 2], 1)) is None
    assert round_robin(placed(states, [2, 2], 1)) == 0
    assert round_robin(placed([WorkerState.READY, WorkerState.EXHAUSTED], [0, 0], 0)) == 0
    assert round_robin(placed([WorkerState.GONE, WorkerState.EXHAUSTED], [0, 0], 0)) is None


@pytest.mark.parametrize(
    ("busy", "last", "worker"),
    [
        ([0, 0, 0], 2, 0),  # in the circle while all are free
        ([0, 0, 0], 0, 1),
        ([1, 1, 0], 2, 2),  # a free one before one that has something to do
        ([1, 2, 1], 0, 2),
        ([2, 1, 2], 1, 1),
        ([2, 2, 2], 0, None),  # what more there is must not wait behind a slow task
    ],
)
def test_a_free_worker_takes_the_next_task(busy: list[int], last: int, worker: int | None) -> None:
    held = [5, 0, 9]  # what is done and not yet popped does not count
    assert least_busy(placed([WorkerState.READY] * 3, held, last, busy)) == worker


def test_a_free_worker_that_is_not_active_gets_nothing() -> None:
    states = [WorkerState.GONE, WorkerState.STARTING, WorkerState.EXHAUSTED]
    assert least_busy(placed(states, [0, 0, 0], 2, [0, 1, 0])) == 1
    assert least_busy(placed(states, [0, 2, 0], 2)) is None


def test_one_slow_task_leaves_the_rest_of_the_window_to_the_others() -> None:
    scheduler = Scheduler(2, 8, dispatch=least_busy)
    scheduler.begin()
    given = [assign(scheduler) for _ in range(4)]
    assert [worker for _, worker in given] == [0, 1, 0, 1]
    slow, mine = 0, [1, 3]
    while mine:  # worker 1 goes on for as long as the window has room
        scheduler.handle(done(1, mine.pop(0)))
        if wants_a_task(scheduler):
            seq, worker = assign(scheduler)
            assert worker == 1
            mine.append(seq)
    assert scheduler.pop() is None
    assert sorted(scheduler.sent) == [slow, 2]
    assert sorted(scheduler.done) == [1, 3, 4, 5, 6, 7]


def late_head(scheduler: Scheduler) -> int:
    """Assign to two workers, of which worker 0 is at task 0 for ever, until no task is wanted.

    Returns how many results wait.
    """
    mine: list[int] = []
    while True:
        while wants_a_task(scheduler):
            seq, worker = assign(scheduler)
            if worker == 1:
                mine.append(seq)
        if not mine:
            return len(scheduler.done)
        scheduler.handle(done(1, mine.pop(0)))


def test_behind_a_late_result_more_may_wait_than_the_window_has() -> None:
    scheduler = Scheduler(2, 4, dispatch=least_busy)
    scheduler.begin()
    assert not scheduler.stalled
    assert late_head(scheduler) == 2  # of four, two are worker 0's
    assert scheduler.stalled
    scheduler.widen(10)
    assert not scheduler.stalled
    assert late_head(scheduler) == 12
    assert sorted(scheduler.sent) == [0, 2]
    assert scheduler.stalled


def test_what_waits_gets_fewer_once_the_late_result_has_come_and_workers_go_on_meanwhile() -> None:
    scheduler = Scheduler(2, 4, dispatch=least_busy)
    scheduler.begin()
    late_head(scheduler)
    scheduler.widen(20)
    late_head(scheduler)
    scheduler.handle(done(0, 0))
    assert (scheduler.extra, scheduler.free) == (20, 0), "nothing more before something is taken"
    scheduler.widen(40)
    assert scheduler.extra == 20, "none is late"
    given, most = 0, 24
    for taken in range(1, 101):  # a slow consumer: all is done whenever it asks
        assert scheduler.pop() is not None
        while wants_a_task(scheduler):
            seq, worker = assign(scheduler)
            scheduler.handle(done(worker, seq))
            given += 1
        for seq, worker in list(scheduler.sent.items()):
            scheduler.handle(done(worker, seq))
        most = min(most, max(4, 24 - taken // FADE))
        assert len(scheduler.sent) + len(scheduler.done) <= most + 1
    assert scheduler.extra == 0
    assert given == 80


def test_nothing_waits_besides_the_window_in_the_next_epoch_or_without_order() -> None:
    scheduler = Scheduler(2, 4, dispatch=least_busy)
    scheduler.begin()
    late_head(scheduler)
    scheduler.widen(10)
    scheduler.begin()
    assert (scheduler.extra, scheduler.free) == (0, 4)
    unordered = Scheduler(2, 4, ordered=False, dispatch=least_busy)
    unordered.begin()
    late_head(unordered)
    unordered.widen(10)
    assert unordered.extra == 0
    assert not unordered.stalled


def test_a_worker_has_as_many_tasks_in_flight_as_its_rule_allows() -> None:
    scheduler = Scheduler(2, 6, dispatch=functools.partial(least_busy, in_flight=3))
    scheduler.begin()
    assert [assign(scheduler)[1] for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    assert scheduler.dispatch(scheduler) is None


def test_a_worker_that_exits_unasked_is_a_fault_that_names_what_it_held() -> None:
    scheduler = Scheduler(2, 4)
    scheduler.begin()
    for _ in range(4):
        assign(scheduler)
    scheduler.handle(done(1, 1))
    scheduler.handle(Exited(1, "was killed"))
    assert scheduler.fault == (1, "was killed", (3,), Exited(1, "was killed"))
    assert scheduler.run is RunState.CLOSING
    assert not scheduler.handle(done(0, 0))  # stale: to be discarded
    scheduler.close()
    scheduler.handle(Exited(0))
    assert scheduler.run is RunState.CLOSED
    assert scheduler.close() == []


def test_a_worker_that_is_replaced_keeps_its_tasks_under_their_numbers() -> None:
    scheduler = Scheduler(2, 4)
    scheduler.begin()
    for _ in range(4):
        assign(scheduler)
    for worker in range(2):
        scheduler.handle(Ready(worker))
    assert scheduler.replace(1) == [1, 3]
    assert scheduler.workers == [WorkerState.READY, WorkerState.STARTING]
    assert scheduler.held(1) == [1, 3]
    assert scheduler.handle(done(1, 1))
    scheduler.handle(Ready(1))
    assert scheduler.fault is None


def test_a_worker_that_dies_at_the_end_of_its_shard_is_replaced_when_the_next_epoch_begins() -> (
    None
):
    scheduler = Scheduler(2, 2)
    scheduler.begin()
    for worker in range(2):
        assign(scheduler)
        scheduler.handle(Ready(worker))
    scheduler.handle(Exhausted(1, 1))
    assert scheduler.replace(1) == []
    assert scheduler.workers[1] is WorkerState.ABSENT
    assert round_robin(scheduler) == 0
    scheduler.begin()
    assert scheduler.workers[1] is WorkerState.STARTING


@pytest.mark.parametrize("state", [WorkerState.ABSENT, WorkerState.STOPPING, WorkerState.GONE])
def test_who_is_gone_or_told_to_go_is_not_replaced(state: WorkerState) -> None:
    scheduler = Scheduler(1, 1)
    scheduler.workers[0] = state
    before = snapshot(scheduler)
    with pytest.raises(IllegalTransition, match="replaced"):
        scheduler.replace(0)
    assert snapshot(scheduler) == before


# -- the property: what goes in comes out exactly once -----------------------------------------


@given(data=st.data(), workers=st.integers(1, 4), window=st.integers(1, 8), ordered=st.booleans())
def test_every_sequence_number_comes_out_exactly_once(
    data: st.DataObject, workers: int, window: int, ordered: bool
) -> None:
    """Any order of completion, failures, ends of shards, deaths, epochs and a close, in any mixture.

    More may wait than the window has, at most as many as `widen` said, and only behind a late result.
    """
    rules = [least_busy, round_robin if ordered else round_robin_with_room]
    dispatch = data.draw(st.sampled_from(rules))
    scheduler = Scheduler(workers, window, ordered=ordered, dispatch=dispatch)
    for worker in range(workers):
        scheduler.handle(Ready(worker))
    queues: list[list[int]] = [[] for _ in range(workers)]
    ended: set[int] = set()
    popped: list[int] = []
    stale: list[int] = []
    discarded = widest = 0

    def begin() -> None:
        nonlocal discarded, widest
        widest = 0
        discarded += len(scheduler.begin())
        for queue in queues:
            stale.extend(queue)
            queue.clear()
        ended.clear()

    begin()
    for _ in range(data.draw(st.integers(0, 60), "steps")):
        moves = ["pop", "begin"]
        if wants_a_task(scheduler):
            moves += ["assign"] * 4 + ["source_ended"]
        busy = [w for w in range(workers) if queues[w]]
        moves += ["done"] * 4 * bool(busy) + ["failed", "exhausted"] * bool(busy)
        moves += ["late"] * bool(stale) + ["replace", "widen"]
        move = data.draw(st.sampled_from(moves), "move")
        late, extra, free = head_is_late(scheduler), scheduler.extra, scheduler.free
        if move == "assign":
            seq, worker = assign(scheduler)
            assert worker not in ended
            queues[worker].append(seq)
        elif move in ("done", "failed"):
            worker = data.draw(st.sampled_from(busy), "worker")
            seq = queues[worker].pop(0)
            event = done(worker, seq)
            if move == "failed":
                assert scheduler.handle(Failed(worker, seq, Failure(ValueError())))
            else:
                assert scheduler.handle(event)
        elif move == "exhausted":
            worker = data.draw(st.sampled_from(busy), "worker")
            seq = queues[worker][0]
            if scheduler.workers[worker] is WorkerState.STARTING:
                scheduler.handle(Ready(worker))
            assert scheduler.handle(Exhausted(worker, seq))
            queues[worker].clear()
            ended.add(worker)
        elif move == "replace":
            worker = data.draw(st.integers(0, workers - 1), "worker")
            if scheduler.workers[worker] is WorkerState.ABSENT:
                continue
            assert scheduler.replace(worker) == queues[worker]
            if worker not in ended:
                assert scheduler.workers[worker] is WorkerState.STARTING
                if data.draw(st.booleans(), "ready"):
                    scheduler.handle(Ready(worker))
        elif move == "late":
            assert not scheduler.handle(done(0, stale.pop()))
        elif move == "source_ended":
            scheduler.source_ended()
        elif move == "begin":
            begin()
        elif move == "widen":
            scheduler.widen(data.draw(st.integers(0, 6), "extra"))
            if ordered and late:
                widest = max(widest, scheduler.extra)
            else:
                assert (scheduler.extra, scheduler.free) == (extra, free)
        else:
            result = scheduler.pop()
            if result is not None:
                popped.append(result.seq)
        assert len(scheduler.sent) <= window
        held = len(scheduler.sent) + len(scheduler.done)
        assert held <= window + widest
        room = min(window + scheduler.extra - held, window - len(scheduler.sent))
        assert scheduler.free == (room if scheduler.run is RunState.RUNNING else 0)
        if move != "widen":
            assert scheduler.extra <= extra
        if not head_is_late(scheduler):
            assert scheduler.extra <= max(0, held - window) or not late
        assert not scheduler.sent.keys() & scheduler.done.keys()
        assert scheduler.active == active(scheduler)
        assert scheduler.busy == [
            sum(w == worker for w in scheduler.sent.values()) for worker in range(workers)
        ]
        assert scheduler.load == [
            sum(w == worker for w in scheduler.sent.values())
            + sum(r.worker == worker for r in scheduler.done.values())
            for worker in range(workers)
        ]
        if scheduler.drain():
            begin()
    scheduler.close()
    assert len(popped) == len(set(popped))
    if ordered:
        assert popped == sorted(popped)
    assert len(popped) + scheduler.skipped + scheduler.abandoned == scheduler.next_in
    for worker in range(workers):
        if scheduler.workers[worker] is not WorkerState.GONE:  # it was absent
            scheduler.handle(Exited(worker))
    assert scheduler.run is RunState.CLOSED


@given(order=st.permutations(range(12)), workers=st.integers(1, 3))
def test_any_order_of_completion_gives_the_order_of_assignment(
    order: list[int], workers: int
) -> None:
    scheduler = Scheduler(workers, 12)
    scheduler.begin()
    owner = dict(assign(scheduler) for _ in range(12))
    scheduler.source_ended()
    popped = []
    for seq in order:
        scheduler.handle(done(owner[seq], seq))
        while (result := scheduler.pop()) is not None:
            popped.append(result.seq)
    assert popped == list(range(12))
    assert scheduler.drain()
