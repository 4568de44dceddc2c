"""Bad input to samplers: the error names the parameter, its value, and what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hybridloader.sampling import (
    BlockShuffleSampler,
    DistributedShuffleSampler,
    Permutation,
    ShuffleSampler,
    TokenBudgetBatchSampler,
    WeightedSampler,
)

nan, inf = float("nan"), float("inf")


def ranked(**changed: Any) -> Any:
    given = {"dataset": 10, "seed": 0, "num_replicas": 2, "rank": 0, **changed}
    return DistributedShuffleSampler(**given)


def drawing(weights: Any = (1, 2), num_samples: Any = 1, **changed: Any) -> Any:
    return WeightedSampler(weights, num_samples, **{"seed": 0, **changed})


def blocked(data_source: Any = (3, 4), **changed: Any) -> Any:
    return BlockShuffleSampler(data_source, **{"seed": 0, **changed})


def budgeted(lengths: Any = (1, 2), max_cost: Any = 9, **changed: Any) -> Any:
    return TokenBudgetBatchSampler(lengths, max_cost, **{"seed": 0, **changed})


class Unread:
    """A dataset whose samples must not be read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise AssertionError("read")


TABLE: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: blocked(5), TypeError, "int has no block_sizes; give the number of samples of each"),
    (lambda: blocked(Unread()), TypeError, r"Unread has no block_sizes.*or \[len\(dataset\)\]"),
    (lambda: blocked([2, -1]), ValueError, r"must not be negative, got lengths\[1\] = -1"),
    (lambda: blocked(window_blocks=0), ValueError, "window_blocks must be at least 1, got 0"),
    (lambda: blocked(rank=1), ValueError, "num_replicas is None and rank is 1"),
    (lambda: ShuffleSampler(-1, 0), ValueError, "data_source must be at least 0, got -1"),
    (lambda: ShuffleSampler(2**62 + 1, 0), ValueError, "must be at most 4611686018427387904"),
    (lambda: ShuffleSampler(drawing([1.0]), 0), TypeError, "not the WeightedSampler, whose order"),
    (lambda: ShuffleSampler(iter([]), 0), TypeError, "an iterable dataset has no indices"),  # type: ignore[arg-type]
    (lambda: ShuffleSampler(5, 2**64), ValueError, "seed must be at most 18446744073709551615"),
    (lambda: ShuffleSampler(5, 0).set_epoch(-1), ValueError, "epoch must be at least 0"),
    (lambda: ShuffleSampler(5, 0).order()[5], IndexError, "no position 5 in an order of 5"),
    (lambda: Permutation(5, 0)[1.0], TypeError, "a position must be a whole number"),  # type: ignore[index]
    (lambda: ranked(rank=2), ValueError, "rank must be at most 1, got 2"),
    (lambda: ranked(uneven="equal"), ValueError, "'pad', 'drop' or 'exact', got 'equal'"),
    (
        lambda: ranked(dataset=1, uneven="drop"),
        ValueError,
        "leaves nothing of 1 samples for 2 ranks; use 'pad' or 'exact'",
    ),
    (lambda: drawing([1, -2.0]), ValueError, r"got weights\[1\] = -2.0"),
    (lambda: drawing([1, 2, inf]), ValueError, r"got weights\[2\] = inf"),
    (lambda: drawing(torch.tensor([1.0, nan])), ValueError, r"got weights\[1\] = nan"),
    (lambda: drawing([0, 0.0]), ValueError, "all 2 weights are 0"),
    (lambda: drawing([]), ValueError, "weights is empty: there is nothing to draw from"),
    (lambda: drawing([[1, 2]]), ValueError, r"one dimension, got the shape \(1, 2\)"),
    (lambda: drawing([[1], [1, 2]]), ValueError, "weights must have one dimension: setting an"),
    (lambda: drawing([1j]), TypeError, "weights must be numbers, got complex128"),
    (lambda: drawing(num_samples=0), ValueError, "num_samples must be at least 1, got 0"),
    (lambda: budgeted([1, -1]), ValueError, r"got lengths\[1\] = -1"),
    (lambda: budgeted([1.0, 2.0]), TypeError, "whole numbers, got float64; count in a finer unit"),
    (lambda: budgeted(np.array([2**63], np.uint64)), ValueError, "lengths must be at most"),
    (lambda: budgeted([2**70]), TypeError, "lengths must be numbers, got object"),
    (lambda: budgeted(max_cost=0), ValueError, "max_cost must be at least 1"),
    (
        lambda: budgeted([3, 10, 4, 11]),
        ValueError,
        r"sample 1 has length 10, above max_cost=9 \(2 such in all\); raise max_cost, or clip",
    ),
]


def test_bad_input() -> None:
    for make, kind, says in TABLE:
        with pytest.raises(kind, match=says) as caught:
            make()
        assert type(caught.value) is kind, says
