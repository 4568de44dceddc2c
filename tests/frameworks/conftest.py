"""Filters for warnings of the frameworks themselves. Warnings of this project stay errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent

BESIDE = ("test_distributed.py", "test_pages.py")
"""Tests that need torch alone, or are marked one by one: with the marker they would run twice in CI."""

THEIRS = [
    # Helper modules of ignite, MONAI and PyG are compiled on first use.
    "ignore:`torch.jit:DeprecationWarning",
    # PyG without pyg-lib says so whenever a sampler of its own is made.
    "ignore:Using 'NeighborSampler' without a 'pyg-lib':UserWarning",
    # torchdata's loader calls it when it is made.
    "ignore:'set_vital' is deprecated:UserWarning",
    # There are few CPUs on the machines that run tests; what torch says of it is not what is tested.
    "ignore:This DataLoader will create:UserWarning",
]


@pytest.fixture(scope="session", autouse=True)
def _no_monitor_thread() -> None:
    """tqdm's first bar starts a thread that lives as long as the process."""
    if importlib.util.find_spec("tqdm") is not None:
        from tqdm import tqdm

        tqdm.monitor_interval = 0


@pytest.hookimpl(tryfirst=True)  # before the selection by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            if item.path.name not in BESIDE:
                item.add_marker(pytest.mark.frameworks)
            for theirs in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(theirs))
