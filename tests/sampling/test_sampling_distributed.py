"""Ranks: together they have every index, also when their number changes within an epoch."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

from hybridloader import StateError
from hybridloader.sampling import DistributedShuffleSampler, ShuffleSampler

no_deadline = settings(deadline=None, max_examples=60)
counts, group_sizes = st.integers(0, 300), st.integers(1, 9)
kinds = st.sampled_from(["pad", "drop", "exact"])


def ranks(n: int, replicas: int, seed: int = 5, **options: Any) -> list[DistributedShuffleSampler]:
    return [
        DistributedShuffleSampler(n, seed, num_replicas=replicas, rank=rank, **options)
        for rank in range(replicas)
    ]


@no_deadline
@given(counts, group_sizes, st.booleans())
def test_padded_and_dropped_parts_are_torchs(n: int, replicas: int, drop: bool) -> None:
    if drop and n < replicas:
        n += replicas
    own = ranks(n, replicas, shuffle=False, uneven="drop" if drop else "pad")
    for rank, sampler in enumerate(own):
        data: Any = range(n)
        if not n:  # torch's divides by it
            assert (len(sampler), list(sampler)) == (0, [])
            continue
        theirs = DistributedSampler(data, replicas, rank, shuffle=False, drop_last=drop)
        assert list(sampler) == list(theirs)
        assert len(sampler) == len(theirs)


@no_deadline
@given(counts, group_sizes, st.integers(0, 3), kinds, st.booleans())
def test_ranks_take_turns_along_one_order(
    n: int, replicas: int, epoch: int, uneven: Any, shuffle: bool
) -> None:
    if uneven == "drop" and n < replicas:
        n += replicas
    whole = list(ShuffleSampler(n, 5, epoch=epoch)) if shuffle else list(range(n))
    parts = [list(s) for s in ranks(n, replicas, uneven=uneven, shuffle=shuffle, epoch=epoch)]
    full = {"pad": -(-n // replicas) * replicas, "drop": n // replicas * replicas, "exact": n}[
        uneven
    ]
    wanted = (whole * (full // max(n, 1) + 1))[:full]
    assert parts == [wanted[rank::replicas] for rank in range(replicas)]


@no_deadline
@given(counts, st.lists(st.tuples(group_sizes, st.integers(0, 40)), min_size=1, max_size=4), kinds)
def test_no_index_is_lost_or_doubled_when_the_number_of_ranks_changes(
    n: int, legs: list[tuple[int, int]], uneven: Any
) -> None:
    """Each leg is a number of ranks and how many steps they make; the last goes to the end."""
    largest = max(replicas for replicas, _ in legs)
    n += largest if uneven == "drop" else 0
    seen: Counter[int] = Counter()
    state = None
    for number, (replicas, steps) in enumerate(legs):
        samplers = ranks(n, replicas, uneven=uneven)
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
            if samplers[0].epoch:  # the one before has come to the end
                break
        for sampler in samplers:
            seen.update(islice(sampler, None if number == len(legs) - 1 else steps))
        state, *others = [sampler.state_dict() for sampler in samplers]
        assert all(other == state for other in others)
    lost, doubled = n - len(seen), sum(seen.values()) - len(seen)
    assert lost <= (largest - 1 if uneven == "drop" else 0)
    assert doubled <= (largest - 1 if uneven == "pad" else 0)


@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
@pytest.mark.parametrize("n", [64, 65, 66, 67])
def test_after_the_same_batch_every_rank_has_the_same_state(n: int, uneven: Any) -> None:
    samplers = ranks(n, 4, uneven=uneven)
    batches = [
        iter(torch.utils.data.BatchSampler(sampler, 4, drop_last=False)) for sampler in samplers
    ]
    steps = 0
    while [there for batch in batches if (there := next(batch, None))]:
        first, *others = [sampler.state_dict() for sampler in samplers]
        assert all(other == first for other in others)
        steps += 1
        ended = first["epoch"] == 1
        assert ended == (steps * 16 >= n or (uneven == "drop" and steps * 16 > n - 4))
    assert all(sampler.epoch == 1 for sampler in samplers)


def test_an_ended_epoch_is_one_with_any_number_of_ranks() -> None:
    (sampler,) = ranks(10, 1, uneven="drop")
    list(islice(sampler, 8))
    for part in ranks(10, 4, uneven="drop"):  # two are left, not enough for four ranks
        part.load_state_dict(sampler.state_dict())
        assert part.epoch == 1
        assert len(list(part)) == 2


def test_number_and_rank_are_those_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    sampler = DistributedShuffleSampler(100, 5)
    assert (sampler.rank, sampler.num_replicas) == (3, 8)
    assert list(sampler) == list(ranks(100, 8)[3])
    sampler = DistributedShuffleSampler(100, 5, rank=1)
    assert (sampler.rank, sampler.num_replicas) == (1, 8)


@pytest.mark.parametrize("given", [{}, {"rank": 0}, {"num_replicas": 2}])
def test_without_a_group_both_must_be_given(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized, from"):
        DistributedShuffleSampler(10, 0, **given)


legs_of_ranks = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 8))), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


@no_deadline
@given(st.integers(6, 80), legs_of_ranks, kinds, st.integers(1, 6), st.booleans())
def test_ranks_that_made_different_numbers_of_steps_leave_the_rest_to_others(
    n: int, legs: list[list[tuple[int, set[int]]]], uneven: Any, last: int, shuffle: bool
) -> None:
    """Each leg has the steps of each rank, and numbers of indices that it gives back."""
    seen: Counter[int] = Counter()
    state: Any = None
    for leg in legs:
        states, wanted = [], []
        for sampler, (steps, back) in zip(
            ranks(n, len(leg), uneven=uneven, shuffle=shuffle), leg, strict=True
        ):
            if state is not None:
                sampler.load_state_dict(state)
            begun = sampler.state_dict()
            own = list(islice(sampler, steps)) if begun["epoch"] == 0 else []
            seen.update(index for number, index in enumerate(own) if number not in back)
            states.append(begun if begun["epoch"] == 0 else None)
            wanted.append((sorted(k for k in back if k < len(own)), len(own)))
        merging = ranks(n, len(leg), uneven=uneven, shuffle=shuffle)[0]
        state = merging.merge_states(states, wanted)
        if state is None:
            break
    for sampler in ranks(n, last, uneven=uneven, shuffle=shuffle) if state is not None else ():
        sampler.load_state_dict(state)
        if sampler.epoch == 0:
            seen.update(sampler)
    if uneven == "exact":
        assert seen == Counter(range(n))
    elif uneven == "pad":
        assert set(seen) == set(range(n))
    else:
        assert set(seen.values()) <= {1}


def test_a_rest_is_refused_if_it_is_damaged_or_too_long_for_a_state() -> None:
    one = DistributedShuffleSampler(10**6, 5, num_replicas=2, rank=0)
    state: Any = one.merge_states([one.state_dict()] * 2, [((), 3), ((), 5)])
    for left in ([[2, "x", ""]], [[3, *state["left"][0][1:]]], [[2, "", ""]], 5):
        with pytest.raises(StateError, match="left"):
            one.load_state_dict({**state, "left": left})
    waits = sorted(random.Random(0).sample(range(400_000), 9000))
    with pytest.raises(StateError, match="take more than 7,000 characters"):
        one.merge_states([one.state_dict()] * 2, [(waits, 10**6), ((), 0)])
    with pytest.raises(StateError, match="epoch is 0 in the state of one rank and 1 in"):
        one.merge_states([one.state_dict(), {**one.state_dict(), "epoch": 1}])
