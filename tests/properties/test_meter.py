"""Meter of a worker, by a clock that the test moves."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted import FakeClock

from hybridloader.engine.meter import EVERY, Measures, Meter, Metering


def metered(meter: Meter, clock: FakeClock, took: float, packing: float = 0.0) -> Measures | None:
    """A task, as a worker meters it."""
    if meter.looks:
        meter.begin()
    began = clock.now
    clock.now += took
    fetched = clock.now
    clock.now += packing
    meter.busy, meter.tasks = meter.busy + clock.now - began, meter.tasks + 1
    return meter.measure(began, fetched, clock.now, 0) if clock.now >= meter.due else None


@given(st.lists(st.tuples(st.floats(0, 0.03), st.floats(0, 0.03)), max_size=30))
def test_nothing_is_lost_or_counted_twice(tasks: list[tuple[float, float]]) -> None:
    clock, cpu = FakeClock(5.0), FakeClock()
    meter = Meter(Metering(cpu), clock)
    meter.open()
    told = list[Measures]()
    worked = list[tuple[float, float]]()
    for took, pause in [*tasks, (0.0, 1.0), (0.001, 0.0)]:
        cpu.now += took / 2
        measures = metered(meter, clock, took)
        worked.append((clock.now - took, clock.now))
        if measures is not None:
            told.append(measures)
        clock.now += pause
    meter.close()
    seconds = sum(took for took, _ in tasks) + 0.001
    spans = [span for measures in told for span in measures.spans]
    assert sum(m.busy for m in told) == pytest.approx(seconds)
    assert sum(busy for _, _, busy in spans) == pytest.approx(seconds)
    assert sum(m.cpu or 0 for m in told) == pytest.approx(seconds / 2)
    ends = [end for began, end, busy in spans for end in (began, end)]
    assert ends == sorted(ends)
    for began, ended, busy in spans:
        assert busy <= ended - began + 1e-9
        assert min(abs(ended - end) for _, end in worked) <= EVERY + 1e-9, (
            "told late by that at most"
        )


def test_parts_of_tasks_that_others_answer_are_told_with_theirs() -> None:
    clock, cpu = FakeClock(5.0), FakeClock()
    helper, answering = Meter(Metering(cpu), clock), Meter(Metering(cpu), clock)
    waiting = deque[Measures]()
    for _ in range(3):
        began = clock.now
        clock.now += 2 * EVERY
        helper.part(began, clock.now)
        assert clock.now >= helper.due
        waiting.append(helper.measure_parts(clock.now, retried=1))
    assert helper.looks, "a part tells nothing of how long a task is"
    assert not helper.reports
    told = metered(answering, clock, EVERY)
    assert told is not None
    joined = told.joined(waiting)
    assert not waiting
    assert joined._replace(others=()) == told
    assert sum(others.busy for others in joined.others) == pytest.approx(6 * EVERY)
    assert [others.retried for others in joined.others] == [1, 1, 1]


@pytest.mark.parametrize("late", [0.0, 0.005])
def test_the_wait_for_the_gil_is_the_time_by_which_a_nap_is_late(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nap(seconds: float) -> None:
        clock.now += seconds + late

    clock = FakeClock(5.0)
    monkeypatch.setattr("hybridloader.engine.meter.sleep", nap)
    measures = metered(Meter(Metering(None, gil=True), clock), clock, EVERY)
    assert measures is not None
    assert measures.wait_for_gil == pytest.approx(late, abs=1e-9)
