"""Interface of the device that batches are on their way to: all that is asked of one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

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
        """Name of the device as ``tensor.to`` takes it: ``"cuda:1"``."""

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
        """Have the driver lock the pages of `size` bytes.

        Raises `OSError` if it refuses, with the number `ENOMEM` if no more can be locked.
        """

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
