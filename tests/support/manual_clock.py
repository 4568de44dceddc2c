"""Clock that a test moves."""

from __future__ import annotations


class Clock:
    """Clock whose time changes only by assignment."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
