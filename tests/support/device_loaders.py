"""Loaders for tests on a real device, and scripts that use one in their own process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from hybridloader import DataLoader, Memory, SharedMemory, Threads
from support.digested_batches import KIND, Noise
from support.fake_accelerator import Accelerator, find

LIMIT = 24 << 20
"""Bytes of the slots: some forty batches of half a MiB, so that each is filled again and again."""

METHOD = "spawn" if importlib.util.find_spec("loky") is None else "loky"

BACKENDS: dict[str, Any] = {
    "threads": Threads(memory=Memory(limit=LIMIT)),
    "processes": SharedMemory(METHOD, memory=Memory(limit=LIMIT)),
}

on_backends = pytest.mark.parametrize("backend", list(BACKENDS.values()), ids=list(BACKENDS))

only_cuda = pytest.mark.skipif(KIND != "cuda", reason="only CUDA has this")


def queueing() -> Accelerator:
    """Return the device, if it copies while the host runs on."""
    device = find(KIND)
    assert isinstance(device, Accelerator)
    if not device.queues_copies:
        pytest.skip("the device does not queue copies beside the user's stream")
    return device


def loader_of(
    samples: int, backend: Any, *, data: Any = None, workers: int = 2, **options: Any
) -> DataLoader:
    """Return a loader of batches of 8 samples of `Noise`."""
    data = Noise(samples) if data is None else data
    return DataLoader(data, 8, num_workers=workers, backend=backend, **options)


_HEAD = f"""
import os
import torch
from support.digested_batches import Noise, busy, digest, wanted
from support.device_loaders import BACKENDS, loader_of

KIND = {KIND!r}
"""


def run(script: str, *, head: str = _HEAD, ignored: bool = False) -> None:
    """Run `script` in its own process; it must end well and print no error, or it is `ignored`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    errors = "" if ignored and done.returncode == 0 else done.stderr.strip()
    last = errors.rpartition("\n")[2]
    assert (done.returncode, errors) == (0, ""), f"exit code {done.returncode}: {last}\n{errors}"
