"""Batches in page-locked memory, or on a device: made ready by a thread of their own.

What is pinned and how it is copied is told in `hybridloader.devices.pinning`. Here is how a pipeline
runs it: one iterator for the thread, one for whoever takes what that has made ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from hybridloader._support.errors import add_note
from hybridloader.devices.accelerator import current, find
from hybridloader.devices.pinning import (
    AHEAD,
    BUFFER_BYTES,
    Pinner,
    Sent,
    Transfer,
    check,
    pinner_for,
)
from hybridloader.engine.relay import Relay
from hybridloader.pipeline.operators.base import Context, OneForOne, OperatorIterator


@dataclass(frozen=True)
class PinMemory(OneForOne):
    """Pins what torch's DataLoader pins: tensors, in containers too, and what has a `pin_memory()`.

    A thread of its own does it, on the device that was current where the pipeline was started. Without
    an accelerator, items pass as they are, with a warning.

    Parameters
    ----------
    device
        The accelerator for which memory is locked; None: the current one.
    prefetch
        Items that may wait, at least 1.
    buffer_bytes
        Bytes that these may have together. An item that is larger than that waits alone.
    """

    device: Any = None
    _: KW_ONLY
    prefetch: int = AHEAD
    buffer_bytes: int = BUFFER_BYTES

    moves: ClassVar[bool] = False
    """True if items come on the device."""

    def __post_init__(self) -> None:
        try:
            Transfer(self.device, self.prefetch, self.buffer_bytes)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None

    def check(self) -> None:
        """Refuse a device that is not there, before anything is started."""
        check(self.device)

    def pinner(self) -> Pinner | None:
        """Return what handles the items of one run, for the device that is current on this thread."""
        accelerator = current() if self.device is None else find(self.device)
        if accelerator is None or not accelerator.pins:
            return None
        return Pinner(accelerator, self.prefetch, self.buffer_bytes)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        raise TypeError(f"{self.name} is opened by the engine, as a relay")


@dataclass(frozen=True)
class ToDevice(PinMemory):
    """Copies what `PinMemory` pins to a device, ahead of whoever takes it.

    A thread of its own queues the copies on a stream beside the others. The current stream of the thread
    that takes an item waits for them. So it comes last, or before steps that your loop itself runs.

    Parameters
    ----------
    device
        A str such as ``"cuda"``, a `torch.device` or an `Accelerator`. Without an index, the device that
        is current where the pipeline is started.
    prefetch, buffer_bytes
        See `PinMemory`; the items wait on the device, and one more is being copied meanwhile.
    """

    moves: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "to"

    def check(self) -> None:
        if self.device is None:
            raise TypeError("to: give a device, such as 'cuda'")
        super().check()

    def pinner(self) -> Pinner | None:
        transfer = Transfer(self.device, self.prefetch, self.buffer_bytes)
        return pinner_for(transfer, pin_memory=False)


class Sending(OperatorIterator):
    """Iterator for the relay's thread: items, pinned or moved one after the other."""

    def __init__(self, items: Iterator[Any], pinner: Pinner, name: str) -> None:
        super().__init__(items)
        self._pinner, self._name = pinner, name
        # All the mutable state:
        self._number = -1

    def __next__(self) -> Sent:
        self._number += 1
        item = [self._pull()]
        try:
            return self._pinner.send(item)
        except Exception as error:
            add_note(error, f"In stage {self._name!r}, at item {self._number} of this pass.")
            raise


class Taking(Iterator[Any]):
    """Iterator for the thread that takes what `Sending` made ready, and for its current stream."""

    def __init__(self, relay: Relay, pinner: Pinner) -> None:
        self._relay, self._pinner = relay, pinner

    def __next__(self) -> Any:
        return self._pinner.take(next(self._relay))

    def next_nowait(self) -> Any:
        """Return the next item if it is there. Raises `NotReady` if it is not."""
        return self._pinner.take(self._relay.next_nowait())

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Relay.when_ready`."""
        self._relay.when_ready(wake)

    def close(self) -> None:
        """End the thread."""
        self._relay.close()
