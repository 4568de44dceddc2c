"""Interface of the device that batches are copied to, and page locks of slots for that device."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from hybridloader._support import system
from hybridloader._support.text import warn

if TYPE_CHECKING:
    import torch

    from hybridloader.memory.segments import Mapping


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


# -- slots whose pages are locked for a device, and reused only after the device has read them
#
# A worker fills such a slot, and the device reads the batch from it: the host makes no further copy. A
# consumer that copies to a device passes its `PageLocks` to a crew (`Crew.page_lock`). This module never
# waits for the device, and does not depend on slots or batches.
#
# Each iterator that copies to a device makes a `PageLocks` before any worker starts, if its accelerator
# `locks_pages`. It passes each stream on which it copies to `PageLocks.wait_for`. A stage that collates
# in the consumer's thread calls `PrivateSlots.page_lock`.
#
# The last view of a batch's memory may die on any thread. Then a mark is queued on the current stream of
# that thread and on each stream passed to `wait_for`. When all these marks have passed, the memory is
# reused or freed; until then it counts as in use.
#
# No call reports which streams have read memory that torch has not allocated. So this is safe only where
# the library makes the copies: batches that the user copies are in torch's pinned memory. The parts of a
# batch that stay on the host are an exception (docs/devices.md, "Your part"); docs/decisions.md has the
# reasons.

_LOOKS = 64
"""Pieces of memory that one `collect` checks: each check is a call to the driver, and `collect` is
called for each message to a worker. The next `collect` checks the following ones."""

_UNKNOWN = object()
"""Stream of a device that can't report its current stream any more: no mark ever passes on it."""


class _Waiting:
    """Memory that the device may still read, and the function to call when it no longer does.

    `points` are the streams that it waits for, each with its mark. The mark is None as long as that
    stream accepts no mark or query, for instance while a graph captures the stream.
    """

    __slots__ = ("locks", "points", "then")

    def __init__(
        self, locks: PageLocks, streams: Iterable[Any], then: Callable[[], object]
    ) -> None:
        self.locks, self.then = locks, then
        self.points: list[tuple[Any, StreamMark | None]] = [(stream, None) for stream in streams]

    def over(self) -> bool:
        """Return True if all marks have passed. Never waits."""
        left = []
        for stream, mark in self.points:
            try:
                if mark is None:
                    mark = self.locks.accelerator.mark(stream)
                elif mark.query():
                    continue
            except Exception:
                mark = None
            left.append((stream, mark))
        self.points = left
        return not left


# One for the whole process, because a crew may be closed before the device is done.
_waiting: deque[_Waiting] = deque()  # filled from any thread
_inherited: list[_Waiting] = []  # entries of the process that was forked; never looked at


class PageLocks:
    """Page locks of slots for one device, and the memory that the device still reads.

    All methods may be called from any thread; `after_device` and its functions also from finalizers.
    In a forked process it does nothing: the device belongs to the parent.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator  # the device that reads the batches
        self._owner = os.getpid()
        # All the mutable state; only by operations that are atomic:
        self.refusal: str | None = None  # reason why the last pages could not be locked
        self._full = False  # the reason is a limit of locked memory
        self._locked: dict[int, int] = {}  # bytes, by address
        self._streams: dict[Any, None] = {}  # in the order of `wait_for`
        self._warned = False

    def __repr__(self) -> str:
        return f"PageLocks({self.accelerator.name!r}, {self.size:,} bytes)"

    @property
    def size(self) -> int:
        """Bytes that are page-locked now, those that the device has yet to read included."""
        return sum(list(self._locked.values()))

    @property
    def here(self) -> bool:  # False in a fork of the process that it was made in
        return os.getpid() == self._owner

    def enter(self) -> None:
        """Make the device the current one of this thread, permanently; for workers' threads only.

        Otherwise their calls to the driver would open a context on device 0.
        """
        try:
            self.accelerator.enter()
        except Exception as error:
            self.refusal = f"{self.accelerator.name} can't be used from a worker's thread: {error}"
            self._full = False

    def lock(self, mapping: Mapping) -> bool:
        """Lock the pages of `mapping` until its end; return False and set `refusal` if that fails."""
        if not self.here:
            return False
        try:
            self.accelerator.page_lock(mapping.address, mapping.size)
        except (OSError, RuntimeError) as error:
            self.refusal = str(getattr(error, "strerror", None) or error)
            self._full = getattr(error, "errno", None) == errno.ENOMEM
            return False
        self._locked[mapping.address] = mapping.size
        mapping.at_end(self.unlock, mapping.address)
        return True

    def unlock(self, address: int) -> None:
        """Unlock the pages at `address`, which must not be in use."""
        if not self.here or self._locked.pop(address, None) is None:
            return
        try:
            self.accelerator.page_unlock(address)
        except Exception:  # a finalizer has no caller that could handle it
            pass

    def wait_for(self, stream: Any) -> None:
        """Make memory that is released from now on wait for `stream`, too."""
        self._streams[stream] = None

    def after_device(self, then: Callable[[], object]) -> None:
        """Make a later `collect` call `then`, after the device has done the work that is queued now.

        For finalizers: it never raises and never waits. `then` must keep the memory alive.
        """
        if not self.here:
            return
        try:
            streams = dict.fromkeys((self.accelerator.current_stream(), *list(self._streams)))
        except Exception:
            streams = {_UNKNOWN: None}
        waiting = _Waiting(self, streams, then)
        waiting.over()
        _waiting.append(waiting)

    def collect(self) -> None:
        """Check some of this process's released memory, and free pieces that the device has read."""
        for _ in range(min(len(_waiting), _LOOKS)):
            try:
                waiting = _waiting.popleft()
            except IndexError:  # another thread was faster
                return
            if not waiting.locks.here:
                _inherited.append(waiting)
                continue
            try:
                over = waiting.over()
            except BaseException:  # Ctrl-C: the device may still be reading
                _waiting.append(waiting)
                raise
            if over:
                waiting.then()
            else:
                _waiting.append(waiting)

    def warn(self) -> None:
        """Warn, once, that pages could not be locked. For the consumer's thread."""
        if self.refusal is None or self._warned:
            return
        self._warned = True
        where = advice = ""
        if self._full:
            limit = system.soft_limit("RLIMIT_MEMLOCK")
            allowed = "" if limit is None else f"; ulimit -l allows {limit:,} bytes"
            where = f" ({self.size:,} bytes are locked already{allowed})"
            advice = (
                ". Raise the limit, keep fewer batches, or allow less memory for slots: Memory(limit="
                "...) of the backend"
            )
        warn(
            f"a slot of memory for batches is not page-locked: {self.refusal}{where}. Batches in it are "
            f"copied once more where they are pinned{advice}",
            "not-page-locked",
        )
