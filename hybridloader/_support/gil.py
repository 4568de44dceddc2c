"""State of the global interpreter lock of this process."""

from __future__ import annotations

import sys


def gil_enabled() -> bool:
    """Return False if threads of this process run Python code at the same time.

    That is so in a free-threaded Python, until an extension is imported that needs the lock.
    """
    known = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13 on
    return known is None or known()
