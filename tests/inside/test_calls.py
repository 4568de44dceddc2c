"""Calls of a worker far away: reported in their order, the end last; short tasks go together."""

from __future__ import annotations

import os
import pickle
import platform
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hybridloader import engine
from hybridloader.engine import Pickled, PrivateSlots, calls, parts_of, work_of
from hybridloader.engine.calls import BUNDLE_BYTES, BUNDLE_SECONDS, Parts
from hybridloader.engine.meter import MEASURES, Measures, SliceReport
from hybridloader.testing import Call


class Handle(engine.CallingHandle):
    """Its calls are answered by the test."""

    gone = False

    def __init__(self, *, alone: bool = False) -> None:
        self.events: list[engine.Event] = []
        super().__init__(3, self.events.append, alone=alone)
        self.sent: list[list[Any]] = []
        self.returns: list[tuple[Any, ...]] = []
        self.calls: list[tuple[str, Future[Any]]] = []
        self.starts: list[int] = []
        self.ended = threading.Event()
        self.begin()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if self.gone:
            raise OSError("no connection")
        future: Future[Any] = Future()
        self.calls.append((method, future))
        if method == "step":
            sent, *returns = arguments
            self.sent.append([engine.loads(*parts) for parts, _ in sent if len(parts) == 1])
            self.returns.append(([place for _, place in sent], *returns))
        return future

    def started(self) -> None:
        self.starts.append(len(self.events))

    def end(self) -> None:
        self.ended_by = threading.current_thread()
        self.ended.set()

    def answer(self, number: int, *events: engine.Event) -> None:
        self.steps()[number].set_result(sent([parts_of(event) for event in events]))

    def steps(self) -> list[Future[Any]]:
        return [future for method, future in self.calls if method == "step"]

    def life(self) -> Future[Any]:
        return next(future for method, future in self.calls if method == "run")


def echo(index: Any) -> Any:
    return index


TASK = engine.Task(0, [0])


def sent(events: list[Parts]) -> list[Parts]:
    """Send events as a transport does that delivers memory which is read-only."""
    buffers: list[Any] = []
    data = pickle.dumps(events, 5, buffer_callback=buffers.append)
    found: list[Parts] = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    return found


def done(seq: int, value: Any = None, seconds: float = 1.0) -> engine.Done:
    return engine.Done(3, seq, Pickled(value), seconds)


def numbers(events: list[Any]) -> list[Any]:
    return [event.seq if isinstance(event, engine.Done) else type(event) for event in events]


def test_results_that_come_early_wait_for_those_before_them_and_the_exit_for_all() -> None:
    handle = Handle()
    for _ in range(3):
        handle.send(TASK)
    handle.answer(0, engine.Ready(3))
    handle.answer(2, done(11))
    handle.life().set_result(engine.dumps(engine.Exited(3)))
    assert numbers(handle.events) == [engine.Ready]
    handle.answer(1, done(10))
    assert numbers(handle.events) == [engine.Ready, 10, 11]
    assert handle.starts == [0]  # what it needed to start is let go of once, before its first event
    assert handle.is_alive()
    handle.steps()[3].set_exception(OSError("gone"))
    assert numbers(handle.events) == [engine.Ready, 10, 11, engine.Exited]
    assert not handle.is_alive()
    assert handle.exitcode == 0
    handle.send(TASK)
    assert len(handle.steps()) == 4


