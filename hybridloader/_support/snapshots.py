"""Snapshots of collections that other threads change meanwhile."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

T = TypeVar("T")


def snapshot(things: Collection[T]) -> tuple[T, ...]:
    """Return the content of a deque, or of a weak collection, to which other threads may add."""
    while True:
        try:
            return tuple(things)
        except RuntimeError:  # "changed size during iteration"
            continue
