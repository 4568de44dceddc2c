"""Ranks and blocks: together they have every index, also if the number of ranks changes in an epoch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

from hybridloader import StateError
from hybridloader.sampling import (
    BlockShuffleSampler,
    DistributedShuffleSampler,
    Permutation,
    ResumableSampler,
    ShuffleSampler,
)

some = settings(deadline=None, max_examples=60)
counts, group_sizes = st.integers(0, 300), st.integers(1, 9)
sizes, windows = st.lists(st.integers(0, 12), max_size=12), st.integers(1, 14)
kinds = st.sampled_from(["pad", "drop", "exact"])


@pytest.fixture(autouse=True, scope="module")
def _short_blocks() -> Any:
    """Read an epoch in several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableSampler, "_BLOCK", 5)
        yield


def ranks(n: int, replicas: int, seed: int = 5, **options: Any) -> list[DistributedShuffleSampler]:
    return [
        DistributedShuffleSampler(n, seed, num_replicas=replicas, rank=rank, **options)
        for rank in range(replicas)
    ]


def block_ranks(blocks: Any, replicas: int, **options: Any) -> list[BlockShuffleSampler]:
    return [
        BlockShuffleSampler(blocks, 7, num_replicas=replicas, rank=rank, **options)
        for rank in range(replicas)
    ]


# -- one order -------------------------------------------------------------------------------------


