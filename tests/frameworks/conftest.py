"""Filters for warnings of the frameworks themselves. Warnings of this project stay errors."""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

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


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hub; accelerate's state, which it keeps per process, and all generators as they were."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    gc.collect()


@pytest.hookimpl(tryfirst=True)  # before the selection by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            if item.path.name not in BESIDE:
                item.add_marker(pytest.mark.frameworks)
            for theirs in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(theirs))
