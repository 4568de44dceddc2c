"""Promises of all samplers: epochs, a position that can be saved, and states that are refused."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable, Iterator
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
    BucketBatchSampler,
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
    "rank, no shuffle": lambda: DistributedShuffleSampler(
        60, 3, num_replicas=2, rank=1, shuffle=False
    ),
    "rank, uneven": lambda: DistributedShuffleSampler(61, 3, num_replicas=3, rank=2),
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
    "weighted, once": lambda: WeightedSampler(WEIGHTS, 40, replacement=False, seed=3),
    "buckets": lambda: BucketBatchSampler(LENGTHS, 4, buckets=3, seed=3),
    "buckets, no shuffle": lambda: BucketBatchSampler(LENGTHS, 4, width=9, seed=3, shuffle=False),
    "budget": _budget,
    "budget, packed": lambda: _budget(padded=False),
    "budget, no shuffle": lambda: _budget(shuffle=False),
}
SHUFFLED = [name for name in MADE if "no shuffle" not in name]

made = pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))
no_deadline = settings(deadline=None, max_examples=30)


@pytest.fixture(scope="module", autouse=True)
def _short_blocks() -> Iterator[None]:
    """Read an epoch in several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableSampler, "_BLOCK", 7)
        patch.setattr("hybridloader.sampling.batching.PlannedBatchSampler._BLOCK", 3)
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
def test_an_epoch_is_as_long_as_it_says_and_of_ints(make: Callable[[], Any]) -> None:
    sampler = make()
    for _ in range(3):
        said = len(sampler)
        items = list(sampler)
        assert len(items) == said
        flat = [i for item in items for i in (item if isinstance(item, list) else [item])]
        assert {type(index) for index in flat} == {int}


@pytest.mark.parametrize("name", SHUFFLED)
def test_every_iteration_is_another_epoch(name: str) -> None:
    first, second, third = epochs(MADE[name])
    assert first != second != third != first
    assert epochs(MADE[name]) == [first, second, third]


@made
def test_set_epoch_goes_where_it_says_and_on_from_there(make: Callable[[], Any]) -> None:
    plain, sampler = epochs(make), make()
    sampler.set_epoch(2)
    assert sampler.epoch == 2
    assert list(sampler) == plain[2]
    assert sampler.epoch == 3
    sampler.set_epoch(1)
    sampler.set_epoch(1)
    assert [list(sampler), list(sampler)] == plain[1:]


@made
def test_an_iteration_that_was_left_is_an_epoch_too(make: Callable[[], Any]) -> None:
    plain, sampler = epochs(make), make()
    assert next(iter(sampler)) == plain[0][0]
    assert sampler.epoch == 0
    assert list(sampler) == plain[1]


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


def test_the_state_is_that_of_the_batches_that_were_drawn_last() -> None:
    sampler = ShuffleSampler(23, 3)
    first, second = sampler.batches(4, False), sampler.batches(4, False)
    for batches, place in [(first, (0, 4)), (second, (1, 4)), (first, (0, 8)), (second, (1, 8))]:
        next(batches)
        state = sampler.state_dict()
        assert (state["epoch"], state["position"]) == place


@made
def test_iter_alone_begins_nothing(make: Callable[[], Any]) -> None:
    plain, sampler = epochs(make), make()
    unused = [iter(sampler) for _ in range(3)]
    assert sampler.state_dict() == make().state_dict()
    assert list(sampler) == plain[0]
    assert [list(iterator) for iterator in unused[:2]] == plain[1:]


def test_the_first_epoch_can_be_given() -> None:
    plain = epochs(MADE["shuffle"])
    assert list(ShuffleSampler(23, 3, epoch=2)) == plain[2]


# States


@made
@no_deadline
@given(data=st.data())
def test_going_on_at_any_place_gives_what_would_have_come(
    make: Callable[[], Any], data: st.DataObject
) -> None:
    plain = epochs(make)
    k = data.draw(st.integers(0, len(plain[0])))
    state = json.loads(json.dumps(advanced(make, k).state_dict()))
    sampler = make()
    for _ in range(data.draw(st.integers(1, 2))):
        sampler.load_state_dict(state)
    ahead = [] if k == len(plain[0]) else [plain[0][k:]]
    if ahead:
        assert sampler.state_dict() == state
    for expected in [*ahead, *plain[1:]]:
        assert list(sampler) == expected


