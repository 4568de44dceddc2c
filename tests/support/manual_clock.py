"""A clock that a test moves."""

from __future__ import annotations


class Clock:
    """Stands still but where it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
