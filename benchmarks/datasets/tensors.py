"""Datasets of tensors: images, JPEG files, blocks of bytes, a table."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.utils.data

from benchmarks.datasets.pictures import as_jpeg, photographs
from benchmarks.datasets.plain import ENDLESS, Dying, Paths

POOL = 64
"""Different images in a dataset of images: 10 MB, so that they don't all stay in the caches."""


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Images out of a small pool made beforehand: all that is left to do is collate and carry.

    An image is 3x224x224 bytes: as uint8, or of wider numbers as many rows as fit.
    """

    def __init__(self, dtype: str) -> None:
        self.length = ENDLESS
        generator = torch.Generator().manual_seed(0)
        kind: torch.dtype = getattr(torch, dtype)
        shape = (3, 224 // kind.itemsize, 224)
        self.pool = [
            torch.randint(0, 255, shape, generator=generator).to(kind) for _ in range(POOL)
        ]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pool[index % POOL]


class Blocks(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of `size` bytes: as batches of one they are just large enough for shared memory."""

    def __init__(self, size: int) -> None:
        self.size, self.length = size, ENDLESS

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size,), index % 251, dtype=torch.uint8)


class PathTensors(Paths):
    """Lengths of `paths` as tensors, so that a worker needs torch."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(super().__getitem__(index))


class DyingTensors(Dying):
    """Samples that say who made them, as tensors, so that a worker needs torch."""

    def __getitem__(self, index: int) -> Any:
        return [torch.tensor(value, dtype=torch.float64) for value in super().__getitem__(index)]


class Jpegs(torch.utils.data.Dataset[torch.Tensor]):
    """JPEG files of 500x375, held in memory: decode, resize to 224x224, as a tensor."""

    def __init__(self) -> None:
        self.files, self.length = jpeg_files(), ENDLESS

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy
        from PIL import Image

        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as image:
            small = image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
        return torch.from_numpy(numpy.array(small)).permute(2, 0, 1).contiguous()


def jpeg_files(count: int = 40) -> list[bytes]:
    """Crops of photographs, of 500x375 pixels."""
    from PIL import Image

    sources = photographs()
    files = []
    for index in range(count):
        source = sources[index % len(sources)]
        left = 7 * index % max(1, source.width // 4)
        box = (left, 0, source.width, source.height)
        files.append(as_jpeg(source.resize((500, 375), Image.Resampling.BICUBIC, box=box)))
    return files


def table(rows: int = 20_000, columns: int = 20) -> torch.utils.data.TensorDataset:
    """Floats and labels, as a small table would be held in memory."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, columns, generator=generator)
    labels = torch.randint(0, 10, (rows,), generator=generator)
    return torch.utils.data.TensorDataset(values, labels)
