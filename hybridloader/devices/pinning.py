"""How batches get into page-locked memory and to a device: on a thread of ours, or on the caller's.

Copies to a device are queued on one stream beside the others. Whoever takes a batch has its own
current stream wait for them; the host never waits. Where a device can't do that, copies are made
one after another: by the thread, if the device has one stream only, else by whoever takes the
batch. Nothing here starts a thread, or knows where batches come from.
`hybridloader.devices.batch_parts` tells what is pinned.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from hybridloader._support.arguments import whole
from hybridloader._support.attributes import has
from hybridloader._support.caller import warn
from hybridloader._support.native_threads import one_thread_on_this_thread
from hybridloader.devices.accelerator import current, find
from hybridloader.devices.batch_parts import (
    bytes_of,
    can_be_pinned,
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

AHEAD = 2
"""Batches that wait if nothing else is said: one to take, one that is copied meanwhile."""

BUFFER_BYTES = 1 << 30
"""Bytes that wait if nothing else is said: several batches of vision or language, and little beside what
a model takes."""


@dataclass(frozen=True)
class Transfer:
    """Where batches are to be when they come, and how many may be there before they are asked for.

    ``DataLoader(device="cuda")`` says ``Transfer("cuda")``. See docs/devices.md.

    Parameters
    ----------
    device
        A str such as ``"cuda"`` or ``"cuda:1"``, a `torch.device` or an `Accelerator`. Without an index,
        the device that is current where the iterator is made. ``"cpu"`` changes nothing.
    prefetch
        Batches that may wait on the device, at least 1. One more is being copied meanwhile.
    buffer_bytes
        Bytes that these may have together. A batch that is larger than that waits alone.

    Raises
    ------
    TypeError, ValueError
        A number is out of range. What devices there are is looked at later.
    """

    device: Any
    prefetch: int = AHEAD
    buffer_bytes: int = BUFFER_BYTES

    def __post_init__(self) -> None:
        for name in ("prefetch", "buffer_bytes"):
            whole(name, getattr(self, name), 1)

    @classmethod
    def of(cls, device: Any) -> Transfer:
        """What `DataLoader(device=...)` was given, as a `Transfer`."""
        return device if isinstance(device, cls) else cls(device)


def check(device: Any) -> None:
    """Refuse a device that can't be had, before anything is started: None, or as for `Transfer`.

    Raises
    ------
    TypeError, ValueError
        The message says what there is.
    """
    if device is not None:
        find(Transfer.of(device).device)


def pinner_for(device: Any, *, pin_memory: bool) -> Pinner | None:
    """What handles the batches of one iterator; None if nothing is to be done.

    Parameters
    ----------
    device
        None, or as for `Transfer`, or one of these.
    pin_memory
        Whether batches that go nowhere are pinned.

    Notes
    -----
    The device that is current on this thread counts. Makes no context on it, so that workers may be
    forked after this.
    """
    transfer = None if device is None else Transfer.of(device)
    accelerator = None if transfer is None else find(transfer.device)
    if transfer is not None and accelerator is not None:
        return Mover(accelerator, transfer.prefetch, transfer.buffer_bytes)
    accelerator = current() if pin_memory else None
    if accelerator is None or not accelerator.pins:
        return None
    return Pinner(accelerator)


class Sent:
    """A batch on its way from the thread that pins to whoever takes it.

    Attributes
    ----------
    data
        The batch, on the device unless it says otherwise.
    size
        Bytes of its tensors, as far as they can be found.
    mark
        Behind the copies; None if there are none.
    used
        Tensors on the device, and objects with a `record_stream()`, that must be told the stream of
        whoever takes the batch.
    late
        Whether something in it has yet to be moved, by whoever takes it.
    """

    __slots__ = ("data", "late", "mark", "size", "used")

    def __init__(self) -> None:
        self.data: Any = None
        self.size = 0
        self.mark: StreamMark | None = None
        self.used: list[Any] = []
        self.late = False


class Pinner:
    """Puts batches into page-locked memory.

    One thread calls `prepare` and `send`, another one `take`; `here` does both, on any.

    Parameters
    ----------
    accelerator
        For which memory is locked.
    prefetch, buffer_bytes
        What may wait behind `send`.

    Attributes
    ----------
    locks
        For slots of the workers: told which streams read them. None if the device locks no pages.
    refusal
        Why the last tensor that was to be pinned is not; None as long as all were.
    """

    stage = "pin_memory"
    """What errors call it."""

    def __init__(
        self, accelerator: Accelerator, prefetch: int = AHEAD, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self.accelerator = accelerator
        self.prefetch, self.buffer_bytes = prefetch, buffer_bytes
        locks = accelerator.pins and accelerator.locks_pages
        self.locks = PageLocks(accelerator) if locks else None
        # All the mutable state:
        self.refusal: str | None = None
        self._warned = False

    def prepare(self) -> None:
        """For a thread of ours, first of all: it uses this device, and no more than one core."""
        self.accelerator.enter()
        one_thread_on_this_thread()

    def send(self, batch: list[Any]) -> Sent:
        """Pin what is in `batch`, which is emptied: so no reference to the memory before is left."""
        sent = Sent()
        sent.data = self._pinned(batch.pop(), sent)
        return sent

    def take(self, sent: Sent) -> Any:
        """The batch, for this thread and its current stream."""
        self._read_by_this_stream()
        self.warn()
        return sent.data

    def here(self, batch: Any) -> Any:
        """The batch, pinned by this thread."""
        self._read_by_this_stream()
        data = self._pinned(batch, Sent())
        self.warn()
        return data

    def warn(self) -> None:
        """Tell, once, that memory could not be pinned. On the thread of whoever asks for batches."""
        if self.locks is not None:
            self.locks.warn()
        if self.refusal is None or self._warned:
            return
        self._warned = True
        warn(
            f"a tensor could not be put into page-locked memory, so its copy waits: {self.refusal}. "
            "Raise the system's limit (ulimit -l), or keep fewer batches. Batches come all the same",
        )

    def _read_by_this_stream(self) -> None:
        """Slots that die from now on wait for this thread's stream, wherever they die."""
        if self.locks is not None:
            self.locks.wait_for(self.accelerator.current_stream())

    def _pinned(self, batch: Any, sent: Sent) -> Any:
        return mapped(batch, pins_itself, functools.partial(self._pin, sent))

    def _pin(self, sent: Sent, part: Any) -> Any:
        """A tensor, or an object that can pin itself, pinned if the device knows that at all."""
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
            self.refusal = str(error).partition("\n")[0]
            return part


