"""Batches in page-locked memory, which a device reads without a stop at the host's own copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridloader.operators.base import Context, Length, Operator


@dataclass(frozen=True)
class PinMemory(Operator):
    """Pins what torch's DataLoader pins: tensors, in containers too, and what has a `pin_memory()`.

    The thread that pins sets the device that was current where the pipeline was started. Without an
    accelerator, items pass as they are, with torch's warning.

    Parameters
    ----------
    device
        Passed on to torch; None: the current accelerator.
    """

    device: Any = None

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        import torch

        if not torch.accelerator.is_available():
            warnings.warn(
                "pin_memory() has nothing to do: no accelerator was found, so items pass as they are",
                stacklevel=2,
            )
            return items
        return _Pinned(items, self.device, torch.accelerator.current_device_index())

    def seek(self, n: int) -> int:
        return n

    def length(self, upstream: Length) -> Length:
        return upstream


class _Pinned(Iterator[Any]):
    def __init__(self, items: Iterator[Any], device: Any, index: int) -> None:
        from torch.utils.data._utils.pin_memory import pin_memory

        self._items, self._device, self._index = items, device, index
        self._pin: Any = pin_memory
        self._set = False

    def __next__(self) -> Any:
        if not self._set:  # on the thread that pins: else it would open a context on device 0
            import torch

            torch.accelerator.set_device_index(self._index)
            self._set = True
        return self._pin(next(self._items), self._device)

    def close(self) -> None:
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
