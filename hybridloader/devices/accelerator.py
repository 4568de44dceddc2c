"""Devices of torch, of any kind, and the choice of the one that batches are copied to.

Everything else asks a device through one protocol, `Accelerator`, so that threads, queues and slots that
wait for an event can be tested without one. The code uses `torch.accelerator` and `torch.Stream`, which
every device has. The module of the device (`torch.cuda`) may have its own class of streams. Two
abilities, which only some devices have, are tried once: page-locking memory that torch did not make, and
handing batches from one stream to another. torch is not imported before a device is looked for.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from hybridloader._support.torch_env import initialized
from hybridloader.memory.accelerator import Accelerator
from hybridloader.memory.packing import dense_parts

if TYPE_CHECKING:
    import torch

    from hybridloader.memory.accelerator import StreamMark


_NO_MORE = (2, 304)
"""Codes of the driver if no more pages can be locked: `cudaErrorMemoryAllocation`, and
`cudaErrorOperatingSystem` for a failed system call."""


_LOOK = 0.001
"""Seconds between two queries of an event: the copies of several batches are queued meanwhile."""


_side_streams: dict[torch.device, Any] = {}
"""Stream of each device of this process beside the user's, if usable, made once. torch's allocator keeps
the memory that a stream has used for that stream, so a new one each epoch would take as much again."""


class TorchAccelerator:
    """Device of torch: CUDA, XPU, MPS or any other that `torch.accelerator` knows.

    Asking `queues_copies` may make a context on it; the other properties do not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device  # with its index

    def __repr__(self) -> str:
        return f"TorchAccelerator({self.name!r})"

    @property
    def name(self) -> str:
        return str(self.device)

    @property
    def pins(self) -> bool:
        # torch's loader excludes MPS too: https://github.com/pytorch/pytorch/issues/86060
        return self.device.type != "mps"

    @property
    def locks_pages(self) -> bool:
        return hasattr(self._module, "cudart")  # torch has no such call for other devices

    @property
    def queues_copies(self) -> bool:
        return self.pins and self._side is not None

    def enter(self) -> None:
        import torch

        torch.accelerator.set_device_index(self.device.index)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    def page_lock(self, address: int, size: int) -> None:
        if not self.locks_pages:
            raise OSError(f"{self.device.type} can lock only pages that it allocated")
        cudart = _cudart()
        with self._chosen():
            # cudaHostRegisterPortable: locked for the contexts of all devices, not only this one.
            code = cudart.cudaHostRegister(address, size, 1)
            if int(code):
                self._forget_error()
        if int(code):
            reason = cudart.cudaGetErrorString(code)
            text = f"the driver does not lock {size:,} bytes: {reason}"
            raise OSError(errno.ENOMEM, text) if int(code) in _NO_MORE else OSError(text)

    def page_unlock(self, address: int) -> None:
        try:
            with self._chosen():
                if int(_cudart().cudaHostUnregister(address)):
                    self._forget_error()
        except Exception:  # the driver was shut down, which released all locks
            pass

    def side_stream(self) -> Any:
        return self._side if self.queues_copies else None

    def current_stream(self) -> Any:
        # The device's own class of streams, if any: objects with a `record_stream` may need it.
        import torch

        return getattr(self._module, "current_stream", torch.accelerator.current_stream)(
            self.device
        )

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        import torch

        index = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(stream)  # also makes its device the current one
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        # Only page-locked memory is kept until the copy has read it, on every kind of device.
        return tensor.to(self.device, non_blocking=self.queues_copies and tensor.is_pinned())

    def mark(self, stream: Any) -> StreamMark:
        if self._captures(stream):
            raise RuntimeError(
                f"{stream} is being captured into a graph, which can't wait for a copy that is outside "
                "it; take batches outside the capture"
            )
        mark: StreamMark = stream.record_event()
        return mark

    def hold_up(self, stream: Any, mark: StreamMark) -> None:
        stream.wait_event(mark)

    def wait(self, mark: StreamMark) -> None:
        while not mark.query():  # `synchronize` of most events keeps a core busy
            time.sleep(_LOOK)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        import torch

        # Only dense tensors have `record_stream`.
        nested = tensor.layout is torch.strided and tensor.is_nested
        for part in dense_parts(tensor) or [tensor.values() if nested else tensor]:
            part.record_stream(stream)

    @property
    def _side(self) -> Any:
        if self.device not in _side_streams:
            _side_streams.setdefault(self.device, self._asked())
        return _side_streams[self.device]

    def _asked(self) -> Any:
        """Return a stream from which batches can be handed over, or None.

        torch has no call that lists the abilities of a device, but an unsupported call raises.
        """
        import torch

        kind = getattr(self._module, "Stream", torch.Stream)
        try:
            stream = kind(self.device)
            if stream == kind(self.device):  # the device has one stream: MPS
                return None
            self.mark(stream)
            torch.empty(0, device=self.device).record_stream(stream)
        except RuntimeError:
            return None
        return stream

    def _captures(self, stream: Any) -> bool:
        """Return True if a graph captures `stream` now."""
        if hasattr(stream, "is_capturing"):  # from torch 2.13 on
            return bool(stream.is_capturing())
        query = getattr(self._module, "is_current_stream_capturing", None)
        if query is None:
            return False
        with self.on(stream):
            return bool(query())

    def _forget_error(self) -> None:
        """Clear the error that a call of the CUDA runtime has left on this thread.

        Otherwise torch would raise it from this thread's next kernel, which did not cause it. torch
        does not expose cudaGetLastError, but calls it after each launch.
        """
        import torch

        try:
            torch.ones((), device=self.device)
        except RuntimeError:
            pass

    def _chosen(self) -> AbstractContextManager[Any]:
        """Make this device the current one for a call: another one would get a context by it."""
        context: AbstractContextManager[Any] = self._module.device(self.device)
        return context

    @property
    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.device)


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def current() -> Accelerator | None:
    """Return the device that is current on this thread; None if there is no accelerator."""
    import torch

    from hybridloader._support.installed_torch import current_accelerator

    kind = current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return None
    return TorchAccelerator(torch.device(kind.type, _current_index(kind)))


def _current_index(kind: torch.device) -> int:
    """Return the current device's index without making a context: workers may yet have to be forked."""
    import torch

    if initialized(torch.get_device_module(kind)) is False:
        return 0  # selecting another device initializes it
    return torch.accelerator.current_device_index()


def find(device: Any) -> Accelerator | None:
    """Return the accelerator that `device` names; None for the CPU. Makes no context.

    Without an index it is the device that is current on this thread. Raises `ValueError` if there is no
    such device, or it is not an accelerator.
    """
    if hasattr(device, "side_stream"):
        found: Accelerator = device
        return found
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
