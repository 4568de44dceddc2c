"""Promises of all samplers: epochs, a position that can be saved, and states that are refused."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

import hybridloader
from hybridloader.sampling import (
    BlockShuffleSampler,
    DistributedShuffleSampler,
    ResumableSampler,
    ShuffleSampler,
    TokenBudgetBatchSampler,
    WeightedSampler,
)

LENGTHS = [(7 * i) % 31 for i in range(60)]
WEIGHTS = [0.0, *(1 + i % 3 for i in range(59))]


def _budget(**options: Any) -> TokenBudgetBatchSampler:
    return TokenBudgetBatchSampler(LENGTHS, 64, seed=3, **options)


MADE: dict[str, Callable[[], ResumableSampler[Any]]] = {
    "shuffle": lambda: ShuffleSampler(23, 3),
    "rank": lambda: DistributedShuffleSampler(60, 3, num_replicas=2, rank=1),
    "rank, drop": lambda: DistributedShuffleSampler(62, 3, num_replicas=3, rank=2, uneven="drop"),
    "rank, exact": lambda: DistributedShuffleSampler(61, 3, num_replicas=3, rank=0, uneven="exact"),
    "blocks": lambda: BlockShuffleSampler([9, 0, 7, 20, 13], 3, block_size=5, window_blocks=2),
    "blocks, rank": lambda: BlockShuffleSampler(
        [9, 7, 20, 13], 3, window_blocks=2, num_replicas=3, rank=1
    ),
    "blocks, no shuffle": lambda: BlockShuffleSampler(
        [9, 7, 20, 13], 3, num_replicas=2, rank=1, num_canonical_ranks=4, shuffle=False
    ),
    "weighted": lambda: WeightedSampler(WEIGHTS, 40, seed=3),
    "budget": _budget,
    "budget, no shuffle": lambda: _budget(shuffle=False),
}
SHUFFLED = [name for name in MADE if "no shuffle" not in name]

made = pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))


@pytest.fixture(scope="module", autouse=True)
def _short_blocks() -> Iterator[None]:
    """Read an epoch in several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableSampler, "_BLOCK", 7)
        patch.setattr("hybridloader.sampling.batching.TokenBudgetBatchSampler._BLOCK", 3)
        yield


def epochs(make: Callable[[], ResumableSampler[Any]], many: int = 3) -> list[list[Any]]:
    sampler = make()
    return [list(sampler) for _ in range(many)]


def advanced(make: Callable[[], ResumableSampler[Any]], k: int) -> ResumableSampler[Any]:
    """A sampler that has yielded `k` items."""
    sampler = make()
    assert len(list(islice(sampler, k))) == k
    return sampler


# Epochs


@made
def test_every_epoch_is_as_long_as_it_says_of_ints_and_another_if_shuffled(make: Any) -> None:
    sampler = make()
    for _ in range(3):
        said = len(sampler)
        items = list(sampler)
        assert len(items) == said
        flat = [i for item in items for i in (item if isinstance(item, list) else [item])]
        assert {type(index) for index in flat} == {int}
    first, second, third = epochs(make)
    if make in [MADE[name] for name in SHUFFLED]:
        assert first != second != third != first
    assert epochs(make) == [first, second, third]
    assert list(ShuffleSampler(23, 3, epoch=2)) == epochs(MADE["shuffle"])[2]


class Model:
    """A sampler as lists: what is drawn when, and which place is its state."""

    def __init__(self, make: Callable[[], ResumableSampler[Any]]) -> None:
        self.make = make
        self.lists: dict[int, list[Any]] = {}
        self.next = (0, 0)
        """Where the next iteration begins: its epoch, and how many items have come before."""
        self.last: list[int] | None = None
        """Place of the iteration that yielded last, until it ends."""

    def items(self, epoch: int) -> list[Any]:
        if epoch not in self.lists:
            sampler = self.make()
            sampler.set_epoch(epoch)
            self.lists[epoch] = list(sampler)
        return self.lists[epoch]

    @property
    def place(self) -> tuple[int, int]:
        """The end of an epoch is the beginning of the next one."""
        epoch, count = self.last or self.next
        ended = count and count == len(self.items(epoch))
        return (epoch + 1, 0) if ended else (epoch, count)

    def state(self) -> dict[str, Any]:
        """The state of a sampler that was only read up to there."""
        epoch, count = self.place
        sampler = self.make()
        sampler.set_epoch(epoch)
        assert len(list(islice(sampler, count))) == count
        return sampler.state_dict()

    def walk(self) -> Iterator[Any]:
        mine = self.last = [*self.next]
        self.next = (mine[0] + 1, 0)
        while mine[1] < len(self.items(mine[0])):
            mine[1] += 1
            self.last = mine
            yield self.items(mine[0])[mine[1] - 1]
        if self.last is mine:
            self.last = None

    def set_epoch(self, epoch: int) -> None:
        if self.next[0] != epoch:
            self.next = (epoch, 0)
        self.last = None

    def load(self, place: tuple[int, int]) -> None:
        self.next, self.last = place, None


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
STEPS = st.lists(
    st.tuples(st.sampled_from(["iter", "next", "next", "rest", "epoch", "load", "copy"]),
              st.integers(0, 20)),
    max_size=14,
)  # fmt: skip


