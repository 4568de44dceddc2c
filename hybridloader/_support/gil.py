"""State of the global interpreter lock of this process."""

from __future__ import annotations

import math
import sys


def gil_enabled() -> bool:
    """Return False if threads of this process run Python code at the same time.

    That is so in a free-threaded Python, until an extension is imported that needs the lock.
    """
    known = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13 on
    return known is None or bool(known())


def turn_at_gil() -> float:
    """Return the seconds after which a thread that waits for the lock asks for it; or infinity."""
    return sys.getswitchinterval() if gil_enabled() else math.inf