@pytest.mark.parametrize("called", [True, False])
def test_a_worker_that_lives_and_can_not_be_called_or_not_answer_is_killed_and_told_of(
    called: bool,
) -> None:
    handle = Handle()
    handle.answer(0, engine.Ready(3))
    handle.send(TASK)
    handle.send(TASK)
    if called:
        handle.steps()[1].set_exception(OSError("the store is full"))
    else:
        handle.answer(1, done(10))
        handle.gone = True
        handle.send(TASK)
    assert handle.ended.wait(60)
    handle.send(TASK)
    assert len(handle.steps()) == 3, "a worker that is to be killed is sent nothing"
    handle.answer(2, done(11))
    handle.life().set_exception(RuntimeError("killed"))
    *_, last, exited = handle.events
    assert isinstance(last, engine.Done)
    assert isinstance(exited, engine.Exited)
    assert exited.cause is not None
    words = "store is full" if called else "could not be called: OSError('no connection')"
    assert words in exited.cause
    assert handle.exitcode == 1


def test_a_worker_of_which_nothing_will_be_heard_is_told_of_once() -> None:
    handle = Handle()
    handle.answer(0, engine.Ready(3))
    handle.send(TASK)
    handle.join(0)
    assert handle.is_alive()
    handle.lost("the cluster is gone")
    handle.answer(1, done(0))
    handle.life().set_exception(RuntimeError("killed"))
    assert handle.events == [engine.Ready(3), engine.Exited(3, "the cluster is gone")]
    assert handle.exitcode == 1
    made = len(handle.calls)
    handle.leave()
    assert len(handle.calls) == made, "who has ended is not asked to leave"


def test_the_thread_that_is_told_of_ends_waits_for_none_and_kills_on_another() -> None:
    """A finalizer that comes on it would wait for what that thread alone can tell."""
    told = list[object]()

    def tell() -> None:
        handle.answer(0, engine.Ready(3))
        try:
            handle.join(60)
        except RuntimeError as error:
            told.append(error)
        handle.terminate()

    handle = Handle()
    teller = threading.Thread(target=tell)
    teller.start()
    teller.join(60)
    assert [type(error) for error in told] == [RuntimeError]
    assert handle.ended.wait(60)
    assert handle.ended_by is not teller
    handle.life().set_exception(RuntimeError("killed"))
    handle.join()


def test_what_arrives_read_only_is_copied_into_a_slot_and_may_be_written_to() -> None:
    handle, slots = Handle(), PrivateSlots(10 << 20)
    array = np.arange(1 << 18)
    handle.answer(0, done(0, [array, array[:10_000].copy()]))
    [event] = handle.events
    assert isinstance(event, engine.Done)
    payload: Any = event.payload
    assert payload.count == 2
    assert payload.nbytes > array.nbytes
    np.testing.assert_array_equal(payload.peek()[0], array)
    payload.slots = slots
    large, small = payload.open()
    assert slots.pool.size >= array.nbytes
    np.testing.assert_array_equal(large, array)
    large += 1
    small += 1
    assert payload.nbytes < 10_000
    del large
    slots.close()


# -- bundles ---------------------------------------------------------------------------------------


SHORT = BUNDLE_SECONDS / 100


def warm(handle: Handle, seconds: float = SHORT, value: Any = None, results: int = 50) -> None:
    """Have a worker answer so many tasks that its mean is known; it has nothing under way then."""
    handle.answer(0, engine.Ready(3))
    handle.send(engine.Task(0, [0]))
    handle.answer(1, *(done(seq, value, seconds) for seq in range(results)))
    handle.events.clear()
    handle.sent.clear()


def tasks(handle: Handle) -> list[list[Any]]:
    """Numbers of the tasks, or types of the other messages, in each call that was made."""
    return [
        [message.seq if isinstance(message, engine.Task) else type(message) for message in messages]
        for messages in handle.sent
    ]


def test_short_tasks_wait_while_two_calls_are_under_way_and_go_in_one_as_one_returns() -> None:
    handle = Handle()
    warm(handle)
    for seq in range(100, 106):
        handle.send(engine.Task(seq, [seq]))
    assert tasks(handle) == [[100], [101]]
    handle.answer(2, done(100, seconds=SHORT))
    assert tasks(handle) == [[100], [101], [102, 103, 104, 105]]
    handle.send(engine.Task(106, [106]))
    assert len(handle.sent) == 3
    handle.answer(4, *(done(seq, seconds=SHORT) for seq in range(102, 106)))
    assert len(handle.sent) == 3, "the first of the two has not returned"
    handle.answer(3, done(101, seconds=SHORT))
    assert numbers(handle.events) == [*range(100, 106)]
    assert tasks(handle)[3:] == [[106]]


