"""Samples of many small tensors, numbers and strings, as tables, graphs and texts have them."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.datasets.plain import ENDLESS

POOL = 512
"""Different samples of text, which are Python objects that no loader changes."""


class _Samples:
    """Endless samples."""

    length = ENDLESS

    def __len__(self) -> int:
        return self.length


class Keys(_Samples):
    """Dicts of `keys` keys: tensors of 4 elements, and floats."""

    def __init__(self, keys: int) -> None:
        self.names = [f"feature_{i}" for i in range(keys)]
        self.row = torch.rand(4, generator=torch.Generator().manual_seed(0))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, number = self.row, float(index)
        return {name: row if i & 1 else number for i, name in enumerate(self.names)}


class SmallTensors(_Samples):
    """Dicts of `keys` tensors of 4 elements, each made anew."""

    def __init__(self, keys: int) -> None:
        rows = torch.rand(keys, 4, generator=torch.Generator().manual_seed(0))
        self.rows = {f"feature_{i}": row.clone() for i, row in enumerate(rows)}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: row.clone() for name, row in self.rows.items()}


class Ragged(_Samples):
    """Lists of `count` tensors of 1 to 50 integers, each made anew."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __getitem__(self, index: int) -> list[Any]:
        return [torch.arange(1 + (7 * index + i) % 50) for i in range(self.count)]


class Texts(_Samples):
    """Dicts of a text, a list of strings, a dict of numbers and a name, and one tensor."""

    def __init__(self) -> None:
        self.pool = [
            {
                "text": f"a sentence of sample {i} that is of some length, " * 3,
                "tags": [f"tag {(i + j) % 100}" for j in range(5)],
                "about": {"id": i, "position": (i, i / 2), "name": f"sample {i}"},
                "x": torch.full((4,), float(i)),
            }
            for i in range(POOL)
        ]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.pool[index % POOL]
