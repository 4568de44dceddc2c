"""Fixture of the tests that install our engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader as TorchLoader

from hybridloader import uninstall

TORCHS = vars(TorchLoader)["_get_iterator"]


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    uninstall()
    assert vars(TorchLoader)["_get_iterator"] is TORCHS
