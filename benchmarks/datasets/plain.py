"""Datasets that need neither torch nor hybridloader, so that a fresh worker imports neither.

Nothing but numpy and small modules of Python's own is imported here, and numpy only when a sample is
made.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

ENDLESS = 1 << 40
"""Samples of a dataset that no repetition comes to the end of."""


class Ints:
    """Samples that cost nothing: their own index."""

    def __init__(self, length: int = ENDLESS) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


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
    """Lengths of `paths`, which are a list or look like one."""

    def __init__(self, paths: Any) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        path: str = self.paths[index]
        return len(path)


class Dying:
    """Samples that say who made them: process id, and when it made its first one (monotonic clock).

    Parameters
    ----------
    length
        Number of samples.
    at
        Index of the sample that kills its process, once.
    note
        File into which that process writes the time just before; as long as it exists, none dies.
    """

    def __init__(self, length: int, at: int, note: str) -> None:
        self.length, self.at, self.note = length, at, note
        self.since: dict[int, float] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        pid = os.getpid()
        since = self.since.setdefault(pid, time.monotonic())
        if index == self.at and not os.path.exists(self.note):
            with open(self.note, "w") as file:
                file.write(repr(time.monotonic()))
            os.kill(pid, signal.SIGKILL)
        return pid, since


class Spinning:
    """Samples that are a loop of `loops` turns in Python: they never release the GIL."""

    def __init__(self, loops: int) -> None:
        self.loops = loops
        self.length = ENDLESS

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return spin(self.loops, index) & 1


def spin(loops: int, value: int = 1) -> int:
    """A loop of `loops` turns in Python, some 0.1 us each."""
    for _ in range(loops):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return value


def identity(item: Any) -> Any:
    """The function of an empty stage."""
    return item


def path_strings(count: int) -> list[str]:
    """`count` file names of 30 to 60 letters, the same ones every time."""
    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz" * 2
    return [
        f"/data/train/{index % 1000:04d}/{letters[: chance.randint(1, 31)]}{index:08d}.jpg"
        for index in range(count)
    ]
