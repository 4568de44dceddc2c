"""Fixtures of the loader's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.sampler_loaders import pace


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_pace(steps: int) -> None:
        pace(monkeypatch, steps)

    return set_pace
