"""A folder of photographs, one folder for each class, as the examples take it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10


def photographs(folder: Path, each: int) -> Path:
    """Write `each` images of 256 x 256 noise for each class."""
    draw = np.random.default_rng(1)
    for kind in range(CLASSES):
        (folder / f"class {kind}").mkdir()
        for number in range(each):
            image = draw.integers(256, size=(32, 32, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
            Image.fromarray(image).save(folder / f"class {kind}" / f"{number}.jpg")
    return folder
