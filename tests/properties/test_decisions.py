"""Decisions of a tuning: scripted costs, and a clock that the costs move."""

from __future__ import annotations

import io
import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tuned_subject import (
    INLINE,
    Cost,
    Costs,
    Empty,
    Limits,
    Place,
    Plan,
    Scripted,
    Trial,
    Tuner,
    Tuning,
    price,
)

from hybridloader import WorkerDied, WorkerTimeout

CORES = 4
LIMITS = Limits(CORES, backends=("inline", "threads", "fork"))

WORKLOADS: dict[str, Cost] = {
    "decoding": Cost(free=10e-3),
    "waiting": Cost(waiting=20e-3, free=0.2e-3),
    "python": Cost(held=10e-3, sending=0.1e-3),
    "hybrid": Cost(waiting=20e-3, free=2e-3, held=2e-3),
    "one lock": Cost(locked=2e-3, crowd=0.3),
    "large": Cost(free=5e-3, held=1e-3, sending=20e-3),
    "tiny": Cost(held=5e-6, handing=50e-6),
}


def tuned(subject: Scripted, limits: Limits = LIMITS, seconds: float = 20, **more: Any) -> Tuning:
    tuner = Tuner(subject, limits, seconds, clock=subject.clock, stream=io.StringIO(), **more)
    return tuner.run()


def grid(subject: Scripted) -> dict[Plan, float]:
    """Return the rate of every plan on a grid within the limits."""
    processes = [Place("fork", n, k) for n in range(1, CORES + 1) for k in (1, 2, 4, 8, 16)]
    threads = [Place("threads", n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)]
    return {(place,): subject.rate((place,)) for place in (INLINE, *threads, *processes)}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_choice_is_near_the_best_of_a_grid(name: str) -> None:
    subject = Scripted((WORKLOADS[name],), (INLINE,))
    tuning = tuned(subject)
    best = max(grid(subject).values())
    assert subject.rate(tuning.plan) >= 0.9 * best, tuning
    assert subject.clock.now - 100 <= 20 + 1
    assert subject.running == 0


@pytest.mark.parametrize("closing", [0.1, 1.0])
def test_it_ends_in_time_but_for_one_result(closing: float) -> None:
    waits = 0.2
    subject = Scripted((Cost(waiting=waits),), (Place("threads", 2),), closing=closing)
    tuning = tuned(subject, seconds=5)
    assert subject.clock.now - 100 <= 5 + waits
    assert len(tuning.trials) > 1


def test_a_slow_step_is_kept_up_with_by_the_cheapest_plan() -> None:
    subject = Scripted((WORKLOADS["python"],), (Place("fork", 4),))
    tuning = tuned(subject, step=50.0)
    assert tuning.keeps_up is True
    assert price(tuning.plan) <= price((Place("threads", 1),))
    assert "cheapest that keeps up" in tuning.reason
    more = tuned(Scripted((WORKLOADS["python"],), (INLINE,)), step=1e6)
    assert more.keeps_up is False
    assert more.plan[0].processes == CORES


def stepping(seconds: float, *first: float, within: float = 20) -> tuple[Tuning, int]:
    """Tuning of what waits, whose step takes so long, its first calls longer; and its calls."""
    subject, calls = Scripted((WORKLOADS["waiting"],), (INLINE,)), list[float]()

    def step(batch: Any) -> None:
        calls.append(first[len(calls)] if len(calls) < len(first) else seconds)
        subject.clock.now += calls[-1]

    return tuned(subject, seconds=within, step=step), len(calls)


def test_a_step_is_timed_alone_and_is_part_of_every_trial() -> None:
    tuning, _ = stepping(10e-3)
    assert tuning.target == pytest.approx(100)
    # The scripted rate adds the time of a result to that of a step, so all plans stay below it.
    assert tuning.rate < 100
    assert tuning.keeps_up is (tuning.rate >= 95)
    # Longer than there is time: it is called in the loop, and alone.
    tuning, calls = stepping(6.0, within=5)
    assert calls == 2
    assert tuning.keeps_up is not None
    # First calls that are slow are no reason for a slow plan.
    tuning, _ = stepping(1e-3, *[300e-3] * 12)
    fastest = max(trial.rate for trial in tuning.trials)
    assert tuning.target is not None
    assert tuning.target >= fastest
    assert tuning.rate >= 0.9 * fastest


