"""Functions of later versions of torch, for tests that run on all versions from 2.6 on."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from hybridloader._support.installed_torch import current_accelerator, default_device
from hybridloader._support.torch_env import device_in_use

__all__ = ["current_accelerator", "device_in_use"]


def _of_the_worker() -> torch.Generator | None:
    info = get_worker_info()
    rng = None if info is None else info.rng
    return None if rng is None else rng.torch_generator


thread_safe_generator = getattr(torch.random, "thread_safe_generator", _of_the_worker)
"""Function of torch 2.12 and later; before, the generator that it would return."""

with torch.device("meta"):
    knows_blocks = torch.get_default_device().type == "meta"


def get_default_device() -> torch.device:
    """Return torch's answer; ours if torch's knows the default of `set_default_device` alone."""
    try:
        return torch.get_default_device() if knows_blocks else default_device()
    except AttributeError:  # of torch 2.8, after `set_default_device(None)`
        return torch.device("cpu")


with warnings.catch_warnings(record=True) as _caught:
    warnings.simplefilter("always")
    iter(DataLoader(range(1), pin_memory=True))  # type: ignore[arg-type]

warns_without_accelerator = bool(_caught)
"""True if torch's loader warns here that pin_memory=True does nothing; 2.6 never does so."""

try:
    takes_numpy_bools = torch.as_tensor(np.False_).dtype == torch.bool
except (TypeError, DeprecationWarning):  # torch 2.6, with numpy 2 and 1.26
    takes_numpy_bools = False