def numbered(count: int, index: Any = None) -> list[engine.Task]:
    return [engine.Task(seq, index or [seq]) for seq in range(count)]


ONE_EACH = [[0], [1], [2], [3]]
LARGE = bytes(BUNDLE_BYTES)


@pytest.mark.parametrize(
    ("learned", "messages", "calls"),
    [
        pytest.param({"seconds": BUNDLE_SECONDS / 4}, numbered(8), [[0], [1], [2, 3, 4, 5]], id="full"),
        pytest.param(
            {},
            [*numbered(6, bytes(BUNDLE_BYTES // 5 * 2)), engine.Task(6, LARGE)],
            [[0], [1], [2, 3], [4, 5], [6]],
            id="many bytes",
        ),
        pytest.param({"seconds": 1.0}, numbered(4), ONE_EACH, id="long"),
        pytest.param({"value": LARGE}, numbered(4), ONE_EACH, id="large"),
        pytest.param({"results": 0}, numbered(4), ONE_EACH, id="unknown"),
        pytest.param(
            {},
            [*numbered(4), engine.Begin(1), engine.Task(4, [4]), engine.Stop()],
            [[0], [1], [2, 3], [engine.Begin], [4], [engine.Stop]],
            id="other messages",
        ),
        pytest.param(
            {}, [*numbered(3), engine.Task(3, np.zeros(50_000))], [[0], [1], [2], []], id="buffers"
        ),
    ],
)  # fmt: skip
def test_short_tasks_go_together_and_in_order_unless_they_are_long_large_or_unknown(
    learned: dict[str, Any], messages: list[Any], calls: list[Any]
) -> None:
    handle = Handle()
    warm(handle, **learned)
    for message in messages:
        handle.send(message)
    assert tasks(handle) == calls


def test_results_that_are_sent_on_are_named_by_their_call_and_each_call_once() -> None:
    handle = Handle()
    warm(handle)
    places = [("first", 4), ("first", 0), ("first", 1), ("second", 0), ("first", 2)]
    for seq, place in enumerate(places):
        handle.send(engine.Task(seq, Pickled([seq])), calls.Place(*place))
    handle.answer(2, done(0, seconds=SHORT))
    assert tasks(handle) == [[0], [1], [2, 3, 4]]
    assert handle.sent[2][0].index is None
    assert handle.returns[-1] == ([(0, 1), (1, 0), (0, 2)], "first", "second")


@pytest.mark.parametrize("then", ["alone", "a long one", "leave"])
def test_what_waits_goes_at_once_or_is_dropped_with_the_worker(then: str) -> None:
    handle = Handle(alone=then == "alone")
    warm(handle)
    for task in numbered(4):
        handle.send(task)
    if then == "a long one":
        handle.answer(2, done(0, seconds=1.0))
        handle.send(engine.Task(4, [4]))
    elif then == "leave":
        handle.leave()
        handle.send(engine.Stop())
    expected = {"alone": ONE_EACH, "a long one": [[0], [1], [2, 3], [4]]}
    assert tasks(handle) == expected.get(then, [[0], [1], [engine.Stop]])


def test_what_waits_when_the_worker_dies_is_dropped_and_no_task_of_the_bundle_is_blamed() -> None:
    handle = Handle()
    warm(handle)
    for seq in range(4):
        handle.send(engine.Task(seq, [seq]))
    handle.answer(2, done(0, seconds=SHORT))
    handle.answer(3, done(1, seconds=SHORT))
    handle.send(engine.Task(4, [4]))
    handle.send(engine.Task(5, [5]))
    made = len(handle.sent)
    handle.life().set_exception(RuntimeError("killed"))
    for step in handle.steps()[4:]:
        step.set_exception(RuntimeError("killed"))
    *results, exited = handle.events
    assert numbers(results) == [0, 1]
    assert isinstance(exited, engine.Exited)
    assert exited.at == -1
    assert len(handle.sent) == made
    handle.send(TASK)
    assert len(handle.sent) == made


@contextmanager
def running(function: Any) -> Iterator[engine.CalledWorker]:
    """Worker that runs on a thread of this process, and so must not seed or describe the process."""
    (parts,) = sent([work_of(engine.WorkerSpec("calls", 1, Call(function)))])
    worker = engine.CalledWorker(3, parts, 1 << 20)
    thread = threading.Thread(target=worker.run)

    def make(number: int, work: engine.PackedSpec, slots: Any) -> engine.Worker:
        return engine.thread_worker(number, work.open())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "process_worker", make)
        thread.start()
        try:
            yield worker
        finally:
            worker.leave()
            thread.join(60)


def values(events: list[Parts]) -> list[Any]:
    found = (engine.loads(head, buffers=buffers) for head, *buffers in sent(events))
    return [event.payload.open() for event in found if isinstance(event, engine.Done)]


def test_a_worker_answers_several_messages_in_order_and_takes_out_what_is_sent_on() -> None:
    with running(echo) as worker:
        worker.step([])
        first = worker.step([(parts_of(engine.Task(seq, seq)), None) for seq in range(5)])
        assert values(first) == [*range(5)]
        empty = [parts_of(engine.Task(seq, None)) for seq in range(5, 8)]
        second = worker.step([(empty[0], (0, 3)), (empty[1], (0, 1))], sent(first))
        assert values(second) == [3, 1]
        third = worker.step(
            [(empty[0], (1, 1)), (parts_of(engine.Task(6, "own")), None), (empty[2], (0, 4))],
            *(sent(first), sent(second)),
        )
        assert values(third) == [1, "own", 4]


def test_a_worker_tells_where_it_is_and_what_it_does_until_it_has_ended() -> None:
    with running(echo) as worker:
        assert worker.step([]) != []
        assert worker.where() == (os.getpid(), platform.node())
        assert "in _get\n" in worker.stack()
        worker.leave()
        for _ in range(2):
            assert worker.step([(parts_of(TASK), None)]) == []


# -- clocks ----------------------------------------------------------------------------------------


def _measured(machine: str) -> list[tuple[float, float]]:
    """Begin and end of two tasks in one call; by the worker's clock they ended at 101 and 102."""
    handle = Handle()
    handle.calls[0][1].set_result((1, machine))
    handle.send(TASK)
    results = []
    for began in (100.0, 101.0):
        spans = ((began, began + 1.0, 1.0),)
        slices = SliceReport(1, 2, 3, (("task", began, began + 1.0, 2, 0),), 0)
        measures = Measures(spans, 1.0, None, None, None, 0.0, 0.0, 0, slices)
        results.append(done(1)._replace(extras={MEASURES: measures}))
    handle.answer(0, *results)
    found = [event.extras[MEASURES] for event in handle.events]  # type: ignore[union-attr]
    assert all(each.slices.slices[0][1:3] == each.spans[0][:2] for each in found)
    return [each.spans[0][:2] for each in found]


def test_times_of_this_machine_are_as_they_are_and_those_of_another_begin_at_the_arrival() -> None:
    assert _measured(platform.node()) == [(100.0, 101.0), (101.0, 102.0)]
    before = time.perf_counter()
    first, (began, ended) = _measured("elsewhere")
    assert before <= ended <= time.perf_counter()
    assert ended - began == pytest.approx(1.0)
    assert first == (pytest.approx(began - 1.0), pytest.approx(ended - 1.0))
