"""Blocks: each sample comes once, from few blocks at a time, also on ranks and after a resume."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader.errors import StateError
from hybridloader.sampling import (
    BlockShuffleSampler,
    DistributedShuffleSampler,
    Permutation,
    ResumableSampler,
)

few = settings(max_examples=60)
sizes = st.lists(st.integers(0, 12), max_size=12)
windows, group_sizes = st.integers(1, 14), st.integers(1, 5)


@pytest.fixture(autouse=True, scope="module")
def _short_blocks() -> Any:
    """Read an epoch in several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableSampler, "_BLOCK", 5)
        yield


def ranks(replicas: int, blocks: Any, **options: Any) -> list[BlockShuffleSampler]:
    return [
        BlockShuffleSampler(blocks, 7, num_replicas=replicas, rank=rank, **options)
        for rank in range(replicas)
    ]


@few
@given(
    sizes, windows, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5)), st.integers(0, 2)
)
def test_each_sample_comes_once(
    blocks: list[int], window: int, spans: int, block: int | None, epoch: int
) -> None:
    sampler = BlockShuffleSampler(
        blocks, 7, window_blocks=window, num_canonical_ranks=spans, block_size=block, epoch=epoch
    )
    assert sorted(sampler) == list(range(sum(blocks)))
    assert len(sampler) == sum(blocks)


@few
@given(sizes, windows)
def test_a_window_has_the_samples_of_its_blocks_alone(blocks: list[int], window: int) -> None:
    samples = iter(BlockShuffleSampler(blocks, 7, window_blocks=window))
    numbers = np.split(np.arange(sum(blocks)), np.cumsum(blocks)[:-1]) if blocks else []
    order = list(Permutation(len(blocks), 7, purpose="blocks"))
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


@few
@given(sizes, windows, group_sizes, st.integers(1, 3), st.sampled_from(["pad", "drop", "exact"]))
def test_ranks_have_equal_counts_in_the_words_of_the_other_samplers(
    blocks: list[int], window: int, replicas: int, factor: int, uneven: Any
) -> None:
    blocks = [*blocks, replicas]
    options = {"window_blocks": window, "uneven": uneven, "num_canonical_ranks": factor * replicas}
    parts = [list(sampler) for sampler in ranks(replicas, blocks, **options)]
    n = sum(blocks)
    others = [
        DistributedShuffleSampler(n, 7, num_replicas=replicas, rank=rank, uneven=uneven)
        for rank in range(replicas)
    ]
    assert [*map(len, parts)] == [*map(len, others)]
    seen = Counter(index for part in parts for index in part)
    assert len(seen) >= n - (replicas - 1 if uneven == "drop" else 0)
    assert sum(seen.values()) - len(seen) <= (replicas - 1 if uneven == "pad" else 0)


def test_ranks_read_different_blocks() -> None:
    parts = [{index // 20 for index in sampler} for sampler in ranks(4, [20] * 16, window_blocks=2)]
    assert [*map(len, parts)] == [4, 4, 4, 4]
    assert len(set.union(*parts)) == 16
    in_turn = [
        {index // 20 for index in s}
        for s in ranks(4, [20] * 16, window_blocks=2, num_canonical_ranks=1)
    ]
    assert [*map(len, in_turn)] == [16, 16, 16, 16]


@few
@given(
    sizes,
    st.integers(1, 6),
    st.lists(st.tuples(group_sizes, st.integers(0, 30)), min_size=1, max_size=4),
    st.sampled_from(["pad", "drop", "exact"]),
)
def test_the_order_goes_on_when_the_number_of_ranks_changes(
    blocks: list[int], spans: int, legs: list[tuple[int, int]], uneven: Any
) -> None:
    """Each leg is a number of ranks and how many steps they make; the last goes to the end."""
    blocks = [*blocks, 5]
    whole = list(BlockShuffleSampler(blocks, 7, window_blocks=2, num_canonical_ranks=spans))
    seen: list[int] = []
    state = None
    for number, (replicas, steps) in enumerate(legs):
        samplers = ranks(
            replicas, blocks, window_blocks=2, num_canonical_ranks=spans, uneven=uneven
        )
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
            if samplers[0].epoch:
                break
        last = number == len(legs) - 1
        parts = [list(islice(sampler, None if last else steps)) for sampler in samplers]
        most = max(map(len, parts))
        seen += [part[step] for step in range(most) for part in parts if step < len(part)]
        state = samplers[0].state_dict()
    n = min(len(seen), len(whole))
    assert seen[:n] == whole[:n]
    assert len(seen) >= len(whole) - 4


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


def test_a_dataset_may_know_its_blocks() -> None:
    class Known:
        block_sizes = np.array([2, 3])

    assert list(BlockShuffleSampler(Known(), 7)) == list(BlockShuffleSampler([2, 3], 7))


def test_number_and_rank_are_those_of_the_group_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = BlockShuffleSampler([4, 4], 7)
    assert (alone.rank, alone.num_replicas) == (0, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    sampler = BlockShuffleSampler([50, 50], 7)
    assert (sampler.rank, sampler.num_replicas, sampler.num_canonical_ranks) == (3, 8, 8)
