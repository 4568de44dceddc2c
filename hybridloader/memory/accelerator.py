"""Interface of the device that batches are copied to."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class StreamMark(Protocol):
    """Point in a stream, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return True if the device has reached it. Never waits."""


class Accelerator(Protocol):
    """One device. Its methods may be called from any thread."""

    @property
    def name(self) -> str:
        """Name of the device as ``tensor.to`` takes it: ``"cuda:1"``."""

    @property
    def pins(self) -> bool:
        """True if the device supports page-locked memory."""

    @property
    def locks_pages(self) -> bool:
        """True if the device supports `page_lock`."""

    @property
    def queues_copies(self) -> bool:
        """True if `move` may return before the copy is made.

        Such a device supports marks in streams, streams that wait for marks, and an allocator that
        accepts further streams of a tensor. If False, `side_stream`, `mark`, `hold_up`, `wait` and
        `keep_for` are not called, and a batch is safe only on the stream that copied it.
        """

    def enter(self) -> None:
        """Make it the current device of this thread, permanently."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` in page-locked memory: itself if it is page-locked or on a device.

        Raises `RuntimeError`, also if the system locks no more pages.
        """

    def page_lock(self, address: int, size: int) -> None:
        """Make the driver lock the pages of `size` bytes.

        Raises `OSError` if the driver refuses, with errno `ENOMEM` if it can't lock more pages.
        """

    def page_unlock(self, address: int) -> None:
        """Unlock these pages before they are unmapped. Never raises, even while Python shuts down."""

    def side_stream(self) -> Any:
        """Return a stream that runs in parallel to the user's; None if copies are not queued."""

    def current_stream(self) -> Any:
        """Return the current stream of this thread."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is on this device: parts of a moved batch may stay on the host."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` the current stream of this thread within the block."""

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` to the device on this thread's stream; return itself if it is there.

        The host waits for the copy, unless it `queues_copies` and the memory is page-locked.
        """

    def mark(self, stream: Any) -> StreamMark:
        """Return a mark after all work that is queued on `stream` now."""

    def hold_up(self, stream: Any, mark: StreamMark) -> None:
        """Make `stream` wait for `mark`; the host does not wait."""

    def wait(self, mark: StreamMark) -> None:
        """Make the host wait until the device has reached `mark`."""

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Record in the allocator that `stream` uses `tensor` too, so that it frees the memory later.

        Called only for a tensor that the device `holds`: torch refuses others.
        """
