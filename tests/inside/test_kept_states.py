"""Copies of states: what they share, when one is made anew, and how often one is taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.manual_clock import Clock

from hybridloader._support.states import FREE, SHARE, Cadence, copied


class Unpicklable:
    """Can be copied, but not pickled."""

    def __init__(self) -> None:
        self.values = [1, 2]
        self.function = lambda: None


def test_a_copy_shares_nothing_that_can_be_changed() -> None:
    shared = [1, 2]
    weight = torch.nn.Parameter(torch.ones(3))
    state = {
        "list": shared,
        "again": shared,
        "tensor": torch.arange(6).reshape(2, 3),
        "turned": torch.arange(6).reshape(2, 3).T,
        "parameter": weight,
        "numpy": torch.arange(4).numpy(),
        "tuple": (1, [2]),
    }
    copy = copied(state)
    assert copy["list"] is copy["again"]
    assert type(copy["parameter"]) is torch.nn.Parameter
    assert copy["parameter"].requires_grad
    for name in ("tensor", "turned", "numpy"):
        copy[name][0] = 77
    copy["list"].append(3)
    copy["tuple"][1].append(3)
    with torch.no_grad():
        copy["parameter"][0] = 77
    assert state["tensor"].tolist() == [[0, 1, 2], [3, 4, 5]]  # type: ignore[attr-defined]
    assert state["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]  # type: ignore[attr-defined]
    assert state["numpy"].tolist() == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert (shared, state["tuple"], weight.tolist()) == ([1, 2], (1, [2]), [1.0, 1.0, 1.0])
    odd = copied({"odd": Unpicklable()})["odd"]
    odd.values.append(3)
    assert odd.values == [1, 2, 3]


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
    cheap = [FREE / 4] * 50
    assert paced(iter(cheap), 1e-6, 50) == list(range(50))
    assert paced(iter(cheap), 1e-6, 50, every=7) == list(range(0, 50, 7))
    interrupted = [10 * FREE, FREE / 4, FREE / 4, 1.0, *cheap]
    assert paced(iter(interrupted), 1e-6, 50) == list(range(50)), "one of them is no dear state"
    for every in (1, 7):
        dear = paced(iter([0.02] * 50), 0.001, 5000, every=every)
        assert dear[0] == 0
        assert dear[1] == pytest.approx(0.02 * (SHARE - 1) / 0.001, abs=2)
        assert len(dear) * 0.02 <= 5.0 / SHARE + 0.02
    assert paced(iter([0.02] * 50), 2.0, 50) == list(range(50)), "nobody waits for it"
    grows = paced(iter([FREE / 4, *[0.02] * 100]), 0.001, 5000)
    assert len(grows) < 30
    assert grows[-1] > 3000
