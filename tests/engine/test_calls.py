"""Calls of a worker far away: reported in their order, the end last."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from hybridloader import engine
from hybridloader.engine.calls import Parts, parts_of, work_of
from hybridloader.engine.far_clock import EVERY, TRIPS, FarClock
from hybridloader.engine.meter import MEASURES, Measures
from hybridloader.engine.serving import Pickled
from hybridloader.engine.slices import Told
from hybridloader.memory.slots import PrivateSlots
from hybridloader.testing.work import Call, echo


class Handle(engine.CallingHandle):
    """Its calls are answered by the test."""

    gone = False

    def __init__(self) -> None:
        self.events: list[engine.Event] = []
        super().__init__(3, self.events.append)
        self.calls: list[tuple[str, Future[Any]]] = []
        self.ended = threading.Event()
        self.begin()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if self.gone:
            raise OSError("no connection")
        future: Future[Any] = Future()
        self.calls.append((method, future))
        return future

    def end(self) -> None:
        self.ended_by = threading.current_thread()
        self.ended.set()

    def answer(self, number: int, *events: engine.Event) -> None:
        self.steps()[number].set_result(sent([parts_of(event) for event in events]))

    def steps(self) -> list[Future[Any]]:
        return [future for method, future in self.calls if method == "step"]

    def life(self) -> Future[Any]:
        return next(future for method, future in self.calls if method == "run")


def sent(events: list[Parts]) -> list[Parts]:
    """Send events as a transport does that delivers memory which is read-only."""
    buffers: list[Any] = []
    data = pickle.dumps(events, 5, buffer_callback=buffers.append)
    found: list[Parts] = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    return found


def done(seq: int, value: Any = None) -> engine.Done:
    return engine.Done(3, seq, Pickled(value))


def numbers(events: list[Any]) -> list[Any]:
    return [event.seq if isinstance(event, engine.Done) else type(event) for event in events]


def test_results_that_come_early_wait_for_those_before_them_and_the_exit_for_all() -> None:
    handle = Handle()
    for _ in range(3):
        handle.step([])
    handle.answer(0, engine.Ready(3))
    handle.answer(2, done(11))
    handle.life().set_result(engine.dumps(engine.Exited(3)))
    assert numbers(handle.events) == [engine.Ready]
    handle.answer(1, done(10))
    assert numbers(handle.events) == [engine.Ready, 10, 11]
    assert handle.is_alive()
    handle.steps()[3].set_exception(OSError("gone"))
    assert numbers(handle.events) == [engine.Ready, 10, 11, engine.Exited]
    assert not handle.is_alive()
    assert handle.exitcode == 0
    handle.step([])
    assert len(handle.steps()) == 4


def test_a_worker_that_lives_and_has_no_answer_is_killed_and_told_of() -> None:
    handle = Handle()
    handle.answer(0, engine.Ready(3))
    handle.step([])
    handle.step([])
    handle.steps()[1].set_exception(OSError("the store is full"))
    assert handle.ended.wait(60)
    handle.answer(2, done(11))
    handle.life().set_exception(RuntimeError("killed"))
    *_, last, exited = handle.events
    assert isinstance(last, engine.Done)
    assert isinstance(exited, engine.Exited)
    assert exited.cause is not None
    assert "the store is full" in exited.cause
    assert handle.exitcode == 1


def test_a_worker_that_can_not_be_called_is_killed_and_told_of() -> None:
    handle = Handle()
    handle.answer(0, engine.Ready(3))
    handle.gone = True
    handle.step([])
    assert handle.ended.wait(60)
    handle.life().set_exception(RuntimeError("killed"))
    *_, exited = handle.events
    assert isinstance(exited, engine.Exited)
    assert "could not be called: OSError('no connection')" in str(exited.cause)


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


def test_the_main_thread_may_end_calls_and_waits_all_the_same() -> None:
    assert threading.current_thread() is threading.main_thread()
    handle = Handle()
    handle.life().set_exception(RuntimeError("killed"))
    handle.answer(0, engine.Ready(3))
    other = Handle()
    other.join(0)
    assert not handle.is_alive()
    assert other.is_alive()


def test_a_call_that_has_ended_as_it_is_made_marks_no_thread() -> None:
    class Prompt(Handle):
        def call(self, method: str, *arguments: Any) -> Future[Any]:
            future = super().call(method)
            if method == "where":
                future.set_result((1, "elsewhere"))
            return future

    told = list[object]()

    def make() -> None:
        handle = Prompt()
        told.append(handle.placed)
        handle.join(0)
        handle.terminate()
        told.append(handle.ended_by)

    maker = threading.Thread(target=make)
    maker.start()
    maker.join(60)
    assert told == [(1, "elsewhere"), maker]


def test_a_worker_is_reported_once_when_calls_have_ended_for_good() -> None:
    handle = Handle()
    handle.answer(0, engine.Ready(3))
    handle.step([])
    handle.lost("is gone: no cluster")
    handle.lost("is gone: no cluster")
    handle.life().set_exception(RuntimeError("late"))
    handle.steps()[1].set_exception(RuntimeError("late"))
    assert numbers(handle.events) == [engine.Ready, engine.Exited]
    assert handle.exitcode == 1
    handle.join()


def test_a_worker_that_was_killed_is_sent_nothing() -> None:
    handle = Handle()
    handle.terminate()
    handle.step([])
    assert len(handle.steps()) == 1
    handle.life().set_exception(RuntimeError("killed"))
    handle.steps()[0].set_exception(RuntimeError("killed"))
    assert numbers(handle.events) == [engine.Exited]


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
    assert slots.size >= array.nbytes
    np.testing.assert_array_equal(large, array)
    large += 1
    small += 1
    assert payload.nbytes < 10_000
    del large
    slots.close()


def test_the_arrays_of_the_work_are_the_workers_own() -> None:
    array = np.arange(100_000)
    parts = work_of(engine.WorkerSpec("calls", 1, Call(echo, dataset=array)))
    (found,) = sent([parts])
    assert len(found) > 1
    packed: engine.PackedSpec = engine.loads(found[0], buffers=found[1:])
    dataset: Any = packed.open().fetch.dataset
    np.testing.assert_array_equal(dataset, array)
    dataset += 1


class Trips:
    """A machine whose clock is `ahead`; each answer takes what `takes` says, half of it to get there."""

    def __init__(self, ahead: float, takes: list[float]) -> None:
        self.now, self.ahead, self.takes = 50.0, ahead, takes
        self.asked = 0

    def clock(self) -> float:
        return self.now

    def ask(self) -> Future[float]:
        took = self.takes[self.asked]
        self.asked += 1
        found: Future[float] = Future()
        found.set_result(self.now + took / 2 + self.ahead)
        self.now += took
        return found


def test_the_shortest_round_trip_tells_what_a_far_clock_is_ahead() -> None:
    class Busy(Trips):
        def ask(self) -> Future[float]:
            found = super().ask()
            if self.takes[self.asked - 1] > 1:  # it lay there before it was read
                busy: Future[float] = Future()
                busy.set_result(found.result() + self.takes[self.asked - 1] / 2)
                return busy
            return found

    trips = Busy(1000.0, [3.0, 0.2, 5.0, 0.1, 0.1, 0.1])
    clock = FarClock(trips.ask, trips.clock)
    clock.look()
    assert trips.asked == TRIPS
    assert clock.offset == pytest.approx(1000.0)
    measures = _measures(1100.0)
    extras = {MEASURES: measures._replace(others=(measures,))}
    clock.translate(extras)
    moved = extras[MEASURES]
    assert moved.spans == ((pytest.approx(100.0), pytest.approx(101.0), 1.0),)
    assert moved.others[0].spans == moved.spans
    assert moved.slices.slices[0][:3] == ("task", pytest.approx(100.0), pytest.approx(101.0))
    assert trips.asked == TRIPS, "it looks again after a while"
    trips.ahead = 1000.5
    trips.now += EVERY
    clock.translate({MEASURES: measures})
    assert clock.offset == pytest.approx(1000.5)
    clock.translate({})


def test_a_worker_that_died_has_no_clock() -> None:
    gone: Future[float] = Future()
    gone.set_exception(OSError("gone"))
    clock = FarClock(lambda: gone)
    clock.look()
    assert clock.offset is None


def test_times_that_come_before_the_offset_is_known_are_left_out() -> None:
    clock = FarClock(Future)
    clock.look()
    extras = {MEASURES: _measures(1100.0), "other": 1}
    clock.translate(extras)
    assert extras == {"other": 1}


def _measures(began: float) -> Measures:
    told = Told(1, 2, 3, (("task", began, began + 1.0, 2, 0),), 0)
    spans = ((began, began + 1.0, 1.0),)
    return Measures(spans, 1.0, None, None, None, 0.0, 0.0, 0, told)