@made
def test_at_the_end_the_next_epoch_comes_and_once(make: Callable[[], Any]) -> None:
    plain = epochs(make)
    exhausted = advanced(make, len(plain[0]))
    ended = make()
    assert list(ended) == plain[0]
    assert exhausted.state_dict() == ended.state_dict()
    for state in (exhausted.state_dict(), ended.state_dict()):
        sampler = make()
        sampler.load_state_dict(state)
        sampler.load_state_dict(state)
        assert sampler.epoch == 1
        assert [list(sampler), list(sampler)] == plain[1:]


@made
def test_a_loader_may_call_iter_twice_after_a_load(make: Callable[[], Any]) -> None:
    plain, sampler = epochs(make), make()
    sampler.load_state_dict(advanced(make, 5).state_dict())
    iter(sampler)
    assert list(iter(sampler)) == plain[0][5:]
    assert list(sampler) == plain[1]


@made
def test_a_place_goes_on_being_counted_after_a_load(make: Callable[[], Any]) -> None:
    sampler = make()
    sampler.load_state_dict(advanced(make, 5).state_dict())
    list(islice(sampler, 4))
    assert sampler.state_dict() == advanced(make, 9).state_dict()


@made
def test_a_load_comes_before_what_is_under_way(make: Callable[[], Any]) -> None:
    plain, state = epochs(make), advanced(make, 5).state_dict()
    sampler = make()
    sampler.set_epoch(1)
    under_way = iter(sampler)
    next(under_way)
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state
    assert sampler.epoch == 0
    assert [next(under_way), *islice(under_way, 2)] == plain[1][1:4]
    assert list(sampler) == plain[0][5:]


@made
def test_set_epoch_keeps_a_loaded_place_of_that_epoch_only(make: Callable[[], Any]) -> None:
    plain, state = epochs(make), advanced(make, 5).state_dict()
    sampler = make()
    sampler.load_state_dict(state)
    sampler.set_epoch(0)
    assert sampler.state_dict() == state
    assert list(sampler) == plain[0][5:]
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    assert list(sampler) == plain[1]


@made
def test_the_state_is_that_of_the_iterator_that_yielded_last(make: Callable[[], Any]) -> None:
    sampler = make()
    old = iter(sampler)
    list(islice(old, 3))
    new = iter(sampler)
    next(new)
    assert (sampler.state_dict()["epoch"], sampler.epoch) == (1, 1)
    next(old)
    assert sampler.state_dict() == advanced(make, 4).state_dict()
    sampler.set_epoch(7)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (7, 0)
    next(old)
    assert sampler.state_dict() == advanced(make, 5).state_dict()
    list(old)
    assert sampler.epoch == 7


@made
def test_an_exhausted_iterator_stays_so(make: Callable[[], Any]) -> None:
    sampler = make()
    iterator = iter(sampler)
    list(iterator)
    state = sampler.state_dict()
    assert list(iterator) == []
    assert sampler.state_dict() == state
    other = iter(sampler)
    next(other)
    state = sampler.state_dict()
    assert list(iterator) == []
    assert sampler.state_dict() == state


@made
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_is_at_the_same_place(make: Callable[[], Any], copied: Callable[..., Any]) -> None:
    plain, sampler = epochs(make), advanced(make, 5)
    twin = copied(sampler)
    assert twin.state_dict() == sampler.state_dict()
    assert list(twin) == list(sampler) == plain[1]
    twin.load_state_dict(advanced(make, 5).state_dict())
    assert list(copied(twin)) == plain[0][5:]


def test_a_pickle_of_a_planned_sampler_is_without_its_plan() -> None:
    for sampler in (
        BucketBatchSampler([1] * 100_000, 4, buckets=1, seed=0),
        WeightedSampler(np.ones(100_000), 10_000, replacement=False, seed=0),
    ):
        before = len(pickle.dumps(sampler))
        next(iter(sampler))
        assert len(pickle.dumps(sampler)) < before + 1000


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


