"""Random samples that are known by their number, and digests that host and device must share."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

SIZE = 64 << 10
"""Bytes of a sample: eight of them are a batch that has a slot of its own."""

_PRIME = 65_521


class Noise(Dataset[torch.Tensor]):
    """Sample `k` is drawn from seed `k`."""

    def __init__(self, length: int, size: int = SIZE) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
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


def busy(milliseconds: float) -> None:
    """Have the current stream do nothing for about so long. An H200 counts some 1.8e6 cycles in one."""
    torch.cuda._sleep(int(milliseconds * 1.8e6))  # type: ignore[attr-defined]
