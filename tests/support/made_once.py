"""Results that take long and serve many tests: made once, though several processes run tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def folder_made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]
) -> Path:
    """A folder that `make` has filled, in whichever process of pytest-xdist came to it first.

    `make` tells in the folder of what went wrong; if it raises, the next one to ask finds what there is.
    """
    import fcntl

    together = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all of them share what lies above theirs
        together = together.parent
    folder = together / name
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            make(folder)
    return folder
