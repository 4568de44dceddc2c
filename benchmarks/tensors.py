"""Datasets whose module imports torch, as most users' do: a worker has it before its first sample."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy
import torch
from PIL import Image

from benchmarks.datasets import DATASETS, ENDLESS, Ints, jpeg_files


class Paths(Ints):
    """Names of files in a list; a sample is the length of one, as a tensor."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        chance = random.Random(0)
        self.names = [f"/data/train/{chance.getrandbits(120):030x}.jpg" for _ in range(length)]

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(len(self.names[index]))


class Images(Ints):
    """Images of 3x224x224 bytes out of a pool of 64, so all that is left is to collate and hand over."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = (64, 3, 224, 224)
        self.pool = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)

    def __getitem__(self, index: int) -> Any:
        return self.pool[index % len(self.pool)]


class Jpegs(Ints):
    """JPEG files of 500x375 in memory: decode, resize to 224x224, make a tensor."""

    def __init__(self, length: int = ENDLESS) -> None:
        super().__init__(length)
        self.files = jpeg_files(500, 40)

    def __getitem__(self, index: int) -> Any:
        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as image:
            small = image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
        return torch.from_numpy(numpy.array(small)).permute(2, 0, 1).contiguous()


DATASETS = DATASETS | {kind.__name__: kind for kind in (Paths, Images, Jpegs)}