@pytest.mark.parametrize(
    ("saved", "loaded", "says"),
    [
        (ShuffleSampler(10, 1), ShuffleSampler(11, 1), "n is 10 in the state and 11 in this"),
        (ShuffleSampler(10, 1), ShuffleSampler(10, 2), "seed is 1 in the state and 2 in this"),
        (
            DistributedShuffleSampler(10, 1, num_replicas=2, rank=0),
            DistributedShuffleSampler(10, 1, num_replicas=2, rank=0, shuffle=False),
            "shuffle is True in the state and False",
        ),
        (
            BucketBatchSampler([1, 2], 1, width=1, seed=0),
            BucketBatchSampler([1, 2], 1, width=2, seed=0),
            "width is 1 in the state and 2",
        ),
        (
            BucketBatchSampler([1, 2], 1, buckets=[1], seed=0),
            BucketBatchSampler([1, 2], 1, buckets=[2], seed=0),
            r"buckets is \[1\] in the state and \[2\]",
        ),
        (
            BucketBatchSampler([1, 2], 1, width=1, seed=0),
            BucketBatchSampler([1, 3], 1, width=1, seed=0),
            "lengths_crc32 is",
        ),
        (
            TokenBudgetBatchSampler([1, 2], 4, seed=0),
            TokenBudgetBatchSampler([1, 2], 4, seed=0, max_size=1),
            "max_size is None in the state and 1",
        ),
        (
            WeightedSampler([1, 2], 4, seed=0),
            WeightedSampler([2, 1], 4, seed=0),
            "weights_crc32 is",
        ),
        (
            ShuffleSampler(10, 1),
            DistributedShuffleSampler(10, 1, num_replicas=1, rank=0),
            "of a ShuffleSampler, not of a DistributedShuffleSampler",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_sampler_made_otherwise_refuses_the_state(
    saved: ResumableSampler[Any], loaded: ResumableSampler[Any], says: str
) -> None:
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
    "torch": torch.utils.data.DataLoader,
    "torch, workers": lambda *a, **k: torch.utils.data.DataLoader(*a, num_workers=2, **k),
    "inline": lambda *a, **k: hybridloader.DataLoader(*a, **k),
    "threads": lambda *a, **k: hybridloader.DataLoader(*a, num_workers=2, backend="threads", **k),
    "fork": lambda *a, **k: hybridloader.DataLoader(*a, num_workers=2, backend="fork", **k),
}


def _delivered(loader: Any) -> list[Any]:
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("load", LOADERS.values(), ids=list(LOADERS))
@pytest.mark.parametrize(
    "name", ["shuffle", "rank, exact", "weighted", "buckets", "budget, packed"]
)
def test_loaders_deliver_what_the_sampler_says(load: Callable[..., Any], name: str) -> None:
    make = MADE[name]
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


@pytest.mark.parametrize("load", LOADERS.values(), ids=list(LOADERS))
def test_a_loader_without_batches_resumes_too(load: Callable[..., Any]) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(64))
    sampler, plain = MADE["shuffle"](), epochs(MADE["shuffle"])
    loader = load(data, batch_size=None, sampler=sampler)
    sampler.load_state_dict(advanced(MADE["shuffle"], 5).state_dict())
    assert _delivered(loader) == plain[0][5:]
    assert _delivered(loader) == plain[1]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loader_saves_and_resumes() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = torch.utils.data.TensorDataset(torch.arange(64))
    for name, make in MADE.items():
        for workers in (0, 2):
            first, second = (
                {"batch_sampler": sampler}
                if isinstance(next(iter(make())), list)
                else {"sampler": sampler, "batch_size": 4}
                for sampler in (make(), make())
            )
            loader = stateful.StatefulDataLoader(data, num_workers=workers, **first)
            iterator = iter(loader)
            for _ in range(2):
                next(iterator)
            state = loader.state_dict()
            rest = _delivered(iterator)
            other = stateful.StatefulDataLoader(data, num_workers=workers, **second)
            other.load_state_dict(state)
            assert _delivered(other) == rest, name
            assert _delivered(other) == _delivered(loader), name
