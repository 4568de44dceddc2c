"""Fixtures of the memory's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_accelerator import FakeAccelerator
from support.locked_slots import PageLocks, Private, Shared, page_locks


@pytest.fixture
def device() -> FakeAccelerator:
    return FakeAccelerator()


@pytest.fixture
def locks(device: FakeAccelerator) -> Iterator[PageLocks]:
    yield PageLocks(device)
    device.run()
    PageLocks(device).collect()
    assert not page_locks._waiting
    page_locks._inherited.clear()


@pytest.fixture(params=[Private, Shared])
def memory(request: pytest.FixtureRequest, locks: PageLocks) -> Any:
    return request.param(locks)
