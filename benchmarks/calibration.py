"""Amounts of work that take a given time on this machine."""

from __future__ import annotations

import math

from benchmarks.datasets.plain import spin
from benchmarks.datasets.remote import Remote, files
from benchmarks.timing import fastest

_WIDTH = 400
"""Pixels: width of the file whose decoding is timed."""

_LOOPS = 5_000
"""Turns of the loop that is timed."""


def loops_for(seconds: float) -> int:
    """Turns of `spin` that take `seconds`."""
    return max(1, round(_LOOPS * seconds / fastest(lambda: spin(_LOOPS))))


def width_for(seconds: float) -> int:
    """Width in pixels of JPEG files that take `seconds` to decode."""
    remote = Remote(0, 0, 0, 0)
    data = files(_WIDTH, 1)[0]
    # Twice the edge is four times the work.
    edge = _WIDTH * math.sqrt(seconds / fastest(lambda: remote.decode(data)))
    return max(16, 16 * round(edge / 16))