@made
@settings(deadline=None, max_examples=30)
@given(STEPS)
def test_iterations_epochs_loads_and_copies_in_any_order_are_those_of_a_model(
    make: Callable[[], Any], steps: list[tuple[str, int]]
) -> None:
    sampler, model = make(), Model(make)
    walks: list[tuple[Iterator[Any], Iterator[Any]]] = []
    saved = [(sampler.state_dict(), model.place)]
    for step, number in steps:
        if step == "iter":  # which alone begins nothing
            walks.append((iter(sampler), model.walk()))
        elif step == "next" and walks:
            ours, theirs = walks[number % len(walks)]
            for _ in range(1 + number // 2):
                assert next(ours, None) == next(theirs, None)
        elif step == "rest" and walks:
            ours, theirs = walks[number % len(walks)]
            assert list(ours) == list(theirs)
        elif step == "epoch":
            sampler.set_epoch(number % 4)
            model.set_epoch(number % 4)
        elif step == "load":
            state, place = saved[number % len(saved)]
            sampler.load_state_dict(json.loads(json.dumps(state)))
            model.load(place)
        elif step == "copy":  # its running iterations stay with the other one
            sampler = COPIES[number % 2](sampler)
            model.last = model.last and [*model.last]
            walks.clear()
        assert sampler.state_dict() == model.state()
        assert sampler.epoch == (model.last or model.next)[0]
        saved.append((sampler.state_dict(), model.place))
    assert list(sampler) == list(model.walk())


@made
def test_batches_and_the_states_beside_them_are_those_of_torchs_batch_sampler(
    make: Callable[[], Any],
) -> None:
    for size, drop_last in product([1, 3, 7, 50], [False, True]):
        sampler, other = make(), make()
        for _ in range(2):
            torchs = iter(BatchSampler(sampler, size, drop_last))
            ours = other.batches(size, drop_last)
            # A difference of their lengths is one too: then a batch stands beside None.
            for one, another in zip_longest(torchs, ours):
                assert one == another
                assert sampler.state_dict() == other.state_dict()
            assert sampler.state_dict() == other.state_dict()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("make", [MADE[name] for name in ("shuffle", "rank, drop", "blocks")])
def test_batches_of_numbers_may_be_arrays(make: Callable[[], Any], drop_last: bool) -> None:
    lists, arrays = make(), make()
    for one, another in zip_longest(
        lists.batches(5, drop_last), arrays.batches(5, drop_last, arrays=True)
    ):
        assert another.dtype == np.int64
        assert another.tolist() == one
        assert arrays.state_dict() == lists.state_dict()


# States


@made
def test_a_sampler_goes_without_the_garbage_collector(make: Callable[[], Any]) -> None:
    sampler = make()
    next(iter(sampler))
    there = weakref.ref(sampler)
    gc.disable()
    try:
        del sampler
        assert there() is None
    finally:
        gc.enable()


# States that are refused


def _states(make: Callable[[], Any]) -> Iterator[tuple[Any, str]]:
    """Each wrong in one way, and what the message must say."""
    good = advanced(make, 5).state_dict()
    yield None, "is a dict, got NoneType"
    yield [1], "is a dict, got list"
    yield {}, "not the state of a"
    yield {"yielded": 5, "generator": [1]}, "it has generator, yielded"
    yield {**good, "sampler": "RandomSampler"}, "of a RandomSampler, not of a"
    yield {**good, "version": 2}, "version is 2 in the state, and this hybridloader reads 1"
    yield {**good, "more": 1}, "the state has more, which no state"
    for name in good:
        cut = {key: value for key, value in good.items() if key != name}
        yield (
            cut,
            "not the state"
            if name in ("version", "sampler")
            else f"lacks {name}: was it truncated",
        )
    for name, own in good.items():
        if name in ("version", "sampler", "epoch", "position"):
            continue
        for other in [not own] if isinstance(own, bool) else [-77, "x", None if own else 5]:
            yield {**good, name: other}, f"{name} is {other!r} in the state and "
        if isinstance(own, bool):
            yield {**good, name: int(own)}, f"{name} is {int(own)} in the state and {own}"
    for value in (-1, 10**9, "5", True, None, 5.0):
        yield {**good, "position": value}, f"position is {value!r} in the state"
    for value in (-1, 2**70, "5", True, None):
        yield {**good, "epoch": value}, f"epoch is {value!r} in the state"


@made
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(make: Callable[[], Any]) -> None:
    sampler = advanced(make, 3)
    before = sampler.state_dict()
    for state, says in _states(make):
        with pytest.raises(ValueError, match=r".") as caught:
            sampler.load_state_dict(state)
        assert says in str(caught.value), state
        assert sampler.state_dict() == before


def test_a_sampler_made_otherwise_refuses_the_state() -> None:
    def rank(**more: Any) -> Any:
        return DistributedShuffleSampler(10, 1, num_replicas=2, rank=0, **more)

    def budget(**more: Any) -> Any:
        return TokenBudgetBatchSampler([1, 2], 4, seed=0, **more)

    rows: list[tuple[ResumableSampler[Any], ResumableSampler[Any], str]] = [
        (ShuffleSampler(10, 1), ShuffleSampler(11, 1), "n is 10 in the state and 11 in this"),
        (ShuffleSampler(10, 1), ShuffleSampler(10, 2), "seed is 1 in the state and 2 in this"),
        (rank(), rank(shuffle=False), "shuffle is True in the state and False"),
        (budget(), TokenBudgetBatchSampler([1, 3], 4, seed=0), "lengths_crc32 is"),
        (budget(), budget(max_size=1), "max_size is None in the state and 1"),
        (WeightedSampler([1, 2], 4, seed=0), WeightedSampler([2, 1], 4, seed=0), "weights_crc32"),
        (ShuffleSampler(10, 1), rank(), "of a ShuffleSampler, not of a DistributedShuffleSampler"),
    ]
    for saved, loaded, says in rows:
        with pytest.raises(ValueError, match=says):
            loaded.load_state_dict(saved.state_dict())


def test_what_a_state_holds_is_pinned() -> None:
    sampler = advanced(MADE["rank"], 5)
    assert sampler.state_dict() == {
        "version": 1,
        "sampler": "DistributedShuffleSampler",
        "n": 60,
        "seed": 3,
        "shuffle": True,
        "epoch": 0,
        "position": 10,
    }


# Loaders


LOADERS: dict[str, Callable[..., Any]] = {
    "torch": partial(torch.utils.data.DataLoader, num_workers=2),
    "ours": partial(hybridloader.DataLoader, num_workers=2, backend="fork"),
}


def _delivered(loader: Any) -> list[Any]:
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize(
    ("kind", "name"), [("torch", "weighted"), ("ours", "rank, exact"), ("ours", "budget")]
)
def test_loaders_deliver_what_the_sampler_says(kind: str, name: str) -> None:
    make, load = MADE[name], LOADERS[kind]
    data = torch.utils.data.TensorDataset(torch.arange(64))
    sampler, plain = make(), epochs(make)
    if isinstance(plain[0][0], list):
        loader, size = load(data, batch_sampler=sampler), 1
        expected = plain
    else:
        size = 4
        loader = load(data, batch_size=size, sampler=sampler)
        expected = [[e[i : i + size] for i in range(0, len(e), size)] for e in plain]
    assert len(loader) == len(expected[0])
    assert _delivered(loader) == expected[0]
    assert _delivered(loader) == expected[1]
    sampler.load_state_dict(advanced(make, 2 * size).state_dict())
    assert _delivered(loader) == expected[0][2:]
    assert _delivered(loader) == expected[1]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("name", "workers"), [("rank, exact", 0), ("budget", 0), ("weighted", 2)])
def test_torchdatas_loader_saves_and_resumes(name: str, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = torch.utils.data.TensorDataset(torch.arange(64))

    def load() -> Any:
        sampler = MADE[name]()
        batched = isinstance(next(iter(MADE[name]())), list)
        given = {"batch_sampler": sampler} if batched else {"sampler": sampler, "batch_size": 4}
        return stateful.StatefulDataLoader(data, num_workers=workers, **given)

    loader, other = load(), load()
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    rest = _delivered(iterator)
    other.load_state_dict(state)
    assert _delivered(other) == rest
    assert _delivered(other) == _delivered(loader)
