"""The package of samplers as such: its names, its examples, and what importing it imports."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hybridloader import sampling
from hybridloader.sampling import Permutation, ShuffleSampler


@pytest.mark.parametrize("name", sorted(set(sampling.__all__) - {"ResumableSampler"}))
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(getattr(sampling, name).__module__)
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_a_permutation_needs_no_torch() -> None:
    code = (
        "import sys, hybridloader.sampling as s; print('numpy' in sys.modules);"
        "s.Permutation(9, 0)[3]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("make", [ShuffleSampler, Permutation])
def test_numpys_integers_are_as_good(make: Any) -> None:
    assert list(make(np.int64(5), np.uint64(2**64 - 1))) == list(make(5, 2**64 - 1))