def test_a_pipeline_gets_a_place_for_each_stage() -> None:
    costs = (WORKLOADS["waiting"], Cost(held=4e-3, sending=0.1e-3))
    tuning = tuned(Scripted(costs, (Place("threads", 1), Place("threads", 1))), seconds=40)
    waiting, python = tuning.plan
    assert waiting.concurrent >= 8
    assert python.processes >= 2
    assert tuning.before is not None
    assert tuning.rate > 2 * tuning.before


def test_noise_does_not_decide() -> None:
    """Rates of a plan swing by a half; two threads are no faster than one, and one is cheaper."""
    subject = Scripted((Cost(locked=2e-3),), (Place("threads", 1),))
    swing = itertools.cycle([0.0, 1e-3, 2e-3])
    subject.on_next = lambda plan: setattr(subject.clock, "now", subject.clock.now + next(swing))
    assert price(tuned(subject).plan) <= price((Place("threads", 1),))


def test_without_a_gil_python_is_done_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridloader.tuning.tune.gil_enabled", lambda: False)
    tuning = tuned(Scripted((Cost(free=10e-3, sending=1e-3),), (INLINE,)))
    assert tuning.plan == (Place("threads", CORES),)


def test_the_error_of_a_dataset_is_raised_with_what_was_tried() -> None:
    def fail(plan: Plan) -> None:
        raise LookupError("file 7 is missing")

    subject = Scripted((Cost(free=1e-3),), (INLINE,), on_next=fail)
    with pytest.raises(LookupError, match="file 7") as caught:
        tuned(subject)
    assert "threads x 1: LookupError: file 7 is missing" in caught.value.__notes__[0]
    assert subject.running == 0


def test_a_backend_that_fails_is_left_out_and_reported() -> None:
    def refuse(plan: Plan) -> None:
        if any(place.processes for place in plan):
            raise TypeError("a lambda can't be pickled")

    subject = Scripted((WORKLOADS["python"],), (INLINE,), on_open=refuse)
    tuning = tuned(subject)
    assert not tuning.plan[0].processes
    assert len([plan for plan in subject.opened if plan[0].processes]) == 1
    assert "TypeError: a lambda can't be pickled" in str(tuning)


@pytest.mark.parametrize("kind", [WorkerDied, WorkerTimeout, Empty])
def test_death_hang_and_emptiness_end_it_at_once(kind: type[Exception]) -> None:
    def fail(plan: Plan) -> None:
        raise StopIteration if kind is Empty else kind("worker 0")

    subject = Scripted((Cost(free=1e-3),), (Place("fork", 2),), on_next=fail)
    with pytest.raises(kind):
        tuned(subject)
    assert subject.opened == [(Place("fork", 2),)]
    assert subject.running == 0


def test_ctrl_c_gives_the_best_so_far() -> None:
    def interrupt(plan: Plan) -> None:
        if len(subject.opened) == 4:
            raise KeyboardInterrupt

    subject = Scripted((WORKLOADS["waiting"],), (INLINE,), on_next=interrupt)
    tuning = tuned(subject)
    assert tuning.interrupted
    assert tuning.plan == (Place("threads", 2),)
    assert "Ended by Ctrl-C" in str(tuning)
    assert subject.running == 0
    subject = Scripted((Cost(free=1e-3),), (INLINE,))
    subject.on_open = lambda plan: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        tuned(subject)


def test_no_result_in_time_is_an_error_that_asks_for_more_seconds() -> None:
    subject = Scripted((Cost(free=1e-3),), (INLINE,))
    with pytest.raises(ValueError, match="no time for one trial of Scripted; give it more seconds"):
        tuned(subject, Limits(CORES, backends=()))
    assert not subject.opened


