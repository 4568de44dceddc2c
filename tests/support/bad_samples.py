"""Map-style datasets of which some samples fail, asked one by one or a batch at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class Samples(Dataset[Any]):
    """`length` samples, of which those in `bad` raise."""

    def __init__(self, length: int = 40, bad: Any = (3, 10, 17, 24, 31, 38)) -> None:
        self.length, self.bad = length, frozenset(bad)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise ValueError("bad", index)
        return torch.full((3,), index)


class Together(Samples):
    """Dataset read a batch at a time; a batch fails if one of its samples does."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [super(Together, self).__getitem__(index) for index in indices]


class OnlyTogether(Dataset[Any]):
    """No single samples at all: torch's base class has a `__getitem__` that only raises."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [Samples()[index] for index in indices]

    def __len__(self) -> int:
        return 40
