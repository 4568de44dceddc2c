"""Machine of these tests: its cores look free, whatever else runs on it."""

from __future__ import annotations

import pytest
from support.recordings import free_cores_are_recorded


@pytest.fixture
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    free_cores_are_recorded(monkeypatch)
