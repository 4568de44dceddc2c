"""Copies of states: what they share, and when one is made anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.sampler_loaders import Every

from hybridloader._support.states import Frozen, Kept, copied


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


def test_a_state_that_has_not_changed_is_not_copied_again_while_that_is_dear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hybridloader._support import states

    monkeypatch.setattr(states, "Cadence", lambda: Every(100))
    module = torch.nn.BatchNorm1d(3)
    latest = states.Latest()
    first = latest.copy(module.state_dict())
    assert latest.copy(module.state_dict()) is first
    for change in (
        lambda: module.train()(torch.randn(4, 3)),
        lambda: torch.optim.SGD([module.weight], 1.0).step(module.weight.sum().backward),
        lambda: setattr(module.weight, "data", torch.zeros(3)),
        lambda: module.load_state_dict(torch.nn.BatchNorm1d(3).state_dict()),
    ):
        change()
        found = latest.copy(module.state_dict())
        assert found is not first
        assert all(torch.equal(found[n], value) for n, value in module.state_dict().items())
        first = found
    assert latest.copy({"order": [1, 2]}) == {"order": [1, 2]}
    assert latest.copy({"order": [1, 3]}) == {"order": [1, 3]}


def test_a_state_that_is_cheap_is_of_each_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridloader._support import states

    monkeypatch.setattr(states, "Cadence", lambda: Every(1))
    latest, state = states.Latest(), {"order": [1, 2]}
    one = latest.copy(state)
    assert latest.copy(state) is not one


@pytest.mark.parametrize("kind", [Kept, Frozen])
def test_what_is_dear_to_copy_is_given_to_all_who_ask_and_what_is_not_to_each(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    from hybridloader._support import states

    state = {"order": [3, 1, 2]}
    held = kind(state if kind is Kept else pickle.dumps(state))
    monkeypatch.setattr(states, "EXPENSIVE", 60.0)  # on a busy machine, too
    first = held.given()
    first["order"].append(4)
    assert held.given() == state
    monkeypatch.setattr(states, "EXPENSIVE", -1.0)
    dear = held.given()
    assert held.given() is dear
    dear["order"].append(4)
    kept = held.kept if kind is Kept else pickle.loads(held.kept)
    assert kept == state, "what is gone on from is nobody's"
