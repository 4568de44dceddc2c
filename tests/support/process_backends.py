"""Warnings of forks that may come again."""

from __future__ import annotations

from hybridloader.backends.process import backend
from support import once


def forget_warnings() -> None:
    """Let each warning come once more, those of forks too."""
    once.forget_warnings()
    backend._warned.clear()
