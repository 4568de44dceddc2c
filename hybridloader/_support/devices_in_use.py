"""Devices of torch that this process uses; asking neither imports torch nor uses another device."""

from __future__ import annotations

import sys
from typing import Any

_SPELT = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}


def modules() -> dict[str, Any]:
    """Modules such as `torch.cuda`, by the kind of device; empty if torch is not imported.

    They are the module of the accelerator that `torch.accelerator` names, and CUDA's: where that
    accelerator comes from outside of torch, CUDA may be in use beside it.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found = {"cuda": torch.cuda}
    kind = torch.accelerator.current_accelerator()
    if kind is not None:
        found.setdefault(kind.type, torch.get_device_module(kind))
    return found


def initialised(module: Any) -> bool | None:
    """Tell whether this process has a context of that kind; None if the module can't tell."""
    tell = getattr(module, "is_initialized", None)
    return None if tell is None else bool(tell())


def device_in_use() -> str | None:
    """Return the kind of device that this process has a context of, for messages; None if none."""
    for kind, module in modules().items():
        if initialised(module):
            return _SPELT.get(kind, kind)
    return None
