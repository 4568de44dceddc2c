"""Fixtures of the tests of fetching and collation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.once import forget_warnings
from torch.utils.data._utils import collate as torchs

from hybridloader.fetching.collate import teach_torch
from hybridloader.memory.slots import PrivateSlots, set_slots


@pytest.fixture
def slots() -> Iterator[PrivateSlots]:
    """Slots for the thread of the test, as for a worker."""
    teach_torch()
    mine = PrivateSlots(1 << 30)
    before = set_slots(mine)
    yield mine
    set_slots(before)


@pytest.fixture
def torchs_map() -> Iterator[dict[Any, Any]]:
    """torch's map, put back as it was afterwards."""
    before = dict(torchs.default_collate_fn_map)
    yield torchs.default_collate_fn_map
    torchs.default_collate_fn_map.clear()
    torchs.default_collate_fn_map.update(before)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that retries would have slept."""
    found: list[float] = []
    monkeypatch.setattr("hybridloader.fetching.item_loop.sleep", found.append)
    return found


@pytest.fixture
def warned_anew() -> None:
    """Let warnings that come once per process come in this test."""
    forget_warnings()
