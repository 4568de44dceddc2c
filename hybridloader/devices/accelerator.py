"""The device that batches are on their way to, as far as a loader has to do with it.

One protocol, so that all that is ours (threads, queues, slots that wait for their event) can be tested
where there is no device: `hybridloader.testing.FakeAccelerator` is one whose streams the test moves on.
Nothing here knows of batches, slots or threads, and torch is not imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Mark(Protocol):
    """A point in a stream."""

    def passed(self) -> bool:
        """Whether the device has come to it. Never waits."""


class Accelerator(Protocol):
    """One device. Its methods may be called from any thread."""

    @property
    def name(self) -> str:
        """What ``tensor.to`` takes: ``"cuda:1"``."""

    @property
    def pins(self) -> bool:
        """Whether it knows page-locked memory."""

    @property
    def locks_pages(self) -> bool:
        """Whether `page_lock` can be had at all."""

    def enter(self) -> None:
        """Make it the current device of this thread, for good."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in page-locked memory: itself, if it is there already, or on a device.

        Raises `RuntimeError`, also where the system locks no more pages.
        """

    def page_lock(self, address: int, size: int) -> None:
        """Have the driver lock the pages of `size` bytes. Raises `OSError` if it refuses."""

    def page_unlock(self, address: int) -> None:
        """Undo that; the pages may be unmapped then. Never raises, also while Python shuts down."""

    def side_stream(self) -> Any:
        """A stream that runs beside those of the user; None if the device has one only."""

    def current_stream(self) -> Any:
        """The stream of this thread."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What this thread does within is queued on `stream`."""

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, queued on this thread's stream: the host does not wait for it.

        Itself, if it is there already.
        """

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


_side_streams: dict[torch.device, Any] = {}
"""One for each device and process: torch's allocator keeps the memory that a stream has used for that
stream, so another one for every pass would take as much again."""


class _Passed:
    """The mark of a device that has no streams: what was queued is done."""

    def passed(self) -> bool:
        return True


_PASSED = _Passed()


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

    @property
    def locks_pages(self) -> bool:
        return self.device.type == "cuda"  # of XPU torch shows no such call

    def enter(self) -> None:
        import torch

        torch.accelerator.set_device_index(self.device.index)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    def page_lock(self, address: int, size: int) -> None:
        if not self.locks_pages:
            raise OSError(f"{self.device.type} has no call that locks pages which it did not make")
        cudart = _cudart()
        with self._chosen():
            # cudaHostRegisterPortable: locked for the contexts of all devices, not only this one.
            code = cudart.cudaHostRegister(address, size, 1)
            if int(code):
                self._forget_error()
        if int(code):
            reason = cudart.cudaGetErrorString(code)
            raise OSError(f"the driver does not lock {size:,} bytes: {reason}")

    def page_unlock(self, address: int) -> None:
        try:
            with self._chosen():
                if int(_cudart().cudaHostUnregister(address)):
                    self._forget_error()
        except Exception:  # the driver has been shut down, and all its locks with it
            pass

    def side_stream(self) -> Any:
        module = self._module
        if not hasattr(module, "Stream"):
            return None
        if self.device not in _side_streams:
            _side_streams.setdefault(self.device, module.Stream(self.device))
        return _side_streams[self.device]

    def current_stream(self) -> Any:
        module = self._module
        # The device's own kind, not torch.Stream: objects with a `record_stream` may ask for it.
        return module.current_stream(self.device) if hasattr(module, "current_stream") else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any]
        context = nullcontext() if stream is None else self._module.stream(stream)
        return context

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        # Memory that is not page-locked may be gone before a device without pinning has read it.
        return tensor.to(self.device, non_blocking=self.pins)

    def mark(self, stream: Any) -> Mark:
        if stream is None:
            return _PASSED
        capturing = getattr(stream, "is_capturing", None)
        if capturing is not None and capturing():
            raise RuntimeError(
                f"{stream} is captured into a graph: no event of it can be asked for"
            )
        return _TorchMark(stream.record_event())

    def hold_up(self, stream: Any, mark: Mark) -> None:
        if isinstance(mark, _TorchMark):
            stream.wait_event(mark.event)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        if stream is not None:
            for part in _dense_parts(tensor):
                part.record_stream(stream)

    def _forget_error(self) -> None:
        """Take back the error that a call of the runtime's has left on this thread.

        Else torch would raise it from this thread's next kernel, which has nothing to do with it. torch
        shows no cudaGetLastError, but asks it behind each launch.
        """
        import torch

        try:
            torch.ones((), device=self.device)
        except RuntimeError:
            pass

    def _chosen(self) -> AbstractContextManager[Any]:
        """This device, for a call from any thread: on another one it would open a context there."""
        context: AbstractContextManager[Any] = self._module.device(self.device)
        return context

    @property
    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.device)


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that it consists of: `record_stream` is there for these alone."""
    import torch

    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is torch.strided and tensor.is_nested:
        return [tensor.values()]
    return [tensor]


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


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

    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
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
