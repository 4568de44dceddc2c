"""Datasets, and a device that counts, for the tests of pinning and devices."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from hybridloader import DataLoader
from support.fake_accelerator import FakeAccelerator

BACKENDS = ("threads", "fork")
on_backends = pytest.mark.parametrize("backend", BACKENDS)

NO_ACCELERATOR = "ignore:'pin_memory' argument is set as true but no accelerator is found"
"""torch's iterator looks for one of its own."""


class Leaf:
    """Can pin itself."""

    def __init__(self, value: int, pinned: int = 0) -> None:
        self.value, self.pinned = value, pinned

    def __eq__(self, other: object) -> bool:
        return type(other) is Leaf and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def pin_memory(self) -> Leaf:
        return Leaf(self.value, self.pinned + 1)


class Rows(Dataset[torch.Tensor]):
    """Sample `k` is `size` numbers `k`."""

    def __init__(self, length: int = 12, size: int = 4) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size,), index, dtype=torch.int32)


class Stream(IterableDataset[torch.Tensor]):
    """Iterable of the same samples; each worker reads its part."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for k in range(first, self.length, step):
            yield torch.full((4,), k, dtype=torch.int32)


class Counting(FakeAccelerator):
    """Notes which threads used it for what, and how many tensors were handled."""

    def __init__(self, name: str = "fake:0", **options: Any) -> None:
        super().__init__(name, **options)
        self.entries: list[str] = []
        self.pinners: list[str] = []
        self.movers: list[str] = []
        self.takers: list[str] = []
        self.many = threading.Event()
        self.enough = 1 << 40

    def enter(self) -> None:
        super().enter()
        self.entries.append(threading.current_thread().name)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinners.append(threading.current_thread().name)
        return self._count(super().pin(tensor))

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        self.movers.append(threading.current_thread().name)
        return super().move(tensor)

    def hold_up(self, stream: Any, mark: Any) -> None:
        self.takers.append(threading.current_thread().name)
        super().hold_up(stream, mark)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.pinners) >= self.enough:
            self.many.set()
        return tensor


class Pinnable:
    """Batch of a collate_fn that pins itself, or fails at it."""

    def __init__(self, number: int, failure: BaseException | None = None) -> None:
        self.number, self.failure, self.pinned = number, failure, False

    def pin_memory(self) -> Pinnable:
        if self.failure is not None:
            raise self.failure
        self.pinned = True
        return self


def runs(name: str) -> bool:
    """Tell whether a thread of that name runs."""
    return any(thread.name == name for thread in threading.enumerate())


def start(loader: DataLoader) -> Any:
    """Begin an epoch, and return the iterator with the methods that torch's lack."""
    return iter(loader)


def first_of(batch: torch.Tensor) -> list[int]:
    """The samples of a batch of `Rows`, each of which must be whole."""
    assert all((row == row[0]).all() for row in batch)
    return [int(row[0]) for row in batch]


def reading(data: torch.Tensor, seen: list[bytes]) -> Callable[[], None]:
    """A kernel: it has an address, and holds no memory."""
    place, size = data.data_ptr(), data.nbytes
    return lambda: seen.append(ctypes.string_at(place, size))
