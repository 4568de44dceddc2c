"""States of samplers: when they are taken, and that the resumed stream is the uninterrupted one.

How often a state is taken depends on what it costs. Here that is set, to every so many steps, so that
most places lie between two states; the uninterrupted run is the oracle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manual_clock import Clock
from support.sampler_loaders import listed, pace, time_states
from torch.utils.data import BatchSampler, Sampler

from hybridloader import DataLoader, StateError, StatefulDataLoader
from hybridloader.sampling import ShuffleSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LENGTH = 23


# -- samplers --------------------------------------------------------------------------------------


class Ordered(Sampler[int]):
    """Sampler whose order is in its state; a pass begins where the last one was left."""

    def __init__(self) -> None:
        self.order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5)).tolist()
        self.at = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.at += 1
            yield self.order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}  # and not a copy of it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


class Reordering(Ordered):
    """Sampler that changes the list that it returned as its state."""

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            rest = self.order[self.at :]
            self.order[self.at :] = rest[1:] + rest[:1]
            yield index


class Drawing(Ordered):
    """Sampler that draws each index from a generator, which is its state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        for _ in super().__iter__():
            yield int(torch.randint(LENGTH, (), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


class Yielded(Ordered):
    """Sampler that counts its items until its next pass begins, as torchdata's distributed one."""

    def __init__(self) -> None:
        super().__init__()
        self.next: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.at, self.next = self.next or 0, None
        for index in self.order[self.at :]:
            self.at += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["yielded"]


class Walk:
    """Iterator over batches that has a state, while its sampler has none."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> list[int]:
        if self.at >= 6:
            raise StopIteration
        self.at += 1
        return [(self.at * 7 + n) % LENGTH for n in range(4)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Walking(Sampler[list[int]]):
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Walk:
        return Walk()


class OfBatches(BatchSampler):
    """Batch sampler whose state is that of its sampler."""

    def __init__(self) -> None:
        super().__init__(Ordered(), 4, False)

    def state_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = self.sampler.state_dict()  # type: ignore[attr-defined]
        return told

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)  # type: ignore[attr-defined]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "order": lambda: {"batch_size": 4, "sampler": Ordered()},
    "reordering": lambda: {"batch_size": 4, "sampler": Reordering()},
    "yielded": lambda: {"batch_size": 4, "sampler": Yielded()},
    "drawing": lambda: {"batch_size": 4, "sampler": Drawing()},
    "samples": lambda: {"batch_size": None, "sampler": Drawing()},
    "dropping": lambda: {"batch_size": 4, "sampler": Ordered(), "drop_last": True},
    "iterator": lambda: {"batch_sampler": Walking()},
    "batches": lambda: {"batch_sampler": OfBatches()},
    "ours": lambda: {"batch_size": 4, "sampler": ShuffleSampler(LENGTH, seed=2)},
}

NUMBERS: Any = range(LENGTH)
PLACES = st.sampled_from([(0, "inline"), (1, "threads"), (2, "inline"), (3, "threads")])


def loader_of(kind: str, where: tuple[int, str], ahead: int = 2) -> DataLoader:
    workers, backend = where
    more = {"prefetch_factor": ahead} if workers else {}
    return DataLoader(NUMBERS, num_workers=workers, backend=backend, **KINDS[kind](), **more)  # type: ignore[arg-type]


stops = st.lists(st.tuples(st.integers(0, 5), PLACES, st.integers(1, 4)), min_size=1, max_size=4)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 9), stops)
@settings(max_examples=100, deadline=None)
def test_stopped_anywhere_on_any_backend_the_stream_is_one(
    kind: str, steps: int, legs: list[tuple[int, tuple[int, str], int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pace(patch, steps)
        whole = listed(loader_of(kind, (0, "inline")))
        taken: list[Any] = []
        state: dict[str, Any] = {}
        for count, where, ahead in legs:
            loader = loader_of(kind, where, ahead)
            loader.load_state_dict(state)
            iterator = iter(loader)
            for _ in range(min(count, len(whole) - len(taken))):
                taken += listed([next(iterator)])
            state = loader.state_dict()
        last = loader_of(kind, (0, "inline"))
        last.load_state_dict(state)
        assert taken + listed(last) == whole
        if kind not in (
            "reordering",
            "drawing",
            "samples",
            "ours",
        ):  # no pass of which is as another
            assert listed(last) == whole
            assert_followed_by(whole, kind, last, (0, "inline"))
            assert_followed_by(whole, kind, loader, legs[-1][1])


def assert_followed_by(
    whole: list[Any], kind: str, loader: DataLoader, where: tuple[int, str]
) -> None:
    """The state at the end of an epoch is that of the beginning of the next."""
    list(loader)
    other = loader_of(kind, where)
    other.load_state_dict(loader.state_dict())
    assert [listed(other), listed(other)] == [whole, whole]


@pytest.mark.parametrize(
    ("kind", "where"),
    [(kind, ((0, "inline"), (2, "threads"))[at % 2]) for at, kind in enumerate(sorted(KINDS))],
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


def test_the_same_with_processes(every: Callable[[int], None]) -> None:
    kind = "reordering"
    every(3)
    whole = listed(loader_of(kind, (0, "inline")))
    for count in (1, 4, 6):
        loader = loader_of(kind, (2, "fork"))
        iterator = iter(loader)
        taken = listed(next(iterator) for _ in range(min(count, len(whole))))
        other = loader_of(kind, (1, "threads"))
        other.load_state_dict(loader.state_dict())
        assert taken + listed(other) == whole


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
