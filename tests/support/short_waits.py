"""Shorter waits for workers that are stuck on purpose."""

from __future__ import annotations

import pytest

_WAITS = (
    "hybridloader.engine.contract.PATIENCE",
    "hybridloader.engine.stage.CLOSING",
    "hybridloader.running.executor.CLOSING",
    "hybridloader.backends.process.crew.GRACE",
)


def shorten_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `close` wait 0.1 s, instead of 1 or 2, for workers that are to end."""
    for name in _WAITS:
        monkeypatch.setattr(name, 0.1)