class Mover(Pinner):
    """Copies batches to a device, from page-locked memory.

    All copies are queued on one stream. Whoever takes a batch has its current stream wait for them, and
    that stream is named to the allocator, so that the memory is not used again before it is done.

    If the device can't do that, nothing is handed from one stream to another.
    """

    stage = "to"

    def __init__(self, accelerator: Accelerator, prefetch: int, buffer_bytes: int) -> None:
        super().__init__(accelerator, prefetch, buffer_bytes)
        self._stream: Any = None

    def prepare(self) -> None:
        super().prepare()
        self._stream = self.accelerator.side_stream()
        if self.locks is not None and self._stream is not None:
            self.locks.wait_for(self._stream)

    def send(self, batch: list[Any]) -> Sent:
        accelerator, sent = self.accelerator, Sent()
        if self._stream is not None:
            with accelerator.on(self._stream):
                # The last reference to what is copied goes in here: slots look at the current stream.
                sent.data = self._moved(batch.pop(), sent, handed=True)
                sent.mark = accelerator.mark(self._stream)
        elif accelerator.one_stream:
            sent.data = self._moved(batch.pop(), sent, handed=False)
        else:
            sent.data = mapped(batch.pop(), moves_itself, functools.partial(self._pin_if, sent))
            sent.late = True
        return sent

    def take(self, sent: Sent) -> Any:
        self.warn()
        accelerator, mark = self.accelerator, sent.mark
        if mark is None:
            return self._moved(sent.data, Sent(), handed=False) if sent.late else sent.data
        stream = accelerator.current_stream()
        accelerator.hold_up(stream, mark)
        for part in sent.used:
            if is_tensor(part):
                accelerator.keep_for(part, stream)
            else:
                part.record_stream(stream)
        if not sent.late:
            return sent.data
        return mapped(sent.data, _is_late, lambda late: self._ask(late.part))

    def here(self, batch: Any) -> Any:
        self._read_by_this_stream()
        data = self._moved(batch, Sent(), handed=False)
        self.warn()
        return data

    @property
    def stream(self) -> Any:
        """The stream that copies are queued on; None before `prepare`, and if they are not queued."""
        return self._stream

    def _moved(self, batch: Any, sent: Sent, *, handed: bool) -> Any:
        """`batch` on the device, which is then `handed` from this stream to another, or not."""
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
            # It is what its pin_memory() gave, and perhaps something to be looked into.
            return mapped(part, is_tensor_or_movable, functools.partial(self._move, sent, handed))
        if handed and not has(part, "record_stream") and tensors_in(part) is None:
            # Nobody could tell the allocator what it uses, so it is moved by whoever takes it.
            sent.late = True
            return _Late(part)
        part = self._ask(part)
        tensors = tensors_in(part) or ()
        if has(part, "record_stream"):
            sent.used.append(part)
        else:
            sent.used.extend(tensor for tensor in tensors if accelerator.holds(tensor))
        sent.size += sum(bytes_of(tensor) for tensor in tensors)
        return part

    def _pin_if(self, sent: Sent, part: Any) -> Any:
        """Pin what is moved later, if it can be pinned."""
        return self._pin(sent, part) if pins_itself(part) else part

    def _ask(self, part: Any) -> Any:
        """Have an object move itself."""
        name = self.accelerator.name
        if self.accelerator.queues_copies and takes_non_blocking(type(part)):
            return part.to(name, non_blocking=True)
        return part.to(name)


class _Late:
    """Something that is moved by whoever takes it."""

    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part


def _is_late(part: Any) -> bool:
    return type(part) is _Late
