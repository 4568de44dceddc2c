"""A dataset in a module without torch and numpy, which imports numpy in the middle of a sample."""

from __future__ import annotations

import random
import sys
from typing import Any


class ImportsLate:
    """Tells what was there before."""

    def __getitem__(self, index: int) -> Any:
        there = sorted({"numpy", "torch"} & set(sys.modules))
        if index % 2:
            import numpy

            if "numpy.random" in sys.modules:
                there.append("numpy.random")
            return index, there, float(numpy.random.rand()), random.random()
        return index, there, None, random.random()

    def __len__(self) -> int:
        return 6
