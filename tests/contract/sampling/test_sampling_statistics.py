"""Statistical tests of our orders and torch's; run as a script it prints a table of P-values.

Seeds are fixed, so a p-value never changes. Each test must also find fault with an order that is
visibly not random, or it would be none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import scipy  # `scipy.stats`, which takes a second to import, is loaded when it is first used
import torch

from hybridloader.sampling import Permutation

Ints = npt.NDArray[np.int64]
Order = Callable[[int, int, int], Ints]
"""Function from n, seed and epoch to an order."""

pytestmark = pytest.mark.full  # `test_values_are_pinned` holds the order itself

BELOW = 1e-4
"""A p-value that tells a fault: among the some 60 of this file one by chance in 150 choices of seeds."""


def ours(n: int, seed: int, epoch: int) -> Ints:
    return Permutation(n, seed, epoch).read(0, n)


def torchs(n: int, seed: int, epoch: int) -> Ints:
    generator = torch.Generator().manual_seed(seed * 1000 + epoch)
    order: Ints = torch.randperm(n, generator=generator).numpy()
    return order


def stride(n: int, seed: int, epoch: int) -> Ints:
    """Return the order ``(a + b k) % n``, which is visibly not random."""
    step = next(s for s in range(int(n * 0.38) + seed % 7, n) if math.gcd(s, n) == 1)
    return (np.arange(n) * step + seed + epoch) % n


def coarse(n: int, seed: int, epoch: int) -> Ints:
    """Sorted by random keys of two bits: those that are equal stay in order."""
    return np.argsort(np.random.default_rng(seed).integers(0, 4, n), kind="stable")


def _even(observed: Ints) -> float:
    return float(scipy.stats.chisquare(observed).pvalue)


def _even_grid(a: Ints, b: Ints) -> float:
    """Are pairs of numbers below 64, each of which is as often in `a` and in `b`, even too?"""
    observed = np.bincount(a * 64 + b, minlength=64 * 64)
    return float(scipy.stats.chisquare(observed, ddof=2 * 63).pvalue)  # rows and columns are fixed


def value_at_a_position(order: Order, n: int, many: int) -> float:
    """Over seeds, is each value as often at the first, a middle and the last position as any other?"""
    at = [0, n // 2, n - 1]
    found = np.array([order(n, seed, 0)[at] for seed in range(many)])
    bins = min(n, 50)
    ps = [_even(np.bincount(column * bins // n, minlength=bins)) for column in found.T]
    return min(1.0, 3 * min(ps))


def neighbors_over_seeds(order: Order, n: int, many: int) -> float:
    """Over seeds, are the differences of the first two values even, modulo n?"""
    found = np.array([order(n, seed, 0)[:2] for seed in range(many)])
    return _even(np.bincount((found[:, 1] - found[:, 0]) % n, minlength=n)[1:])


def value_by_position(order: Order, n: int, seed: int) -> float:
    """In one order, are values of each part of range(n) as often in each part of the order?"""
    return _even_grid(np.arange(n) * 64 // n, order(n, seed, 0) * 64 // n)


def neighbors(order: Order, n: int, seed: int) -> float:
    """In one order, are the steps from one value to the next even, modulo n?"""
    steps = np.diff(order(n, seed, 0)) % n
    return _even(np.bincount(steps * 1000 // n, minlength=1000))


def ascents(order: Order, n: int, seed: int) -> float:
    """In one order, is every second value above the one before? (n - 1) / 2, variance (n + 1) / 12."""
    rises = int((np.diff(order(n, seed, 0)) > 0).sum())
    return float(2 * scipy.stats.norm.sf(abs(rises - (n - 1) / 2) / math.sqrt((n + 1) / 12)))


def across_epochs(order: Order, n: int, seed: int) -> float:
    """Does a value's place in one epoch tell anything about its place in the next?"""
    return _even_grid(order(n, seed, 0) * 64 // n, order(n, seed, 1) * 64 // n)


def across_seeds(order: Order, n: int, seed: int) -> float:
    """Does a value's place under one seed tell anything about its place under the next?"""
    return _even_grid(order(n, seed, 0) * 64 // n, order(n, seed + 1, 0) * 64 // n)


def low_bits(order: Order, n: int, seed: int) -> float:
    """In one order, are the last 6 bits of values even over the last 6 bits of positions?"""
    return _even_grid(np.arange(n) % 64, order(n, seed, 0) % 64)


def fixed_points(order: Order, n: int, many: int) -> float:
    """Over seeds, is the number of values in their own place Poisson with mean 1?"""
    counts = [int((order(n, seed, 0) == np.arange(n)).sum()) for seed in range(many)]
    observed = np.bincount(np.minimum(counts, 4), minlength=5)
    expected = scipy.stats.poisson.pmf(np.arange(5), 1)
    expected[4] = 1 - expected[:4].sum()
    return float(scipy.stats.chisquare(observed, expected * many).pvalue)


MANY = [value_at_a_position, neighbors_over_seeds, fixed_points]
ONE = [value_by_position, neighbors, ascents, across_epochs, across_seeds, low_bits]
SMALL = [(12, 4000), (100, 4000), (4096, 1000), (4097, 1000), (6000, 500)]
LARGE = [65_536, 100_000, 1_000_003]


@pytest.mark.parametrize("order", [ours, torchs])
def test_no_statistic_finds_fault_with_an_order(order: Order) -> None:
    """Torch's order shows that the statistics ask for no more than there is."""
    for n, many in SMALL:
        for statistic in MANY:
            assert statistic(order, n, many) > BELOW, (statistic.__name__, n)
    for n in LARGE:
        for single in ONE:
            assert single(order, n, 1) > BELOW, (single.__name__, n)


def test_each_finds_fault_with_a_poor_one() -> None:
    for statistic in (value_at_a_position, neighbors_over_seeds):
        assert min(statistic(order, 100, 1000) for order in (stride, coarse)) < BELOW
    for single in ONE:
        poor = [single(order, 65_536, 1) for order in (stride, coarse)]
        # A difference is 0 or 1, or far from it: chi-square is as surprised by what is too even.
        assert min(poor) < BELOW or max(poor) > 1 - BELOW, single.__name__
    assert fixed_points(lambda n, seed, epoch: np.arange(n), 100, 100) < BELOW


def _table() -> None:
    print("| statistic | n | hybridloader | torch.randperm |\n| --- | --- | --- | --- |")
    for n, many in [(100, 20_000), (5000, 20_000)]:
        for statistic in MANY:
            ps = [f"{statistic(order, n, many):.2f}" for order in (ours, torchs)]
            print(
                f"| {statistic.__name__.replace('_', ' ')}, {many} seeds | {n} | {' | '.join(ps)} |"
            )
    for n in (1_000_003, 10_000_000):
        for single in ONE:
            ps = [f"{single(order, n, 1):.2f}" for order in (ours, torchs)]
            print(f"| {single.__name__.replace('_', ' ')} | {n} | {' | '.join(ps)} |")


if __name__ == "__main__":
    _table()
