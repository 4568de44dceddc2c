"""Choice of the accelerator that batches are copied to.

Everything else asks it through one protocol, so that threads, queues and slots that wait for an event
can be tested without a device. Nothing here knows of batches, slots or threads, and torch is not
imported before a device is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hybridloader._support.devices_in_use import initialised
from hybridloader.devices.torch_accelerator import TorchAccelerator
from hybridloader.memory.accelerator import Accelerator

if TYPE_CHECKING:
    import torch


_installed: list[Accelerator] = []
"""Accelerators that replace torch's, the last one first; empty: torch's is the current one."""


@contextmanager
def taken_for_current(accelerator: Accelerator) -> Iterator[None]:
    """Make `current` return `accelerator` within the block, on every thread."""
    _installed.append(accelerator)
    try:
        yield
    finally:
        _installed.remove(accelerator)


def current() -> Accelerator | None:
    """Return the device that is current on this thread; None if there is no accelerator."""
    if _installed:
        return _installed[-1]
    import torch

    from hybridloader._support.installed_torch import current_accelerator

    kind = current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return None
    return TorchAccelerator(torch.device(kind.type, _current_index(kind)))


def _current_index(kind: torch.device) -> int:
    """Return the current device's index without making a context: workers may yet have to be forked."""
    import torch

    if initialised(torch.get_device_module(kind)) is False:
        return 0  # selecting another device initialises it
    return torch.accelerator.current_device_index()


def find(device: Any) -> Accelerator | None:
    """Return the accelerator that `device` names; None for the CPU. Makes no context.

    Without an index it is the device that is current on this thread. Raises `ValueError` if there is no
    such device, or it is not an accelerator.
    """
    if hasattr(device, "side_stream"):
        found: Accelerator = device
        return found
    for accelerator in reversed(_installed):
        if str(device) in (accelerator.name, accelerator.name.partition(":")[0]):
            return accelerator
    named = _parsed(device)
    if named.type == "cpu":
        return None
    import torch

    from hybridloader._support.installed_torch import current_accelerator

    kind, problem = current_accelerator(), ""
    if kind is None or not torch.accelerator.is_available():
        problem = (
            f"torch {torch.__version__} finds no accelerator on this machine. Omit device, or pass "
            "device='cpu', which leaves batches where they are made"
        )
    elif named.type != kind.type:
        problem = (
            f"the accelerator that torch {torch.__version__} finds on this machine is {kind.type!r}"
        )
    elif named.index is not None and named.index >= (count := torch.accelerator.device_count()):
        problem = f"of {kind.type!r} devices this process sees {count}, numbered from 0"
    if kind is None or problem:
        raise ValueError(f"device={device!r} is not available: {problem}")
    index = _current_index(kind) if named.index is None else named.index
    return TorchAccelerator(torch.device(kind.type, index))


def _parsed(device: Any) -> torch.device:
    import torch

    if isinstance(device, torch.device):
        return device
    if not isinstance(device, str):
        raise TypeError(
            f"device must be a str such as 'cuda', a torch.device or an Accelerator, got {device!r}"
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={device!r} is not a device: {reason}") from None
