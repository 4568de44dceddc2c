"""Tests that need an accelerator: ``pytest -m accelerator tests/accelerator``.

Skipped where there is none, and unless asked for: a process that has used a device is refused a fork, so
they can't run beside the other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = None
    if not torch.accelerator.is_available():
        reason = "needs an accelerator"
    elif "accelerator" not in config.option.markexpr:
        reason = (
            "a process that has used a device is refused forks: "
            "run pytest -m accelerator tests/accelerator"
        )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.accelerator)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _context() -> None:
    """Open once what the driver and torch keep open, so that no single test seems to have left it."""
    from support.digested_batches import KIND, SIZE, busy, digest
    from support.fake_accelerator import find

    device = find(KIND)
    assert device is not None
    host = torch.zeros(8, SIZE, dtype=torch.uint8)
    there = device.move(device.pin(host) if device.pins else host)
    # A kernel is loaded when it is first launched, which may wait for all that runs on the device
    # (CUDA_MODULE_LOADING): not in a test that asks who waits for whom.
    digest(there).cpu()
    busy(0.001)
    torch.accelerator.synchronize()


@pytest.fixture(autouse=True)
def _all_is_done() -> Iterator[None]:
    """No test leaves work on the device to the next."""
    yield
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
