"""Thread-local modes of torch: gradients, inference, autocast and the default device.

A thread of this package adopts these modes from the thread that it works for. docs/backends.md lists
the modes that it does not adopt. torch is not imported for this.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, NamedTuple


class Modes(NamedTuple):
    """Modes of a thread; at least one differs from those of a new thread."""

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
    """Return the modes of this thread; None if they equal those of a new thread."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    from hybridloader._support.installed_torch import current_accelerator, default_device

    accelerator = current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    modes = Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in on),
        torch.is_autocast_cache_enabled() if on else True,
        # torch implements a default device as a function mode; most threads have none.
        str(default_device()) if torch._C._is_torch_function_mode_enabled() else "cpu",
    )
    return None if modes == _OF_A_NEW_THREAD else modes


class TakenModes(ExitStack):
    """Modes that this thread has adopted; the end of the block restores the thread's modes."""

    _modes: Modes | None = None

    def take(self, modes: Modes | None) -> None:
        """Adopt `modes` in place of the ones adopted before, if they differ."""
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
            # `with device:` also records the device for the whole process. Threads that enter and leave
            # in any order would leave a wrong device there, and torch.compile would compile again.
            device, mode = torch.utils._device.DeviceContext(modes.device), torch.overrides
            mode.TorchFunctionMode.__enter__(device)
            self.callback(mode.TorchFunctionMode.__exit__, device, None, None, None)
