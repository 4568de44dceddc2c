"""torch devices that this process uses; a query neither imports torch nor uses another device."""

from __future__ import annotations

import sys
from typing import Any

_SPELT = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}


def modules() -> dict[str, Any]:
    """Return modules such as `torch.cuda`, by the kind of device; empty if torch is not imported.

    The modules are CUDA's and that of the accelerator which `torch.accelerator` names. If another
    package provides that accelerator, CUDA may be in use too.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    from hybridloader._support.installed_torch import current_accelerator

    found = {"cuda": torch.cuda}
    kind = current_accelerator()
    if kind is not None:
        found.setdefault(kind.type, torch.get_device_module(kind))
    return found


def initialised(module: Any) -> bool | None:
    """Return True if this process has a context on such a device; None if the module can't report it."""
    query = getattr(module, "is_initialized", None)
    return None if query is None else bool(query())


def device_in_use() -> str | None:
    """Return the kind of device on which this process has a context, for messages; None if none."""
    for kind, module in modules().items():
        if initialised(module):
            return _SPELT.get(kind, kind)
    return None
