"""Slots that a thread collates into, and hooks that run when a process first uses slots.

A backend sets the slots of its workers' threads. The code that collates is in a higher layer, and may
be loaded later; it registers a hook.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Slots(Protocol):
    """Source of memory for a worker's batches."""

    def empty(self, size: int) -> Any | None:
        """Return an uninitialised buffer of `size` bytes; None if no slot is available."""


class _ThreadLocals(threading.local):
    slots: Slots | None = None  # slots to collate into; None: each batch gets new memory


on_this_thread = _ThreadLocals()


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
    """Collate into `slots` on this thread of a worker process, and run the hooks at the first call."""
    global _used
    set_slots(slots)
    if not _used:
        _used = True
        for act in _teach:
            act()
