"""Batches in page-locked memory, or on a device: made ready by a thread.

See `hybridloader.devices.pinning` for the rules of pinning and copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from hybridloader.devices.accelerator import current, find
from hybridloader.devices.pinning import AHEAD, BUFFER_BYTES, Pinner, Transfer, check, pinner_for
from hybridloader.running.operator import Context, OneForOne, RelayOptions


@dataclass(frozen=True)
class PinMemory(OneForOne):
    """Pin tensors, in containers too, and objects with a `pin_memory()`, as torch's DataLoader does.

    A thread pins them, for the device that was current where the run was started. Without an
    accelerator, items are passed on unchanged, with a warning.

    Parameters
    ----------
    device
        The accelerator for which memory is locked; None: the current one.
    batches_ahead
        Items that may wait, at least 1.
    buffer_bytes
        Bytes that these may have together. An item that is larger than that waits alone.
    """

    device: Any = None
    _: KW_ONLY
    batches_ahead: int = AHEAD
    buffer_bytes: int = BUFFER_BYTES

    begins_anew = True
    moves: ClassVar[bool] = False
    """True if items come on the device."""

    def __post_init__(self) -> None:
        try:
            Transfer(self.device, self.batches_ahead, self.buffer_bytes)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None

    @property
    def relay(self) -> RelayOptions:
        return RelayOptions(self.batches_ahead, self.pinner, self.moves)

    def check_run(self) -> None:
        check(self.device)

    def pinner(self) -> Pinner | None:
        """Return the pinner of one run, for the device that is current on this thread."""
        accelerator = current() if self.device is None else find(self.device)
        if accelerator is None or not accelerator.pins:
            return None
        return Pinner(accelerator, self.batches_ahead, self.buffer_bytes)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        raise TypeError(f"{self.name} is opened by the engine, as a relay")


@dataclass(frozen=True)
class ToDevice(PinMemory):
    """Copies the tensors that `PinMemory` would pin to a device, ahead of the loop.

    A thread queues the copies on a stream beside the others. The current stream of the thread that takes
    an item waits for them. So it comes last, or before steps that your loop itself runs.

    Parameters
    ----------
    device
        A str such as ``"cuda"``, a `torch.device` or an `Accelerator`. Without an index, the device that
        is current where the pipeline is started.
    batches_ahead, buffer_bytes
        See `PinMemory`; the items wait on the device, and one more is being copied meanwhile.
    """

    moves: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "to"

    def check_run(self) -> None:
        if self.device is None:
            raise TypeError("to: give a device, such as 'cuda'")
        super().check_run()

    def pinner(self) -> Pinner | None:
        transfer = Transfer(self.device, self.batches_ahead, self.buffer_bytes)
        return pinner_for(transfer, pin_memory=False)
