"""Batches by length: every sample once, within its budget, in another order each time."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader.sampling import TokenBudgetBatchSampler

no_deadline = settings(deadline=None, max_examples=150)
lengths_ = st.lists(
    st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 2**50)), max_size=200
)


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def skewed(n: int) -> Any:
    return np.minimum(np.random.default_rng(0).lognormal(5.5, 0.8, n).astype(np.int64) + 1, 8192)


def test_samples_and_batches_are_shuffled() -> None:
    """Whoever is first, in the first batch, or in a batch with sample 0, is so by chance."""
    sampler = TokenBudgetBatchSampler([1] * 20 + [9] * 20, 36, max_size=4, seed=0)
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


def test_a_size_without_a_budget_makes_batches_of_that_size_of_similar_length() -> None:
    lengths = skewed(10_000)
    batches = list(TokenBudgetBatchSampler(lengths, 2**40, max_size=32, seed=0))
    assert [len(batch) for batch in batches].count(32) >= len(batches) - 1
    costs = [int(lengths[batch].max()) * len(batch) for batch in batches]
    assert 1 - lengths.sum() / sum(costs) < 0.06


def test_lengths_may_come_in_any_form() -> None:
    lengths = [(7 * i) % 31 for i in range(60)]
    make = partial(TokenBudgetBatchSampler, max_cost=60, seed=0)
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
    assert list(TokenBudgetBatchSampler(lengths, 64, seed=1)) == [
        [6, 2, 11],
        [0, 9, 5, 1, 10],
        [8, 4],
        [7, 3],
    ]
    lengths = [*range(30, 36), 40, 60, 63, 64, 70, 100, 101, 104, 110, 120]  # classes of several
    assert list(TokenBudgetBatchSampler(lengths, 250, seed=1)) == [
        [6, 7, 8],
        [13, 14],
        [0, 1, 3, 2, 4, 5],
        [15],
        [11, 12],
        [9, 10],
    ]
