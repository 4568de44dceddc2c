"""Abilities of the installed torch, 2.6 or later: the only module that asks for them.

Importing it imports torch, and refuses one that is too old. Differences between the versions:

- `torch.accelerator` is new in 2.6; its `current_accelerator` returns None, without a device, since 2.7.
- `rand_like`, `randn_like` and `randint_like` take a generator since 2.10.
- `WorkerInfo` has the fields `rng` and `worker_method` since 2.12; before, any fields can be given.

Streams, autocast by kind of device, and torch's modes are as in 2.13 from 2.6 on.
"""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

if not hasattr(torch, "accelerator"):
    raise ImportError(
        f"hybridloader needs torch 2.6 or later, and this Python has torch {torch.__version__} in "
        f"{torch.__path__[0]}. Install another version: pip install -U 'torch>=2.6'"
    )

try:
    from torch.utils.data._utils.worker import _RNG
except ImportError:
    from types import SimpleNamespace as _RNG  # type: ignore[assignment]

WorkerGenerators = _RNG  # class of a worker's own generators, for `WorkerInfo.rng`


def current_accelerator() -> torch.device | None:
    """Return the kind of device that torch calls the accelerator; None if there is none."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # of torch 2.6
        return None


def default_device() -> torch.device:
    """Return the default device of new tensors on this thread.

    Before 2.8, `torch.get_default_device` knows only that of `torch.set_default_device`.
    """
    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            device: torch.device = mode.device
            return torch.tensor([]).device if device.index is None else device
    return torch.device("cpu")


def takes_generator(name: str) -> bool:
    """Return True if torch's function of this name takes a generator."""
    packet = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, each) for each in packet.overloads()]
    return any("generator" in [each.name for each in one._schema.arguments] for one in overloads)