@some
@given(counts, group_sizes, st.integers(0, 3), kinds, st.booleans())
def test_ranks_take_turns_along_one_order(
    n: int, replicas: int, epoch: int, uneven: Any, shuffle: bool
) -> None:
    if uneven == "drop" and n < replicas:
        n += replicas
    whole = list(ShuffleSampler(n, 5, epoch=epoch)) if shuffle else list(range(n))
    own = ranks(n, replicas, uneven=uneven, shuffle=shuffle, epoch=epoch)
    padded = -(-n // replicas) * replicas
    full = {"pad": padded, "drop": n // replicas * replicas, "exact": n}[uneven]
    wanted = (whole * (full // max(n, 1) + 1))[:full]
    parts = [list(sampler) for sampler in own]
    assert parts == [wanted[rank::replicas] for rank in range(replicas)]
    if n and uneven != "exact" and not shuffle:  # torch's divides by it
        for rank, part in enumerate(parts):
            data: Any = range(n)
            drop = uneven == "drop"
            theirs = DistributedSampler(data, replicas, rank, shuffle=False, drop_last=drop)
            assert part == list(theirs)
            assert len(own[rank]) == len(theirs)


@some
@given(
    sizes, windows, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5)), st.integers(0, 2)
)
def test_each_sample_of_the_blocks_comes_once(
    blocks: list[int], window: int, spans: int, block: int | None, epoch: int
) -> None:
    sampler = BlockShuffleSampler(
        blocks, 7, window_blocks=window, num_canonical_ranks=spans, block_size=block, epoch=epoch
    )
    assert sorted(sampler) == list(range(sum(blocks)))
    assert len(sampler) == sum(blocks)


@some
@given(sizes, windows)
def test_a_window_has_the_samples_of_its_blocks_alone(blocks: list[int], window: int) -> None:
    samples = iter(BlockShuffleSampler(blocks, 7, window_blocks=window))
    numbers = np.split(np.arange(sum(blocks)), np.cumsum(blocks)[:-1]) if blocks else []
    order = list(Permutation(len(blocks), 7, 0, purpose="blocks"))
    for first in range(0, len(order), window):
        wanted = [i for block in order[first : first + window] for i in numbers[block].tolist()]
        assert sorted(islice(samples, len(wanted))) == sorted(wanted)
    assert next(samples, None) is None


def test_samples_of_a_window_are_mixed_and_epochs_differ() -> None:
    sampler = BlockShuffleSampler([50] * 10, 7, window_blocks=5)
    first, second = list(sampler), list(sampler)
    assert first != second
    blocks = [index // 50 for index in first]
    assert len({*blocks[:20]}) >= 4
    assert len({*blocks[:250]}) == 5
    assert first[:250] != sorted(first[:250])
    whole = list(BlockShuffleSampler([10] * 10, 7, window_blocks=10))
    assert len({index // 10 for index in whole[:20]}) >= 6


@some
@given(sizes, windows, st.integers(1, 5), st.integers(1, 3), kinds)
def test_ranks_with_blocks_have_equal_counts_in_the_words_of_the_other_sampler(
    blocks: list[int], window: int, replicas: int, factor: int, uneven: Any
) -> None:
    blocks = [*blocks, replicas]
    options = {"window_blocks": window, "uneven": uneven, "num_canonical_ranks": factor * replicas}
    parts = [list(sampler) for sampler in block_ranks(blocks, replicas, **options)]
    n = sum(blocks)
    assert [*map(len, parts)] == [*map(len, ranks(n, replicas, uneven=uneven))]
    seen = Counter(index for part in parts for index in part)
    assert len(seen) >= n - (replicas - 1 if uneven == "drop" else 0)
    assert sum(seen.values()) - len(seen) <= (replicas - 1 if uneven == "pad" else 0)


def test_ranks_read_different_blocks_and_without_shuffling_each_span_in_order() -> None:
    def read(**options: Any) -> list[set[int]]:
        samplers = block_ranks([20] * 16, 4, window_blocks=2, **options)
        return [{index // 20 for index in sampler} for sampler in samplers]

    parts = read()
    assert [*map(len, parts)] == [4, 4, 4, 4]
    assert len(set.union(*parts)) == 16
    assert [*map(len, read(num_canonical_ranks=1))] == [16, 16, 16, 16]
    plain = [list(sampler) for sampler in block_ranks([3, 3, 4], 2, shuffle=False)]
    assert plain == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


# -- another number of ranks -----------------------------------------------------------------------


def resumed(legs: list[tuple[int, int]], made: Callable[[int], list[Any]]) -> list[int]:
    """What all ranks give. A leg is a number of ranks and their steps; the last goes to the end."""
    seen: list[int] = []
    state = None
    for number, (replicas, steps) in enumerate(legs):
        samplers = made(replicas)
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
            if samplers[0].epoch:  # the one before has come to the end
                break
        last = number == len(legs) - 1
        parts = [list(islice(sampler, None if last else steps)) for sampler in samplers]
        most = max(map(len, parts))
        seen += [part[step] for step in range(most) for part in parts if step < len(part)]
        state, *others = [sampler.state_dict() for sampler in samplers]
        assert all(other == state for other in others)
    return seen


some_legs = st.lists(st.tuples(group_sizes, st.integers(0, 40)), min_size=1, max_size=4)


@some
@given(counts, some_legs, kinds)
def test_no_index_is_lost_or_doubled_when_the_number_of_ranks_changes(
    n: int, legs: list[tuple[int, int]], uneven: Any
) -> None:
    largest = max(replicas for replicas, _ in legs)
    n += largest if uneven == "drop" else 0
    seen = Counter(resumed(legs, lambda replicas: ranks(n, replicas, uneven=uneven)))
    lost, doubled = n - len(seen), sum(seen.values()) - len(seen)
    assert lost <= (largest - 1 if uneven == "drop" else 0)
    assert doubled <= (largest - 1 if uneven == "pad" else 0)


@some
@given(sizes, st.integers(1, 6), some_legs, kinds)
def test_the_order_of_blocks_goes_on_when_the_number_of_ranks_changes(
    blocks: list[int], spans: int, legs: list[tuple[int, int]], uneven: Any
) -> None:
    blocks = [*blocks, 9]
    options = {"window_blocks": 2, "num_canonical_ranks": spans}
    whole = list(BlockShuffleSampler(blocks, 7, **options))  # type: ignore[arg-type]
    seen = resumed(legs, lambda count: block_ranks(blocks, count, uneven=uneven, **options))
    n = min(len(seen), len(whole))
    assert seen[:n] == whole[:n]
    assert len(seen) >= len(whole) - 8


legs_of_ranks = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 8))), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


@some
@given(st.integers(6, 80), legs_of_ranks, kinds, st.integers(1, 6), st.booleans())
def test_ranks_that_made_different_numbers_of_steps_leave_the_rest_to_others(
    n: int, legs: list[list[tuple[int, set[int]]]], uneven: Any, last: int, shuffle: bool
) -> None:
    """Each leg has the steps of each rank, and numbers of indices that it gives back."""
    seen: Counter[int] = Counter()
    state: Any = None
    for leg in legs:
        states, wanted = [], []
        samplers = ranks(n, len(leg), uneven=uneven, shuffle=shuffle)
        for sampler, (steps, back) in zip(samplers, leg, strict=True):
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


# -- what is refused, and defaults -----------------------------------------------------------------


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


def test_another_division_into_blocks_is_refused() -> None:
    sampler = BlockShuffleSampler([4, 4], 7)
    next(iter(sampler))
    state = sampler.state_dict()
    for other, name in [
        (BlockShuffleSampler([3, 5], 7), "blocks_crc32"),
        (BlockShuffleSampler([4, 4], 7, block_size=2), "blocks_crc32"),
        (BlockShuffleSampler([4, 4], 7, window_blocks=2), "window_blocks"),
        (BlockShuffleSampler([4, 4], 7, num_canonical_ranks=2), "num_canonical_ranks"),
    ]:
        with pytest.raises(StateError, match=name):
            other.load_state_dict(state)


class Known:
    """A dataset that knows its blocks."""

    block_sizes = np.array([2, 3])


def test_number_and_rank_are_those_of_the_group_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(BlockShuffleSampler(Known(), 7)) == list(BlockShuffleSampler([2, 3], 7))
    alone = BlockShuffleSampler([4, 4], 7)
    assert (alone.rank, alone.num_replicas) == (0, 1)
    for given_alone in ({}, {"rank": 0}, {"num_replicas": 2}):
        with pytest.raises(ValueError, match=r"torch\.distributed is not initialized, from"):
            DistributedShuffleSampler(10, 0, **given_alone)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    blocks = BlockShuffleSampler([50, 50], 7)
    assert (blocks.rank, blocks.num_replicas, blocks.num_canonical_ranks) == (3, 8, 8)
    sampler = DistributedShuffleSampler(100, 5)
    assert (sampler.rank, sampler.num_replicas) == (3, 8)
    assert list(sampler) == list(ranks(100, 8)[3])
    sampler = DistributedShuffleSampler(100, 5, rank=1)
    assert (sampler.rank, sampler.num_replicas) == (1, 8)
