"""Tests that need a GPU: ``pytest -m cuda tests/cuda``. Skipped, all of them, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if not there:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _context() -> None:
    """What the driver and torch open once, so that no single test seems to have left it."""
    if not torch.cuda.is_available():
        return
    from hybridloader.devices.accelerator import find

    device = find("cuda")
    assert device is not None
    with device.on(device.side_stream()):
        there = device.move(torch.zeros(1 << 20).pin_memory())
        (there.to(torch.int64) * there).sum().item()
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _all_is_done() -> Iterator[None]:
    """No test leaves work on the device to the next."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