def test_a_terminal_shows_what_is_tried_and_then_nothing() -> None:
    subject, terminal = Scripted((Cost(free=1e-3),), (INLINE,)), io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    Tuner(subject, LIMITS, 3, clock=subject.clock, stream=terminal).run()
    _, first, *shown, blank, last = terminal.getvalue().split("\r")
    assert first == "tune: 0 of 3 s, trying threads x 1"
    assert any(re.match(r"tune: 1 of 3 s, trying .*; best: .*/s", text) for text in shown)
    assert (blank, last) == (" " * len(shown[-1].rstrip()), "")


def test_the_kinds_of_work() -> None:
    for costs, kind in [
        (Costs(5e-6), "tiny"),
        (Costs(1e-2, 1e-4), "waits"),
        (Costs(1e-2, 3e-3), "mixed"),
        (Costs(1e-2, 6e-3, speedup=1.1), "holds-gil"),  # it waits for a core
        (Costs(1e-2, 6e-3, speedup=1.5), "mixed"),
        (Costs(1e-2, 1e-2, speedup=1.0), "holds-gil"),
        (Costs(1e-2, 1e-2, speedup=1.0, gil=False), "releases-gil"),
        (Costs(1e-2, 1e-2, speedup=1.9), "releases-gil"),
        (Costs(1e-2), "releases-gil"),  # nothing is known: threads
    ]:
        assert costs.kind == kind


def known(trial: Trial) -> tuple[Costs | None, ...]:
    return tuple(s and Costs(s.wall, s.cpu, s.bytes) for s in trial.stages)


costs = st.builds(
    Cost,
    waiting=st.sampled_from([0.0, 1e-3, 50e-3]),
    free=st.sampled_from([0.0, 1e-3, 10e-3]),
    held=st.sampled_from([0.5e-3, 2e-3, 20e-3]),
    locked=st.sampled_from([0.0, 2e-3]),
    crowd=st.sampled_from([0.0, 0.5]),
    sending=st.sampled_from([0.0, 5e-3]),
)
places = st.one_of(
    st.just(INLINE),
    st.builds(Place, st.sampled_from(["threads", "fork"]), st.integers(1, 70), st.integers(1, 4)),
)


@settings(max_examples=60)
@given(
    stages=st.lists(st.tuples(costs, places), min_size=1, max_size=3),
    cores=st.sampled_from([0.5, 1.0, 2.0, 3.5, 16.0]),
    memory=st.sampled_from([1 << 20, 1 << 28, 1 << 34]),
    size=st.sampled_from([0, 1000, 38 << 20]),
    backends=st.sampled_from([("inline", "threads"), ("inline", "threads", "fork")]),
    step=st.sampled_from([None, 1.0, 1000.0]),
)
def test_invariants(
    stages: list[tuple[Cost, Place]],
    cores: float,
    memory: int,
    size: int,
    backends: tuple[str, ...],
    step: float | None,
) -> None:
    """No plan that is tried exceeds a limit; the best is as fast as reported; it ends in time."""
    limits = Limits(cores, memory, backends)
    subject = Scripted(
        tuple(cost for cost, _ in stages), tuple(place for _, place in stages), cores, size
    )
    opened_at: list[float] = []
    subject.on_open = lambda plan: opened_at.append(subject.clock.now)
    tuning = tuned(subject, limits, 2, step=step)
    assert opened_at[-1] <= 102
    for number, plan in enumerate(subject.opened):
        assert sum(place.processes for place in plan) <= limits.whole_cores
        assert {place.backend for place in plan} <= {*backends}
        if number > 2:  # before, the bytes of a result are not known
            held = 3 * size * sum(max(1, place.concurrent) for place in plan)
            assert held <= memory or all(place == INLINE for place in plan)
    held = 3 * size * sum(max(1, place.concurrent) for place in tuning.plan)
    assert held <= memory or all(place == INLINE for place in tuning.plan)
    chosen = next(trial for trial in tuning.trials if trial.plan == tuning.plan)
    assert tuning.rate == chosen.rate
    rates = [t.rate for t in tuning.trials if not limits.problem(t.plan, subject.stages, known(t))]
    fastest = max(rates)
    if step is None:
        assert tuning.rate >= 0.95 * fastest
    elif tuning.keeps_up:
        assert tuning.rate >= 0.95 * step
    else:
        assert fastest < 0.95 * step
    assert len({trial.plan for trial in tuning.trials}) == len(tuning.trials)
