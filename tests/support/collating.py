"""Samples and loaders that the tests of collation share."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch.utils.data import Dataset

from hybridloader import DataLoader
from support import comparison
from support.comparison import same_tensors

SIDE = 300
"""Rows and columns of a square sample: with 4 bytes an element, two of them are well above OWN."""


class Pair(NamedTuple):
    left: Any
    right: Any


class Made(Dataset[Any]):
    """Samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], Any], length: int = 8) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def square(index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 97 + index).to(dtype)


def ours(make: Callable[[int], Any], backend: Any, workers: int, **options: Any) -> list[Any]:
    loader = DataLoader(Made(make), 4, num_workers=workers, backend=backend, **options)
    with iter(loader) as batches:
        return list(batches)


def torchs_own(make: Callable[[int], Any], **options: Any) -> list[Any]:
    return list(torch.utils.data.DataLoader(Made(make), 4, **options))


def same(a: Any, b: Any) -> None:
    """Check that `a` equals `b`, also in the order of dimensions."""

    def tensors(a: torch.Tensor, b: torch.Tensor) -> None:
        same_tensors(a, b)
        assert a.layout is not torch.strided or a.stride() == b.stride()

    comparison.same(a, b, tensors)


def squares(index: int) -> Any:
    return square(index), index


def nested(index: int) -> Any:
    return {
        "tuple": (square(index), [square(index, torch.int64), float(index)]),
        "ordered": collections.OrderedDict(image=square(index, torch.float16), name=f"n{index}"),
        "pair": Pair(square(index), b"x"),
        "flag": index % 2 == 0,
    }
