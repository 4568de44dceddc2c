"""The package of samplers as such: its names, its examples, and what importing it imports."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from hybridloader import sampling
from hybridloader.sampling import Permutation, ShuffleSampler


def test_every_public_name_loads_and_is_listed() -> None:
    for name in sampling.__all__:
        assert getattr(sampling, name).__name__ == name
    assert dir(sampling) == sorted(sampling.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sampling.no_such_name


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


def test_what_has_a_length_is_asked_for_it() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(5))
    assert sorted(ShuffleSampler(data, 0)) == list(range(5))
    assert sorted(ShuffleSampler("abc", 0)) == [0, 1, 2]
