"""Modes of torch that belong to a thread: gradients, inference, autocast and the default device.

A thread of ours takes over those of the thread that it works for. torch is not imported for it. Other
modes of a thread are not taken over: docs/backends.md lists them.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, NamedTuple


class Modes(NamedTuple):
    """Modes of a thread, not all of which are those of a new thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, Any], ...]
    """Each type of device for which autocast is on, with its dtype."""
    cache: bool
    """True if autocast keeps the weights that it has cast."""
    device: str
    """Default device of new tensors."""


_OF_A_NEW_THREAD = Modes(True, False, (), True, "cpu")


def modes_here() -> Modes | None:
    """Return the modes of this thread; None if they are those of a new thread."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    modes = Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in on),
        torch.is_autocast_cache_enabled() if on else True,
        # A default device is one of torch's function modes, and these are rare.
        str(torch.get_default_device()) if torch._C._is_torch_function_mode_enabled() else "cpu",
    )
    return None if modes == _OF_A_NEW_THREAD else modes


class TakenModes(ExitStack):
    """Modes that a thread of ours has taken over; left at the end of the block. For one thread."""

    _modes: Modes | None = None

    def take(self, modes: Modes | None) -> None:
        """Take `modes` in place of those that were taken before, if they are others."""
        if modes == self._modes:
            return
        self.close()
        self._modes = modes
        if modes is None:
            return
        torch: Any = sys.modules["torch"]
        if modes.inference:
            self.enter_context(torch.inference_mode())
        self.enter_context(torch.set_grad_enabled(modes.grad))
        for kind, dtype in modes.autocast:
            self.enter_context(torch.autocast(kind, dtype, cache_enabled=modes.cache))
        if modes.device != "cpu":
            # Not by `with device:`. That also notes the device for the process, which threads that enter
            # and leave in any order would leave wrong; torch.compile then compiles anew.
            device, mode = torch.utils._device.DeviceContext(modes.device), torch.overrides
            mode.TorchFunctionMode.__enter__(device)
            self.callback(mode.TorchFunctionMode.__exit__, device, None, None, None)
