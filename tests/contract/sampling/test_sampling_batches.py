"""Batches by length: every sample once, within its bucket or its budget, in another order each time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader.sampling import BucketBatchSampler, TokenBudgetBatchSampler

no_deadline = settings(deadline=None, max_examples=150)
lengths_ = st.lists(
    st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 2**50)), max_size=200
)


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def skewed(n: int) -> Any:
    return np.minimum(np.random.default_rng(0).lognormal(5.5, 0.8, n).astype(np.int64) + 1, 8192)


@no_deadline
@given(
    lengths_,
    st.integers(1, 9),
    st.one_of(
        st.integers(1, 30),
        st.lists(st.integers(0, 3000), unique=True).map(sorted),
    ),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_buckets(
    lengths: list[int],
    batch_size: int,
    buckets: int | list[int],
    drop_last: bool,
    shuffle: bool,
    epoch: int,
) -> None:
    sampler = BucketBatchSampler(
        lengths,
        batch_size,
        buckets=buckets,
        seed=5,
        drop_last=drop_last,
        shuffle=shuffle,
        epoch=epoch,
    )
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert len(set(flat(batches))) == len(flat(batches)) == len(lengths) - sampler.left_out
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    given = [[lengths[index] for index in batch] for batch in batches]
    if isinstance(buckets, list):
        assert all(
            bisect_right(buckets, min(some)) == bisect_right(buckets, max(some)) for some in given
        )
    if drop_last:
        assert {len(batch) for batch in batches} <= {batch_size}
    else:
        assert sampler.left_out == 0
    if not shuffle:
        assert all(batch == sorted(batch) for batch in batches)
    elif not drop_last:
        plain = BucketBatchSampler(lengths, batch_size, buckets=buckets, seed=5, shuffle=False)
        assert sorted(map(len, plain)) == sorted(map(len, batches))


def test_a_number_of_buckets_makes_them_of_as_many_samples() -> None:
    plain = BucketBatchSampler(range(100), 10, buckets=4, seed=0, shuffle=False)
    spans = [(batch[0], batch[-1]) for batch in plain]
    assert spans == [
        (s + a, s + b) for s in (0, 25, 50, 75) for a, b in ((0, 9), (10, 19), (20, 24))
    ]
    lengths = skewed(10_000)
    ends = np.sort(lengths)[::1000].tolist()
    for batch in BucketBatchSampler(lengths, 10, buckets=10, seed=0):
        assert len({bisect_right(ends, length) for length in lengths[batch].tolist()}) == 1
    assert len(BucketBatchSampler([7] * 100, 10, buckets=4, seed=0)) == 10


def test_samples_and_batches_are_shuffled() -> None:
    """Whoever is first, in the first batch, or in a batch with sample 0, is so by chance."""
    sampler = BucketBatchSampler([1] * 20 + [9] * 20, 4, buckets=2, seed=0)
    first, beside, long_first = set(), set(), 0
    for _ in range(300):
        batches = list(sampler)
        first.add(batches[0][0])
        long_first += batches[0][0] >= 20
        beside |= set(next(batch for batch in batches if 0 in batch))
    assert first == set(range(40))
    assert beside == set(range(20))
    assert 110 < long_first < 190  # 150 expected, with a standard deviation of 8.7


@no_deadline
@given(
    lengths_,
    st.one_of(st.integers(1, 60), st.integers(1, 10_000), st.just(2**50)),
    st.one_of(st.none(), st.integers(1, 10)),
    st.booleans(),
    st.integers(0, 3),
)
def test_budgets(
    lengths: list[int], budget: int, max_size: int | None, shuffle: bool, epoch: int
) -> None:
    above = {index for index, length in enumerate(lengths) if length > budget}

    def make() -> TokenBudgetBatchSampler:
        return TokenBudgetBatchSampler(
            lengths, budget, max_size=max_size, seed=5, shuffle=shuffle, epoch=epoch
        )

    if above:
        with pytest.raises(ValueError, match=f"sample {min(above)} has length"):
            make()
        lengths = [min(length, budget) for length in lengths]
    sampler = make()
    batches = list(sampler)
    again = make()
    assert len(again) == len(batches)
    assert list(again) == batches
    assert sorted(flat(batches)) == [*range(len(lengths))]
    for batch in batches:
        assert 1 <= len(batch) <= (max_size or len(lengths))
        sizes = [lengths[index] for index in batch]
        assert max(sizes) * len(sizes) <= budget
        assert len(batch) == 1 or not above & {*batch}


def _sorted_and_filled(lengths: Any, budget: int) -> int:
    """The batches that sorting all samples and filling one batch after the other makes."""
    batches, size = 0, 0
    for length in np.sort(lengths).tolist():
        if not size or (size + 1) * length > budget:
            batches, size = batches + 1, 0
        size += 1
    return batches


@pytest.mark.parametrize("budget", [8192, 32_768])
def test_padded_batches_are_hardly_more_than_sorted_ones_and_hardly_padded(budget: int) -> None:
    lengths = skewed(100_000)
    sampler = TokenBudgetBatchSampler(lengths, budget, seed=0)
    assert len(sampler) <= 1.01 * _sorted_and_filled(lengths, budget)
    batches = list(sampler)
    costs = [int(lengths[batch].max()) * len(batch) for batch in batches]
    assert max(costs) <= budget
    assert 1 - lengths.sum() / sum(costs) < 0.03


def test_the_number_of_padded_batches_is_the_same_in_every_epoch_and_their_samples_are_not() -> (
    None
):
    lengths = skewed(2000)
    sampler = TokenBudgetBatchSampler(lengths, 8192, seed=0)
    epochs = [list(sampler) for _ in range(3)]
    assert {len(batches) for batches in epochs} == {len(sampler)}
    together = [{frozenset(batch) for batch in batches if len(batch) > 1} for batches in epochs]
    assert len(together[0] & together[1]) < 0.2 * len(together[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda lengths: BucketBatchSampler(lengths, 3, buckets=3, seed=0),
        lambda lengths: BucketBatchSampler(lengths, 3, buckets=range(4, 99, 4), seed=0),
        lambda lengths: TokenBudgetBatchSampler(lengths, 60, seed=0),
    ],
)
def test_lengths_may_come_in_any_form(make: Callable[[Any], Any]) -> None:
    lengths = [(7 * i) % 31 for i in range(60)]
    plain = make(lengths)
    batches, state = list(plain), plain.state_dict()
    for form in (
        tuple(lengths),
        np.array(lengths, np.uint8),
        np.array(lengths, np.uint64),
        np.array(lengths, ">i4"),
        np.repeat(lengths, 2)[::2],
        torch.tensor(lengths),
        torch.tensor(lengths, dtype=torch.int32),
    ):
        other = make(form)
        assert list(other) == batches
        assert other.state_dict() == state


def test_batches_are_pinned() -> None:
    lengths = [(7 * i) % 31 for i in range(12)]
    assert list(BucketBatchSampler(lengths, 4, buckets=2, seed=1)) == [
        [10, 6],
        [1, 0, 9, 5],
        [3, 2],
        [8, 4, 11, 7],
    ]
    assert list(TokenBudgetBatchSampler(lengths, 64, seed=1)) == [
        [6, 2, 11],
        [0, 9, 5, 1, 10],
        [8, 4],
        [7, 3],
    ]
