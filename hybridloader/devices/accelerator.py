"""The device that batches are on their way to, as far as a loader has to do with it.

One protocol, so that all that is ours (threads, queues, slots that wait for their event) can be tested
where there is no device: `hybridloader.testing.FakeAccelerator` is one whose streams the test moves on.
Nothing here knows of batches, slots or threads, and torch is not imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from hybridloader._support.devices_in_use import initialised
from hybridloader.devices.torch_accelerator import TorchAccelerator

if TYPE_CHECKING:
    import torch


class StreamMark(Protocol):
    """A point in a stream, such as an event of torch's."""

    def query(self) -> bool:
        """True if the device has come to it. Never waits."""


class Accelerator(Protocol):
    """One device. Its methods may be called from any thread."""

    @property
    def name(self) -> str:
        """What ``tensor.to`` takes: ``"cuda:1"``."""

    @property
    def pins(self) -> bool:
        """True if it knows page-locked memory."""

    @property
    def locks_pages(self) -> bool:
        """True if `page_lock` can be had at all."""

    @property
    def queues_copies(self) -> bool:
        """True if `move` may return before the copy is made.

        For that, a stream can be marked, another stream can wait for the mark, and the allocator
        can be told of the other stream. If False, `side_stream`, `mark`, `hold_up` and `keep_for`
        are not called.
        """

    @property
    def one_stream(self) -> bool:
        """True if all its work is done in one order, whichever thread has queued it.

        Where this and `queues_copies` are false, a batch is safe only on the stream that copied it.
        """

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
        """A stream that runs beside those of the user; None if copies are not queued."""

    def current_stream(self) -> Any:
        """The stream of this thread."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether `tensor` is on this device: parts of a moved batch may stay on the host."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue what this thread does within on `stream`."""

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` to the device on this thread's stream; return itself if it is there.

        The host waits for the copy, unless it `queues_copies` and the memory is page-locked.
        """

    def mark(self, stream: Any) -> StreamMark:
        """A mark behind all that has been queued on `stream` so far."""

    def hold_up(self, stream: Any, mark: StreamMark) -> None:
        """`stream` waits for `mark`; the host does not."""

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses `tensor` too, so that its memory is not reused early.

        Called only for a tensor that the device `holds`: torch refuses others.
        """


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

    if initialised(torch.get_device_module(kind)) is False:
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
