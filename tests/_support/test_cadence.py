"""Times at which a state is taken, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.manual_clock import Clock

from hybridloader._support.states import FREE, SHARE, Cadence


def paced(costs: Iterator[float], step: float, steps: int, every: int = 1) -> list[int]:
    """The steps at which a state is taken, where each takes as long as is said."""
    clock = Clock()
    cadence = Cadence(clock, every=every)
    found = []
    for number in range(steps):
        clock.now += step
        if cadence.due():
            found.append(number)
            clock.now += next(costs)
            cadence.taken()
    return found


def test_what_is_cheap_is_taken_each_time_and_what_is_dear_for_a_share_of_the_time() -> None:
    assert paced(iter([FREE / 2] * 50), 1e-6, 50) == list(range(50))
    dear = paced(iter([0.02] * 50), 0.001, 5000)
    assert dear[0] == 0
    assert dear[1] == pytest.approx(0.02 * (SHARE - 1) / 0.001, abs=2)
    assert len(dear) * 0.02 <= 5.0 / SHARE + 0.02
    assert paced(iter([0.02] * 50), 2.0, 50) == list(range(50)), "nobody waits for it"


def test_steps_may_lie_between_two_states_however_cheap_they_are() -> None:
    assert paced(iter([FREE / 2] * 50), 1e-6, 50, every=7) == list(range(0, 50, 7))
    dear = paced(iter([0.02] * 50), 0.001, 5000, every=7)
    assert dear == paced(iter([0.02] * 50), 0.001, 5000)


def test_a_cold_start_and_a_step_that_was_interrupted_make_no_cheap_state_dear() -> None:
    costs = [10 * FREE, FREE / 4, FREE / 4, 1.0, *[FREE / 4] * 46]
    assert paced(iter(costs), 1e-6, 50) == list(range(50))


def test_a_state_that_grows_is_taken_less_often() -> None:
    found = paced(iter([FREE / 4, *[0.02] * 100]), 0.001, 5000)
    assert len(found) < 30
    assert found[-1] > 3000
