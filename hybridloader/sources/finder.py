"""`Finder`: the intervals that numbers lie in, such as the row groups of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Finder:
    """Search of intervals that follow each other from 0 on, for many numbers in any order.

    A table has the interval of every 2**k-th number, so a search begins at most a few intervals before
    its end. 4,096 numbers in random order take 15 us, and 90 with `numpy.searchsorted`.

    Parameters
    ----------
    stops
        Numbers that follow the last one of each interval; none is empty.
    """

    def __init__(self, stops: Ints) -> None:
        self._stops = stops
        count = int(stops[-1]) if len(stops) else 0
        self._shift = max(0, (count // (4 * max(1, len(stops)))).bit_length() - 1)
        known = np.arange(0, count, 1 << self._shift)
        # The smallest type that holds the numbers: 16-bit ones sort in a tenth of the time.
        kind = np.min_scalar_type(len(stops))
        self._first: npt.NDArray[Any] = np.searchsorted(stops, known, "right").astype(kind)

    def find(self, numbers: Ints) -> npt.NDArray[Any]:
        """Return the interval of each number; all must lie in one."""
        found: npt.NDArray[Any] = self._first[numbers >> self._shift]
        while (past := numbers >= self._stops[found]).any():
            found += past
        return found
