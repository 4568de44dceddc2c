"""Slots that a thread collates into; whoever collates is told as soon as there are some.

A backend sets them on the threads of its workers. The code that collates lies above, and may be loaded
later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Slots(Protocol):
    """Source of memory for a worker's batches."""

    def empty(self, size: int) -> Any | None:
        """Return an uninitialised buffer of `size` bytes; None if there can be none."""


class _OnThisThread(threading.local):
    slots: Slots | None = None  # slots to collate into; None: each batch gets memory of its own


on_this_thread = _OnThisThread()


def set_slots(slots: Slots | None) -> Slots | None:
    """Collate into `slots` on this thread from now on; return the slots that were set before."""
    before, on_this_thread.slots = on_this_thread.slots, slots
    return before


_teach: list[Callable[[], None]] = []
_used = False


def when_slots_are_used(act: Callable[[], None]) -> None:
    """Call `act` once a worker of this process collates into slots: now, or later."""
    _teach.append(act)
    if _used:
        act()


def collate_into(slots: Slots) -> None:
    """Collate into `slots` on this thread of a worker process, whatever does the collation."""
    global _used
    set_slots(slots)
    if not _used:
        _used = True
        for act in _teach:
            act()
