"""Versions of torch: one that is too old is refused, and defaults are found as torch applies them."""

from __future__ import annotations

import subprocess
import sys

import torch

from hybridloader._support.installed_torch import default_device


def test_a_torch_that_is_too_old_is_refused_by_name_when_its_parts_are_imported() -> None:
    script = """if True:
        import torch
        del torch.accelerator
        torch.__version__ = "2.5.1"
        import hybridloader
        hybridloader.Pipeline, hybridloader.get_worker_info
        for name in "DataLoader", "StatefulDataLoader", "sampling":
            try:
                getattr(hybridloader, name).ShuffleSampler
            except ImportError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    told = done.stdout.splitlines()
    assert len(told) == 3
    for line in told:
        assert line.startswith("hybridloader needs torch 2.6 or later, and this Python has torch")
        assert "2.5.1" in line
        assert "pip install -U 'torch>=2.6'" in line


def test_the_default_device_is_that_of_the_innermost_block() -> None:
    assert default_device() == torch.device("cpu")
    with torch.device("meta"):
        assert default_device() == torch.device("meta")
        with torch.device("cpu:0"):
            assert default_device() == torch.device("cpu:0")
        assert default_device() == torch.empty(0).device == torch.device("meta")
    torch.set_default_device("meta")
    try:
        assert default_device() == torch.empty(0).device == torch.device("meta")
    finally:
        torch.set_default_device(None)
    assert default_device() == torch.device("cpu")
