"""Draws by weight: their frequencies, also where torch's fail, and which they are."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import scipy  # `scipy.stats`, which takes a second to import, is loaded when it is first used
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader.sampling import WeightedSampler

no_deadline = settings(deadline=None)
BELOW = 1e-4
"""A p-value that tells a fault; seeds are fixed, so none changes."""

some_weights = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1), st.floats(0, 1e300), st.floats(1e-320, 1e-300)),
    min_size=1,
    max_size=700,
).filter(any)


def drawn(sampler: WeightedSampler) -> npt.NDArray[np.int64]:
    return np.fromiter(sampler, np.int64, len(sampler))


def p_of(observed: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]) -> float:
    expected = weights / weights.sum() * observed.sum()
    assert not observed[expected == 0].any()
    there = expected > 0
    return float(scipy.stats.chisquare(observed[there], expected[there]).pvalue)


FINE = 1 << 16
DRAWS = [*WeightedSampler(np.ones(FINE), 60, seed=1)]
"""The draws of a seed to 16 bits: indices of as many equal shares."""


@settings(deadline=None, max_examples=60)
@given(some_weights)
def test_a_draw_finds_the_category_that_its_share_of_the_sum_falls_into(
    weights: list[float],
) -> None:
    sums = list(itertools.accumulate(map(Fraction, weights), initial=Fraction()))
    slack = sums[-1] * len(weights) / 2**52
    found = WeightedSampler(weights, len(DRAWS), seed=1)
    for draw, category in zip(DRAWS, found, strict=True):
        assert weights[category] > 0
        assert sums[category] - slack <= sums[-1] * (draw + 1) / FINE
        assert sums[-1] * draw / FINE < sums[category + 1] + slack


def test_draws_are_pinned() -> None:
    weights = [1.0, 0.0, 2.5, 4.0]
    assert list(WeightedSampler(weights, 8, seed=1)) == [2, 3, 3, 2, 3, 2, 0, 3]
    far = WeightedSampler(weights, 2**62, seed=1)
    for position, draws in ((2**61, [3, 3]), (2**62 - 1, [2])):
        far.load_state_dict({**far.state_dict(), "epoch": 0, "position": position})
        assert list(itertools.islice(far, 2)) == draws


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 5000, 1_000_000])
def test_frequencies_are_the_weights(n: int) -> None:
    weights = np.random.default_rng(n).random(n) ** 4
    weights[: n // 3] = 0
    observed = np.bincount(drawn(WeightedSampler(weights, 1_000_000, seed=1)), minlength=n)
    if n > 5000:  # enough draws of each for chi-square
        observed, weights = observed.reshape(2000, -1).sum(1), weights.reshape(2000, -1).sum(1)
    if n > 1:
        assert p_of(observed, weights) > BELOW
    assert observed.sum() == 1_000_000


def _two_halves(n: int, dtype: torch.dtype) -> torch.Tensor:
    """The upper half is a third of the sum: the example of pytorch issue 43115."""
    weights = torch.ones(n, dtype=dtype)
    weights[: n // 2] = 2
    return weights


def test_beyond_what_torch_draws_from() -> None:
    n = 2**24 + 2
    weights = _two_halves(n, torch.float32)
    with pytest.raises(RuntimeError, match="number of categories cannot exceed"):
        list(torch.utils.data.WeightedRandomSampler(weights, 10))  # type: ignore[arg-type]
    upper = int((drawn(WeightedSampler(weights, 200_000, seed=1)) >= n // 2).sum())
    assert scipy.stats.binomtest(upper, 200_000, 1 / 3).pvalue > BELOW


def test_epochs_and_neighboring_draws_are_unrelated() -> None:
    sampler = WeightedSampler(np.ones(64), 400_000, seed=1)
    first, second = drawn(sampler), drawn(sampler)
    for a, b in ((first, second), (first[:-1], first[1:]), (first[::2], second[1::2])):
        assert scipy.stats.chisquare(np.bincount(a * 64 + b, minlength=64 * 64)).pvalue > BELOW


def test_small_weights_are_not_lost_in_a_large_sum() -> None:
    """One after the other in float32, 2^24 + 1 is 2^24, and nothing after it would be drawn."""
    weights = np.ones(3_000_000)
    weights[0] = 2.0**24
    upper = int((drawn(WeightedSampler(weights, 100_000, seed=1)) >= 1).sum())
    share = 2_999_999 / (2**24 + 2_999_999)
    assert scipy.stats.binomtest(upper, 100_000, share).pvalue > BELOW


def test_weights_may_come_in_any_form() -> None:
    plain = list(WeightedSampler([1, 2, 0, 3], 50, seed=1))
    for weights in (
        (1, 2, 0, 3),
        np.array([1, 2, 0, 3], np.uint8),
        np.array([1, 2, 0, 3], np.float16),
        np.array([1, 9, 2, 9, 0, 9, 3])[::2],
        torch.tensor([1, 2, 0, 3]),
        torch.tensor([1.0, 2, 0, 3], dtype=torch.bfloat16, requires_grad=True),
        np.array([1, 2, 0, 3]) * 1e-310,
        np.array([1, 2, 0, 3]) * 2.0**1021,
    ):
        assert list(WeightedSampler(weights, 50, seed=1)) == plain


def test_the_weights_that_were_given_are_left_alone() -> None:
    weights = np.array([1.0, 2.0, 0.0, 3.0])
    sampler = WeightedSampler(weights, 3, seed=1)
    plain, weights[:] = list(sampler), [5.0, 0.0, 1.0, 0.0]
    sampler.set_epoch(0)
    assert list(sampler) == plain
