"""The kinds of shared memory that the tests of containers run in."""

from __future__ import annotations

import pytest
from support.containers import shared_buffer


@pytest.fixture(params=["nameless", "named"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of shared memory that containers of this test are made in."""
    kind: str = request.param
    if kind == "nameless" and not shared_buffer.nameless_usable():
        pytest.skip("there is no memfd, or no /proc")
    monkeypatch.setattr(shared_buffer, "nameless_usable", lambda: kind == "nameless")
    return kind
