"""Pinning of batches and copying to a device, on a thread of the loader or on the caller's.

Copies to a device are queued on one side stream. The current stream of the consumer's thread waits for
them, and the consumer does not. If the device does not support this, the consumer's thread copies. This
module starts no thread, and does not depend on the source of the batches.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridloader._support.text import warn, whole
from hybridloader._support.torch_env import one_thread_on_this_thread
from hybridloader._support.user_objects import has
from hybridloader.devices.accelerator import current, find
from hybridloader.devices.batch_parts import (
    bytes_of,
    can_be_pinned,
    help_to_pin,
    is_tensor,
    is_tensor_or_movable,
    mapped,
    moves_itself,
    pins_itself,
    takes_device,
    takes_non_blocking,
    tensors_in,
)
from hybridloader.memory.accelerator import Accelerator, StreamMark
from hybridloader.memory.page_locks import PageLocks

AHEAD = 2  # default number of waiting batches: one to take, one that is being copied

BUFFER_BYTES = 1 << 30
"""Default maximum of bytes that wait: several batches of vision or language, and little compared to the
memory of a model."""


@dataclass(frozen=True)
class Transfer:
    """Device that batches are copied to, and the number of batches that may wait there.

    ``DataLoader(device="cuda")`` is short for ``DataLoader(device=Transfer("cuda"))``. See
    docs/devices.md.

    Parameters
    ----------
    device
        A str such as ``"cuda"`` or ``"cuda:1"``, a `torch.device` or an `Accelerator`. Without an index
        it is the current device of the thread that makes the iterator. ``"cpu"`` changes nothing.
    batches_ahead
        Number of batches that may wait on the device, at least 1. One more is copied at the same time.
    buffer_bytes
        Maximum of bytes of these batches together. A larger batch waits alone.

    Raises
    ------
    TypeError, ValueError
        A number is out of range. The device itself is checked later.
    """

    device: Any
    batches_ahead: int = AHEAD
    buffer_bytes: int = BUFFER_BYTES

    def __post_init__(self) -> None:
        for name in ("batches_ahead", "buffer_bytes"):
            whole(name, getattr(self, name), 1)

    @classmethod
    def of(cls, device: Any) -> Transfer:
        """Return the value of `DataLoader(device=...)` as a `Transfer`."""
        return device if isinstance(device, cls) else cls(device)


def check(device: Any) -> None:
    """Raise `TypeError` or `ValueError`, with the available devices, if `device` is not one of them."""
    if device is not None:
        find(Transfer.of(device).device)


def pinner_for(device: Any, *, pin_memory: bool) -> Pinner | None:
    """Return the object that pins or copies the batches of one iterator; None if none is needed.

    `device` is None, a `Transfer`, or the device of one. Without an index it is the current device of
    this thread. Makes no context on the device, so that workers may be forked after this.
    """
    transfer = None if device is None else Transfer.of(device)
    accelerator = None if transfer is None else find(transfer.device)
    if transfer is not None and accelerator is not None:
        return Mover(accelerator, transfer.batches_ahead, transfer.buffer_bytes)
    accelerator = current() if pin_memory else None
    if accelerator is None or not accelerator.pins:
        return None
    return Pinner(accelerator)


class Sent:
    """Batch that the thread that pins passes to the consumer's thread.

    `used` holds its tensors on the device and its objects with a `record_stream()`: the stream of the
    consumer's thread must be recorded for them.
    """

    data: Any = None  # the batch
    size = 0  # bytes of its tensors, as far as they can be found
    mark: StreamMark | None = None  # after the copies; None if there are none
    late = False  # the consumer's thread must still move a part

    def __init__(self) -> None:
        self.used: list[Any] = []
        self.taken: list[StreamMark] = []  # on the stream that took it, before it waited


class Pinner:
    """Copies batches into page-locked memory.

    One thread calls `prepare` and `send`, another one calls `take`; `here` does both, on any thread. At
    most `batches_ahead` batches and `buffer_bytes` bytes wait between `send` and `take`.
    """

    stage = "pin_memory"  # name of the stage in errors
    locks: PageLocks | None = None
    """Page locks of the workers' slots; None: the slots are ordinary memory."""

    def __init__(
        self, accelerator: Accelerator, batches_ahead: int = AHEAD, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self.accelerator = accelerator
        self.batches_ahead, self.buffer_bytes = batches_ahead, buffer_bytes
        # All the mutable state:
        self.refusal: tuple[str, str] | None = (
            None  # reason why a tensor was not pinned, and advice
        )
        self._given: set[str] = set()  # advice that was given

    def prepare(self) -> None:
        """Set the device of this thread, which the loader owns, and limit it to one core."""
        self.accelerator.enter()
        one_thread_on_this_thread()

    def send(self, batch: list[Any]) -> Sent:
        """Pin or copy the one batch in the list, which is emptied so that it keeps no reference."""
        sent = Sent()
        sent.data = self._handled(batch.pop(), sent)
        return sent

    def take(self, sent: Sent) -> Any:
        """Return the batch, for this thread and its current stream."""
        self.warn()
        return sent.data

    def here(self, batch: Any) -> Any:
        """Pin or copy `batch` on this thread, and return the result."""
        data = self._handled(batch, Sent())
        self.warn()
        return data

    def warn(self) -> None:
        """Warn of tensors not pinned, once for each advice. For the consumer's thread."""
        if self.locks is not None:
            self.locks.warn()
        if self.refusal is None:
            return
        (reason, advice), self.refusal = self.refusal, None
        if advice not in self._given:
            self._given.add(advice)
            warn(
                f"a tensor could not be put into page-locked memory, so its copy waits: {reason}. "
                f"{advice}. The loader still returns its batches",
                "not-pinned",
            )

    def _handled(self, batch: Any, sent: Sent) -> Any:
        return mapped(batch, pins_itself, functools.partial(self._pin, sent))

    def _pin(self, sent: Sent, part: Any) -> Any:
        """Return a tensor, or an object that can pin itself, pinned if the device supports that."""
        pins = self.accelerator.pins
        if not is_tensor(part):
            part = part.pin_memory() if pins else part
            sent.size += sum(bytes_of(tensor) for tensor in tensors_in(part) or ())
            return part
        sent.size += bytes_of(part)
        if not pins:
            return part
        try:
            return self.accelerator.pin(part)
        except RuntimeError as error:
            if not can_be_pinned(part):
                raise
            self.refusal = str(error).partition("\n")[0].rstrip("."), help_to_pin(part)
            return part


class Mover(Pinner):
    """Copies batches to a device, from page-locked memory.

    All copies are queued on one stream. The current stream of the consumer's thread waits for them. That
    stream is recorded in the allocator, so that the memory is not reused before the stream has read it.
    If the device does not support this, the thread that takes a batch copies it, on its stream.

    `locks` learns the streams that read the workers' slots.
    """

    stage = "to"

    def __init__(self, accelerator: Accelerator, batches_ahead: int, buffer_bytes: int) -> None:
        super().__init__(accelerator, batches_ahead, buffer_bytes)
        if accelerator.pins and accelerator.locks_pages:
            self.locks = PageLocks(accelerator)
        self.stream: Any = None  # of the copies; None before `prepare`, and if they are not queued
        self._sent: deque[list[StreamMark]] = deque()  # `taken` of the last batches

    def prepare(self) -> None:
        super().prepare()
        self.stream = self.accelerator.side_stream()
        if self.locks is not None and self.stream is not None:
            self.locks.wait_for(self.stream)

    def send(self, batch: list[Any]) -> Sent:
        accelerator, sent = self.accelerator, Sent()
        if self.stream is not None:
            self._let_the_device_catch_up(sent)
            with accelerator.on(self.stream):
                # The last reference to the source dies in this block: slots read the current stream.
                sent.data = self._handled(batch.pop(), sent, handed=True)
                sent.mark = accelerator.mark(self.stream)
        else:
            sent.data = mapped(
                batch.pop(),
                moves_itself,
                lambda part: self._pin(sent, part) if pins_itself(part) else part,
            )
            sent.late = True
        return sent

    def take(self, sent: Sent) -> Any:
        self.warn()
        accelerator, mark = self.accelerator, sent.mark
        if mark is None:
            return self._handled(sent.data, Sent()) if sent.late else sent.data
        stream = accelerator.current_stream()
        sent.taken.append(accelerator.mark(stream))
        accelerator.hold_up(stream, mark)
        for part in sent.used:
            if is_tensor(part):
                accelerator.keep_for(part, stream)
            else:
                part.record_stream(stream)
        if not sent.late:
            return sent.data
        self._read_by_this_stream()
        return mapped(
            sent.data, lambda part: type(part) is _Late, lambda late: self._to_device(late.part)
        )

    def here(self, batch: Any) -> Any:
        self._read_by_this_stream()
        return super().here(batch)

    def _read_by_this_stream(self) -> None:
        """Make slots that are released from now on, on any thread, wait for this thread's stream."""
        if self.locks is not None:
            self.locks.wait_for(self.accelerator.current_stream())

    def _let_the_device_catch_up(self, sent: Sent) -> None:
        """Wait until the consumer's stream has done the work of before an earlier `take`.

        The allocator reuses a batch's memory once the host finds that this stream has passed. So without
        the wait, a loop that only queues work would get new memory for each batch. The `take` of the
        batch `batches_ahead + 2` places earlier is the latest one that has surely returned.
        """
        self._sent.append(sent.taken)
        if len(self._sent) > self.batches_ahead + 2:
            for mark in self._sent.popleft():  # none: that batch was never taken
                self.accelerator.wait(mark)

    def _handled(self, batch: Any, sent: Sent, *, handed: bool = False) -> Any:
        """Return `batch` on the device; `handed` if another stream will use it."""
        return mapped(batch, moves_itself, functools.partial(self._move, sent, handed))

    def _move(self, sent: Sent, handed: bool, part: Any) -> Any:
        accelerator = self.accelerator
        if is_tensor(part):
            moved = accelerator.move(self._pin(sent, part))
            if moved is not part:
                sent.used.append(moved)
            return moved
        if accelerator.pins and pins_itself(part):
            part = part.pin_memory()
        if not takes_device(type(part)):
            # Its pin_memory() may have returned another type, such as a container.
            return mapped(part, is_tensor_or_movable, functools.partial(self._move, sent, handed))
        if handed and not has(part, "record_stream") and tensors_in(part) is None:
            # Its memory can't be recorded in the allocator, so the consumer's thread moves it.
            sent.late = True
            return _Late(part)
        part = self._to_device(part)
        tensors = tensors_in(part) or ()
        if has(part, "record_stream"):
            sent.used.append(part)
        else:
            sent.used.extend(tensor for tensor in tensors if accelerator.holds(tensor))
        sent.size += sum(bytes_of(tensor) for tensor in tensors)
        return part

    def _to_device(self, part: Any) -> Any:
        name = self.accelerator.name
        if self.accelerator.queues_copies and takes_non_blocking(type(part)):
            return part.to(name, non_blocking=True)
        return part.to(name)


class _Late(NamedTuple):
    """Part of a batch that the consumer's thread moves."""

    part: Any
