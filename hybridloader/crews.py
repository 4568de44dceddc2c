"""Every crew that runs, and who ends it: whoever holds it, its finalizer, or the end of the process."""

from __future__ import annotations

import atexit
import multiprocessing.util  # its exit handler must be registered before ours, to run after it
import os
import weakref
from typing import Any

from hybridloader.contract import Crew

assert multiprocessing.util is not None

_crews: weakref.WeakKeyDictionary[Crew, int] = weakref.WeakKeyDictionary()
"""Every crew and the process that owns it."""


def ended_with(holder: Any, crew: Crew) -> weakref.finalize[[Crew, int], Any]:
    """Have `crew` closed when `holder` is let go, at exit, or by calling the result."""
    owner = os.getpid()
    _crews[crew] = owner
    finalizer = weakref.finalize(holder, _close, crew, owner)
    finalizer.atexit = False  # _close_all does it, in the right order
    return finalizer


def _close_all() -> None:
    for crew, owner in list(_crews.items()):
        _close(crew, owner)


atexit.register(_close_all)


def _close(crew: Crew, owner: int) -> None:
    if os.getpid() == owner:  # in a fork of the owner the workers are somebody else's
        crew.close()
