"""The package of samplers as such: its names, its examples, and what importing it imports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.programs import output

from hybridloader.sampling import Permutation, ShuffleSampler


def test_a_permutation_needs_no_torch() -> None:
    code = (
        "import sys, hybridloader.sampling as s; print('numpy' in sys.modules);"
        "s.Permutation(9, 0)[3]; print('torch' in sys.modules)"
    )
    assert output("-c", code).split() == ["False", "False"]


@pytest.mark.parametrize("make", [ShuffleSampler, Permutation])
def test_numpys_integers_are_as_good(make: Any) -> None:
    assert list(make(np.int64(5), np.uint64(2**64 - 1))) == list(make(5, 2**64 - 1))
