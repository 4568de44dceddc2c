"""Stages with scripted workers and a clock that the test sets."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count, takewhile
from types import FrameType
from typing import Any

import pytest
from support.scripted import ScriptedCrew
from support.supervised import QUICK, answer, ready, tasks
from support.supervised import stage as made_stage

from hybridloader import WorkerDied
from hybridloader.engine import ByReference, Done, Event, Exited
from hybridloader.errors import IteratorClosed

stage = partial(made_stage, policy=None, lookahead=2)


@pytest.mark.parametrize("together", [False, True], ids=["before", "together"])
def test_results_before_a_death_that_are_there_are_not_lost(together: bool) -> None:
    death: list[Event] = [Exited(0, "exited with code 1")]
    events = [answer(0, 1) + death] if together else [answer(0, 1), death]
    it, _ = stage([ready(), *events], lookahead=3)
    it.begin(iter("abc"))
    assert [next(it), next(it)] == ["value 0", "value 1"]
    with pytest.raises(WorkerDied):
        next(it)


# -- closed in the middle of a call, on the very thread that pulls ---------------------------------


def test_a_close_in_the_sampler_is_done_when_its_call_is_over() -> None:
    def closing() -> Iterator[int]:
        yield 0
        it.close()
        assert not backend.crews[0].closed
        yield 1

    it, backend = stage([ready(), answer(0)], lookahead=1)
    it.begin(closing())
    assert next(it) == "value 0"
    assert backend.crews[0].closed
    with pytest.raises(IteratorClosed):
        next(it)


def test_a_close_by_a_signals_handler_or_a_finalizer_is_done_when_the_wait_is_over() -> None:
    def handled(crew: ScriptedCrew) -> list[Event]:
        it.leave(0.0)
        it.close()
        assert not crew.closed  # it is in the middle of `wait`
        return []

    it, backend = stage([ready(), handled, lambda crew: pytest.fail("asked again after close")])
    it.begin(iter("a"))
    with pytest.raises(IteratorClosed):
        next(it)
    assert backend.crews[0].closed


@pytest.mark.parametrize("after", [0, 2])
def test_an_interrupt_of_the_sampler_does_not_look_like_its_end(after: int) -> None:
    def interrupted() -> Iterator[int]:
        yield from range(after)
        raise KeyboardInterrupt

    def pull_all() -> None:
        it.begin(interrupted())
        list(it)

    it, backend = stage([ready(), answer(0), answer(1)], lookahead=1)
    with pytest.raises(KeyboardInterrupt):
        pull_all()
    assert backend.crews[0].closed
    with pytest.raises(IteratorClosed):
        next(it)


def test_an_interrupt_at_any_point_loses_no_result_of_a_stage_that_goes_on() -> None:
    """Python handles signals where a function begins, and where a built-in one has returned."""

    def answer_all(crew: ScriptedCrew) -> list[Event]:
        sent, crew.sent[:] = list(crew.sent), []
        return [Done(worker, task.seq, ByReference(task.seq)) for worker, task in sent]

    def run(at: int) -> bool:
        """Interrupt the run at the call of that number; false if there are not as many."""
        it, backend = stage([ready(0, 1), *[answer_all] * 9], workers=2, lookahead=4)
        values: list[int] = []
        counted = 0

        def interrupt(frame: FrameType, event: str, argument: object) -> None:
            nonlocal counted
            ours = frame.f_globals.get("__package__") == "hybridloader.engine"
            if not ours or event not in ("call", "c_return"):
                return
            if frame.f_code.co_flags & inspect.CO_GENERATOR:  # may be on its way to be collected
                return
            if (
                getattr(argument, "__name__", "") == "__exit__"
            ):  # the result is on its way to the caller
                return
            counted += 1
            if counted == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

        def pull_all() -> None:
            it.begin(iter(range(6)))
            values.extend(it)

        sys.setprofile(interrupt)
        try:
            pull_all()
        except KeyboardInterrupt:
            if not it.closed:
                values.extend(it) if it.epoch == 0 else pull_all()
                assert values == list(range(6))
        finally:
            sys.setprofile(None)
        assert values == list(range(len(values)))
        it.close()
        assert backend.crews[0].closed
        return counted >= at

    assert sum(1 for _ in takewhile(run, count(1))) > 100


# -- two tasks at a time -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "lookahead", "options", "flushed"),
    [
        # After `begin`, and then by the number of tasks that had been queued by then:
        (QUICK / 2, 4, {}, [6, 8]),
        (QUICK * 2, 4, {}, [5, 6, 7, 8]),
        (QUICK / 2, 3, {}, [4, 5, 6]),  # one result at hand would be too few
        (QUICK / 2, 4, {"task_timeout": 9.0}, [5, 6, 7, 8]),  # time counts from when it was queued
    ],
)
def test_tasks_that_take_microseconds_are_sent_two_at_a_time_while_results_are_at_hand(
    seconds: float,
    lookahead: int,
    options: dict[str, Any],
    flushed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = [
        [*ready(), *(Done(0, seq, ByReference(seq), seconds) for seq in range(lookahead))],
        [],
    ]
    made, backend = stage(script, lookahead=lookahead, **options)
    made.begin(iter(range(100)))
    queued: list[int] = []
    monkeypatch.setattr(ScriptedCrew, "flush", lambda crew: queued.append(len(crew.sent)))
    assert [made.pull() for _ in range(lookahead)] == list(range(lookahead))
    assert queued == flushed
    assert len(tasks(backend)) == 2 * lookahead  # the source is asked as ever
    made.close()
