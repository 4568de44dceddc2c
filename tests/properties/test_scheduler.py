"""The scheduler alone: no thread, no clock, no worker."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.platforms import REPOSITORY

from hybridloader.engine import ByReference, Done, Exhausted, Exited, Failed, Failure
from hybridloader.engine.scheduler import (
    ACTIVE,
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


def test_a_move_that_no_table_has_is_refused_with_state_and_event() -> None:
    for state, event in itertools.product(RunState, sorted({event for _, event in RUN_TABLE})):
        if (state, event) not in RUN_TABLE:
            with pytest.raises(IllegalTransition, match=f"{state.value}.*{event}"):
                run_after(state, event)
    for place, event in itertools.product(WorkerState, sorted({event for _, event in WORK_TABLE})):
        if (place, event) not in WORK_TABLE:
            with pytest.raises(IllegalTransition, match=f"worker 0 is {place.value}.*{event}"):
                worker_after(0, place, event)


@pytest.mark.parametrize("size", [(0, 1), (1, 0)])
def test_a_scheduler_has_a_worker_and_room_for_a_task(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {size[0]} and {size[1]}"):
        Scheduler(*size)


def test_illegal_calls_raise_and_leave_everything_as_it_was() -> None:
    scheduler = Scheduler(2, 2)
    scheduler.begin()
    seq, worker = assign(scheduler)
    scheduler.stop(1 - worker)
    for wrong in (
        lambda: scheduler.assign(1 - worker),
        lambda: scheduler.take_in([done(1 - worker, seq)]),
        lambda: scheduler.take_in([done(worker, seq + 1)]),
    ):
        before = repr(vars(scheduler))
        with pytest.raises(IllegalTransition):
            wrong()
        assert repr(vars(scheduler)) == before


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
        scheduler.ready(worker)
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
            failed = Failed(worker, seq, Failure(ValueError()))
            assert not scheduler.take_in([failed if move == "failed" else done(worker, seq)])
        elif move == "exhausted":
            worker = data.draw(st.sampled_from(busy), "worker")
            seq = queues[worker][0]
            if scheduler.workers[worker] is WorkerState.STARTING:
                scheduler.ready(worker)
            assert scheduler.end_shard(Exhausted(worker, seq)) is not None
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
                    scheduler.ready(worker)
        elif move == "late":
            assert scheduler.take_in([done(0, stale.pop())])
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
            scheduler.exited(Exited(worker))
    assert scheduler.run is RunState.CLOSED


def test_the_tables_on_the_page_of_design_are_those_of_the_scheduler() -> None:
    page = (REPOSITORY / "docs" / "design.md").read_text()
    for name, table in (("run", RUN_TABLE), ("worker", WORK_TABLE)):
        found: dict[tuple[str, str], str] = {}
        lines = iter(page.splitlines())
        head = next(line for line in lines if line.startswith(f"| {name} | "))
        events = [cell.strip() for cell in head.strip("|").split("|")][1:]
        next(lines)
        for line in lines:
            if not line.startswith("|"):
                break
            state, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found |= {(state, e): c for e, c in zip(events, cells, strict=True) if c}
        assert found == {(state.value, e): to.value for (state, e), to in table.items()}
