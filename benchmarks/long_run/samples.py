"""Datasets and functions of the long run. A sample says which index it is of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.datasets.plain import spin

LOOPS = 100
"""Turns of the loop in a plain sample: some 10 us."""


class Plain:
    """Samples that are their own index, and some work."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        spin(LOOPS)
        return index


class Large(Plain):
    """Arrays of `size` numbers that are all the sample's index."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__(length)
        self.size = size

    def __getitem__(self, index: int) -> Any:
        import numpy

        return numpy.full(self.size, index, dtype=numpy.int32)


class Failing(Plain):
    """Every `nth` sample fails, `times` times in each process."""

    def __init__(self, length: int, nth: int, times: int = 1 << 30) -> None:
        super().__init__(length)
        self.nth, self.times = nth, times
        self.failed: dict[int, int] = {}

    def fails(self) -> set[int]:
        """Indices of the samples that fail."""
        return set(range(0, self.length, self.nth))

    def __getitem__(self, index: int) -> int:
        count = self.failed.get(index, 0)
        if index % self.nth == 0 and count < self.times:
            self.failed[index] = count + 1
            raise OSError(f"sample {index} is one of those that fail")
        return index


def shards(length: int) -> Any:
    """An iterable dataset of which each of n workers reads every n-th index."""
    from torch.utils.data import IterableDataset

    from hybridloader import get_worker_info

    class Shards(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            first, step = (0, 1) if info is None else (info.id, info.num_workers)
            yield from range(first, length, step)

    return Shards()


def double(item: int) -> int:
    """The first stage of the pipeline."""
    return 2 * item


def one_more(item: int) -> int:
    """Its second stage."""
    spin(LOOPS)
    return item + 1
