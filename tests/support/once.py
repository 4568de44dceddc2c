"""Warnings that the library gives once."""

from __future__ import annotations

from hybridloader._support import text


def forget_warnings() -> None:
    """Let each warning come once more."""
    text.warn_once.cache_clear()
