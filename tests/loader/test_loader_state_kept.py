"""States of samplers and datasets: when they are taken, of what, and what is told if they can't be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
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


class Shrunk(Ordered):
    def __iter__(self) -> Iterator[int]:
        return iter(self.order[self.at : 13])


def test_a_sampler_that_gives_less_than_it_gave_is_found_out(every: Callable[[int], None]) -> None:
    every(9)
    loader = loader_of("order", (0, "inline"))
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    other = DataLoader(NUMBERS, 4, sampler=Shrunk())
    state = loader.state_dict()
    state["_hybridloader"]["samplers"][1] = "Shrunk"
    other.load_state_dict(state)
    with pytest.raises(StateError, match="returned 3 of the 4 items between"):
        iter(other)
