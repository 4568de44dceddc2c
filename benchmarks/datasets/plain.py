"""Datasets that need neither torch nor anything of ours, so that a fresh worker can do without.

Nothing but numpy is imported here, and that only when a sample is made.
"""

from __future__ import annotations

import random
from typing import Any


class Numbers:
    """`length` samples of 16 floats, made with numpy."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        import numpy

        return numpy.full(16, index, dtype=numpy.float32)


class Paths:
    """A dataset that holds `paths` (a list, or something that looks like one) and gives a number."""

    def __init__(self, paths: Any) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        path: str = self.paths[index]
        return len(path)


class Spinning:
    """Samples that are a loop of so many turns in Python: they never leave the GIL."""

    def __init__(self, loops: int) -> None:
        self.loops = loops

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> int:
        return spin(self.loops, index) & 1


def spin(loops: int, value: int = 1) -> int:
    """Python and nothing else, some 0.1 us a turn."""
    for _ in range(loops):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return value


def nothing(item: Any) -> Any:
    """The work of an empty stage."""
    return item


def path_strings(count: int) -> list[str]:
    """So many file names of 30 to 60 letters, the same ones every time."""
    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz" * 2
    return [
        f"/data/train/{index % 1000:04d}/{letters[: chance.randint(1, 31)]}{index:08d}.jpg"
        for index in range(count)
    ]
