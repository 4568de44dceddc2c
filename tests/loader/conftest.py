"""Fixtures of the loader's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.sampler_loaders import Every


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def pace(steps: int) -> None:
        for module in ("hybridloader.loader.samplers", "hybridloader.engine.dataset_state"):
            monkeypatch.setattr(f"{module}.Cadence", lambda **_: Every(steps))

    return pace
