"""States of samplers and datasets: when they are taken, of what, and what is told if they can't be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.manual_clock import Clock
from support.sampler_loaders import listed, time_states
from support.state_cases import KEPT, LENGTH, Ordered

from hybridloader import DataLoader, StateError, StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NUMBERS: Any = range(LENGTH)


def loader_of(kind: str, where: tuple[int, str], ahead: int = 2) -> DataLoader:
    workers, backend = where
    more = {"prefetch_factor": ahead} if workers else {}
    return DataLoader(NUMBERS, num_workers=workers, backend=backend, **KEPT[kind](), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "where"),
    [(kind, ((0, "inline"), (2, "threads"))[at % 2]) for at, kind in enumerate(sorted(KEPT))],
)
def test_behind_the_last_batch_an_end_that_is_declared_is_followed_by_the_next_pass(
    kind: str, where: tuple[int, str]
) -> None:
    """End that accelerate declares while the iterator has not reached it."""
    uninterrupted = loader_of(kind, where)
    whole, following = listed(uninterrupted), listed(uninterrupted)
    loader = loader_of(kind, where)
    iterator = iter(loader)
    for _ in whole:
        next(iterator)
    state = loader.state_dict()
    rest = loader_of(kind, (0, "inline"))
    rest.load_state_dict(state)
    assert listed(rest) == []
    state["_iterator_finished"] = True
    other = loader_of(kind, where)
    other.load_state_dict(state)
    assert listed(other) == following


def test_what_is_asked_again_and_again_is_of_its_own_place_each_time(
    every: Callable[[int], None],
) -> None:
    every(4)
    whole = listed(loader_of("reordering", (0, "inline")))
    loader = loader_of("reordering", (2, "threads"), 4)
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    for count, state in enumerate(states[:-1]):
        other = loader_of("reordering", (0, "inline"))
        other.load_state_dict(state)
        assert listed(other) == whole[count:], count


class Untold(Ordered):
    """Sampler with both methods, whose `state_dict` raises."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not on this day")


class Locked(Ordered):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


@pytest.mark.parametrize(
    ("sampler", "why"), [(Untold, "RuntimeError: not on this day"), (Locked, "cannot pickle")]
)
def test_a_sampler_that_cannot_tell_its_state_fails_who_asks_for_it_alone(
    sampler: type[Ordered], why: str
) -> None:
    loader = DataLoader(NUMBERS, 4, sampler=sampler(), num_workers=2, backend="threads")
    iterator = iter(loader)
    batches = [next(iterator)]
    with pytest.raises(StateError, match=rf"the sampler \({sampler.__name__}\) could not.*{why}"):
        loader.state_dict()
    assert len([*batches, *iterator]) == 6


class Asked(Ordered):
    """Sampler that counts how often its state is taken, which takes time by its clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.asked = clock, seconds, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        self.clock.now += self.seconds
        return super().state_dict()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(("workers", "backend"), [(0, "inline"), (2, "threads")])
def test_nobody_asks_a_sampler_for_a_large_state_at_each_batch(
    workers: int, backend: str, kind: type[DataLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    time_states(monkeypatch, clock)
    whole = listed(loader_of("order", (0, "inline")))
    sampler = Asked(clock, 0.025)
    loader = kind(NUMBERS, 4, sampler=sampler, num_workers=workers, backend=backend)
    assert listed(loader) == whole
    assert sampler.asked == 2, "how the pass begins, and the first item"
    iterator = iter(loader)
    taken = listed([next(iterator), next(iterator)])
    asked = sampler.asked
    states = [loader.state_dict() for _ in range(5)]
    assert sampler.asked == asked, "who asks the loader does not ask the sampler"
    other = kind(NUMBERS, 4, sampler=Asked(clock, 0), num_workers=workers, backend=backend)
    other.load_state_dict(states[4])
    assert taken + listed(other) == whole


# -- of datasets -----------------------------------------------------------------------------------


class Module(torch.nn.Module):
    """Dataset that is a module: its state is its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(300_000.0))

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> float:
        return self.weight[index].item()


def test_a_module_is_resumed_from_a_copy_of_its_parameters() -> None:
    loader = DataLoader(Module(), 20, num_workers=2, backend="threads")  # type: ignore[arg-type]
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(7)]
    one = loader.state_dict()
    assert one["dataset_state"]["weight"].data_ptr() != loader.dataset.weight.data_ptr()
    other = DataLoader(Module(), 20, num_workers=2, backend="threads")  # type: ignore[arg-type]
    other.load_state_dict(one)
    assert torch.cat([*taken, *other]).tolist() == list(range(400))
