"""Datasets of the cases. Importing this module imports neither torch nor numpy, so a fresh worker starts
without them unless its samples need them."""

from __future__ import annotations

import functools
import io
import random
import time
from typing import Any

ENDLESS = 1 << 40
"""Samples of a dataset that a case cuts to the length that it needs."""


class Ints:
    """Samples that cost nothing: their own index."""

    def __init__(self, length: int = ENDLESS) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index


class Python(Ints):
    """Samples that are a loop in Python of some 0.3 ms, which holds the GIL where there is one."""

    def __getitem__(self, index: int) -> Any:
        return spin(4_000, index) & 1


class Hybrid(Ints):
    """Samples that wait 20 ms as for a server, decode a JPEG file, and loop in Python."""

    def __init__(self, length: int = ENDLESS) -> None:
        super().__init__(length)
        self.files = jpeg_files(640, 8)

    def __getitem__(self, index: int) -> Any:
        return self.augment(self.decode(self.read(index)))

    def read(self, index: int) -> bytes:
        time.sleep(0.02)
        return self.files[index % len(self.files)]

    def decode(self, data: bytes) -> Any:
        import numpy
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            small = image.convert("RGB").resize((160, 160), Image.Resampling.BILINEAR)
        return numpy.array(small)

    def augment(self, pixels: Any) -> Any:
        import numpy

        mirrored = spin(20_000, int(pixels[0, 0, 0])) & 1
        return numpy.ascontiguousarray(pixels[:, ::-1]) if mirrored else pixels


class Slow(Ints):
    """Samples that sleep 3 ms, and exactly one in 16, at random, 60 ms."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.slow = set(random.Random(0).sample(range(length), length // 16))

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.06 if index in self.slow else 0.003)
        return index


def spin(loops: int, value: int = 1) -> int:
    """Run a loop of `loops` turns in Python, some 0.1 us each."""
    for _ in range(loops):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return value


@functools.cache
def jpeg_files(width: int, count: int) -> list[bytes]:
    """Return JPEG files of that width, of the demo's photographs, or of waves without them."""
    import numpy
    from PIL import Image

    try:
        from hybridloader.demo import PHOTOGRAPHS, photograph

        sources = [photograph(name) for name in PHOTOGRAPHS]
    except Exception:  # of any kind: scikit-image is not installed, or has other files
        y, x = numpy.mgrid[0:480, 0:640]
        planes = [numpy.sin(x / a) * numpy.cos(y / b) for a, b in ((7, 31), (19, 11), (53, 5))]
        sources = [Image.fromarray((numpy.stack(planes, -1) * 127 + 128).astype(numpy.uint8))]
    files = []
    for index in range(count):
        source = sources[index % len(sources)]
        box = (7 * index % (source.width // 4), 0, source.width, source.height)
        size = (width, width * 3 // 4)
        out = io.BytesIO()
        source.resize(size, Image.Resampling.BICUBIC, box=box).save(out, "JPEG", quality=90)
        files.append(out.getvalue())
    return files


DATASETS = {kind.__name__: kind for kind in (Ints, Python, Hybrid, Slow)}
