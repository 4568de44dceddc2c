"""Pictures that datasets cut or decode; numpy and Pillow are imported when one is made."""

from __future__ import annotations

import io
from typing import Any


def waves(width: int, number: int = 0) -> Any:
    """Picture made of waves, three quarters as high as wide; `number` sets their lengths."""
    import numpy
    from PIL import Image

    y, x = numpy.mgrid[0 : width * 3 // 4, 0:width]
    periods = ((7 + number, 31), (19, 11 + number), (53, 5 + number))
    planes = [numpy.sin(x / a) * numpy.cos(y / b) for a, b in periods]
    return Image.fromarray((numpy.stack(planes, -1) * 127 + 128).astype(numpy.uint8))


def photographs() -> list[Any]:
    """The demo's photographs, or, where those are missing, one picture of waves."""
    try:
        from hybridloader.demo import PHOTOGRAPHS, photograph

        return [photograph(name) for name in PHOTOGRAPHS]
    except Exception:  # of whatever kind: no skimage, another layout of its files
        return [waves(640)]


def as_jpeg(picture: Any) -> bytes:
    """The file of a picture."""
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=90)
    return out.getvalue()
