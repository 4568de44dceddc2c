"""Dataset of the demo: decodes image files and augments them, in the loader's workers.

It imports little, because each worker process imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

import hybridloader
from hybridloader.demo.folders import DemoError, Sample

SIDE = 96  # pixels of the square that the network sees


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """Images of class folders, decoded when they are asked for.

    With `augment`, each reading gives another crop, mirror image, brightness and contrast.
    """

    def __init__(self, samples: Sequence[Sample], *, augment: bool) -> None:
        self.samples = tuple(samples)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = self.samples[index]
        image = decode(sample.path)
        if self.augment:
            return augmented(image), sample.label
        return as_tensor(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)), sample.label


def decode(path: str) -> Image.Image:
    """Read the image at `path`; a `DemoError` names it if that fails."""
    try:
        with Image.open(path) as image:
            pixels: Image.Image = image.convert("RGB")
            return pixels
    except UnidentifiedImageError as error:
        raise DemoError(f"{path} is not an image, or not one that Pillow reads") from error
    # Pillow's decoders raise all of these for files that are truncated or malicious.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DemoError(f"can't read the image {path}: {reason}") from error


def augmented(image: Image.Image) -> torch.Tensor:
    """Return a random part of `image` (60 % to 100 % of each side), mirrored or not, relit."""
    scale, left, top, mirror, brightness, contrast = _chances(6)
    scale = 0.6 + 0.4 * scale
    width, height = scale * image.width, scale * image.height
    left, top = left * (image.width - width), top * (image.height - height)
    box = (left, top, left + width, top + height)
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    if mirror < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = as_tensor(image)
    mean = pixels.mean()
    relit = (pixels - mean) * (0.8 + 0.4 * contrast) + mean + 0.2 * (brightness - 0.5)
    return relit.clamp_(0, 1)


def as_tensor(image: Image.Image) -> torch.Tensor:
    """Return a float tensor of shape ``(3, height, width)`` with values between 0 and 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)


def _chances(count: int) -> list[float]:
    """Return random numbers between 0 and 1, equal in every run with the same seed and workers.

    A worker process has the global generator for itself; a worker thread has its own, because the
    training uses the global one.
    """
    info = hybridloader.get_worker_info()
    own = None if info is None or info.rng is None else info.rng.torch_generator
    drawn: list[float] = torch.rand(count, generator=own).tolist()
    return drawn
