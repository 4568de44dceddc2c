"""Random samples that are known by their number, and digests that host and device must share."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch
from torch.utils.data import Dataset

from support.installed_torch import current_accelerator

_ACCELERATOR = current_accelerator()
KIND = "meta" if _ACCELERATOR is None else _ACCELERATOR.type
"""Argument of ``device=``; any name where there is no device, and all tests are skipped."""

BATCHES = int(os.environ.get("HYBRIDLOADER_BATCHES", "10000"))
"""Batches of a test under pressure; a multiple of 100, so that all of them can be divided."""

SIZE = 64 << 10
"""Bytes of a sample: eight of them are a batch that has a slot of its own."""

_PRIME = 65_521


class Noise(Dataset[torch.Tensor]):
    """Sample `k` is drawn from seed ``first + k``."""

    def __init__(self, length: int, size: int = SIZE, first: int = 0) -> None:
        self.length, self.size, self.first = length, size, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.first + index)
        return torch.randint(0, 256, (self.size,), dtype=torch.uint8, generator=generator)


def digest(batch: torch.Tensor) -> torch.Tensor:
    """A number for each sample, the same on any device: a sum of integers, weighted by place."""
    weights = torch.arange(1, batch.shape[1] + 1, device=batch.device) % _PRIME
    return (batch.to(torch.int64) * weights).sum(dim=1)


def wanted(samples: int, size: int = SIZE) -> torch.Tensor:
    """The digests of the first so many samples, made without any loader."""
    data = Noise(samples, size)
    return torch.cat([digest(data[index][None]) for index in range(samples)])


def with_digest(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A collate_fn, for workers: the batch, and what its digest is before it is sent anywhere."""
    from torch.utils.data import default_collate

    batch: Any = default_collate(samples)
    return batch, digest(batch)


@functools.cache
def _product() -> tuple[torch.Tensor, torch.Tensor, float]:
    """A square matrix, memory for its product, and the seconds that this takes: some milliseconds.

    Large enough that few of them are queued: a driver that has a thousand kernels to come makes the host
    wait. The memory is made once: a test may measure the device's.
    """
    size = 256
    while True:
        matrix = torch.full((size, size), 1 / size, device=KIND)
        out = torch.empty_like(matrix)
        torch.accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            torch.mm(matrix, matrix, out=out)
        torch.accelerator.synchronize()
        seconds = (time.perf_counter() - start) / 3
        if seconds > 3e-3:
            return matrix, out, seconds
        size *= 2


def busy(seconds: float) -> None:
    """Have the current stream work for about so long: what is queued next comes late."""
    matrix, out, each = _product()
    for _ in range(max(1, round(seconds / each))):
        torch.mm(matrix, matrix, out=out)
