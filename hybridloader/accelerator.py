"""The device that batches are on their way to, as far as a loader has to do with it.

One protocol, so that all that is ours (threads, queues, slots that wait for their event) can be tested
where there is no device: `hybridloader.testing.FakeAccelerator` is one whose streams the test moves on.
Nothing here knows of batches, slots or threads, and torch is not imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Mark(Protocol):
    """A point in a stream."""

    def passed(self) -> bool:
        """Whether the device has come to it. Never waits."""

    def wait(self) -> None:
        """Until the device has come to it."""


class Accelerator(Protocol):
    """One device. Its methods may be called from any thread."""

    @property
    def name(self) -> str:
        """What ``tensor.to`` takes: ``"cuda:1"``."""

    @property
    def pins(self) -> bool:
        """Whether it knows page-locked memory."""

    def enter(self) -> None:
        """Make it the current device of this thread, for good."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in page-locked memory: itself, if it is there already. Raises `RuntimeError`."""

    def page_lock(self, address: int, size: int) -> None:
        """Have the driver lock the pages of `size` bytes. Raises `OSError` if it refuses."""

    def page_unlock(self, address: int) -> None:
        """Undo that; the pages may be unmapped then. Never raises, also while Python shuts down."""

    def side_stream(self) -> Any:
        """A new stream, which runs beside the others."""

    def current_stream(self) -> Any:
        """The stream of this thread."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What this thread does within is queued on `stream`."""

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, queued on this thread's stream: the host does not wait for it."""

    def mark(self, stream: Any) -> Mark:
        """A mark behind all that has been queued on `stream` so far."""

    def hold_up(self, stream: Any, mark: Mark) -> None:
        """`stream` waits for `mark`; the host does not."""

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses `tensor` too, so that its memory is not reused early."""


class _TorchMark:
    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def passed(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class TorchAccelerator:
    """A device of torch's: CUDA, XPU, MPS or what else `torch.accelerator` knows.

    Parameters
    ----------
    device
        With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"TorchAccelerator({self.name!r})"

    @property
    def name(self) -> str:
        return str(self.device)

    @property
    def pins(self) -> bool:
        # torch's loader excepts it as well: https://github.com/pytorch/pytorch/issues/86060
        return self.device.type != "mps"

    def enter(self) -> None:
        import torch

        torch.accelerator.set_device_index(self.device.index)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def page_lock(self, address: int, size: int) -> None:
        if self.device.type != "cuda":
            raise OSError(f"{self.device.type} has no call that locks pages which it did not make")
        import torch

        # cudaHostRegisterPortable: locked for the contexts of all devices, not only this one.
        code = torch.cuda.cudart().cudaHostRegister(address, size, 1)
        if int(code):
            reason = torch.cuda.cudart().cudaGetErrorString(code)
            raise OSError(f"the driver does not lock {size:,} bytes: {reason}")

    def page_unlock(self, address: int) -> None:
        import torch

        try:
            torch.cuda.cudart().cudaHostUnregister(address)
        except Exception:  # the driver has been shut down, and all its locks with it
            pass

    def side_stream(self) -> Any:
        import torch

        return torch.Stream(device=self.device)

    def current_stream(self) -> Any:
        import torch

        return torch.accelerator.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = stream
        return context

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def mark(self, stream: Any) -> Mark:
        return _TorchMark(stream.record_event())

    def hold_up(self, stream: Any, mark: Mark) -> None:
        assert isinstance(mark, _TorchMark)
        stream.wait_event(mark.event)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


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
    return TorchAccelerator(torch.device(kind.type, torch.accelerator.current_device_index()))
