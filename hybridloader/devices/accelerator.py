"""The device that batches are on their way to, as far as a loader has to do with it.

One protocol, so that all that is ours (threads, queues, slots that wait for their event) can be tested
where there is no device: `hybridloader.testing.FakeAccelerator` is one whose streams the test moves on.
Nothing here knows of batches, slots or threads, and torch is not imported before it is asked for.
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
"""What counts as the current accelerator, the last one first asked; empty: torch's."""


@contextmanager
def taken_for_current(accelerator: Accelerator) -> Iterator[None]:
    """Within the block `accelerator` is what `current` gives, on every thread."""
    _installed.append(accelerator)
    try:
        yield
    finally:
        _installed.remove(accelerator)


def current() -> Accelerator | None:
    """The device that is current on this thread; None if there is no accelerator."""
    if _installed:
        return _installed[-1]
    import torch

    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return TorchAccelerator(torch.device(kind.type, _current_index(kind)))


def _current_index(kind: torch.device) -> int:
    """The index of the current device, without making a context: workers may still have to be forked."""
    import torch

    if initialised(torch.get_device_module(kind)) is False:
        return 0  # whoever chooses another initialises it
    return torch.accelerator.current_device_index()


def find(device: Any) -> Accelerator | None:
    """The accelerator that `device` names; None if that is the CPU. Makes no context.

    Parameters
    ----------
    device
        A str, a `torch.device` or an `Accelerator`. Without an index, the device that is current on
        this thread.

    Raises
    ------
    TypeError
        It is something else.
    ValueError
        There is no such device, or it is not an accelerator.
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

    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        raise ValueError(
            f"device={device!r} is not there: torch {torch.__version__} finds no accelerator on this "
            "machine. Leave device out, or say device='cpu', and batches stay where they are made"
        )
    if named.type != kind.type:
        raise ValueError(
            f"device={device!r} is not there: the accelerator that torch {torch.__version__} finds on "
            f"this machine is {kind.type!r}"
        )
    count = torch.accelerator.device_count()
    if named.index is not None and named.index >= count:
        raise ValueError(
            f"device={device!r} is not there: of {kind.type!r} devices this process sees {count}, "
            f"numbered from 0"
        )
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
        raise ValueError(f"device={device!r} names no device: {reason}") from None
