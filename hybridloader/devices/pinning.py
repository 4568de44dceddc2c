"""Devices, pinning of batches, and copying to a device, on a thread of the loader or on the caller's.

Copies to a device are queued on one side stream. The current stream of the consumer's thread waits for
them, and the consumer does not. If the device does not support this, the consumer's thread copies. This
module starts no thread, and does not depend on the source of the batches.

Pinning asks a device through `Accelerator` alone, so that threads, queues and streams can be tested
without one, by an object with its methods. The code uses `torch.accelerator` and `torch.Stream`, which
every device has. The module of the device (`torch.cuda`) may have its own class of streams. One ability,
which only some devices have, is tried once: handing batches from one stream to another. torch is not
imported before a device is looked for.
"""

from __future__ import annotations

import collections.abc as abc
import copy
import dataclasses
import functools
import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hybridloader._support.text import whole
from hybridloader._support.torch_env import initialized, one_thread_on_this_thread
from hybridloader._support.user_objects import attribute, has
from hybridloader.memory.packing import dense_parts

if TYPE_CHECKING:
    import torch


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
    """Copies batches into torch's page-locked memory.

    One thread calls `prepare` and `send`, another one calls `take`; `here` does both, on any thread. At
    most `batches_ahead` batches and `buffer_bytes` bytes wait between `send` and `take`.
    """

    stage = "pin_memory"  # name of the stage in errors

    def __init__(
        self, accelerator: Accelerator, batches_ahead: int = AHEAD, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self.accelerator = accelerator
        self.batches_ahead, self.buffer_bytes = batches_ahead, buffer_bytes

    def prepare(self) -> None:
        """Set the device of this thread, which the loader owns, and limit it to one core."""
        self.accelerator.enter()
        one_thread_on_this_thread()

    def send(self, batch: Any) -> Sent:
        """Pin or copy `batch`. No copy that is still queued reads its memory."""
        sent = Sent()
        sent.data = self._handled(batch, sent)
        return sent

    def take(self, sent: Sent) -> Any:
        """Return the batch, for this thread and its current stream."""
        return sent.data

    def here(self, batch: Any) -> Any:
        """Pin or copy `batch` on this thread, and return the result."""
        return self._handled(batch, Sent())

    def _handled(self, batch: Any, sent: Sent) -> Any:
        return mapped(batch, pins_itself, functools.partial(self._pin, sent))

    def _pin(self, sent: Sent, part: Any) -> Any:
        """Return a tensor, or an object that can pin itself, pinned if the device supports that."""
        pins = self.accelerator.pins
        if is_tensor(part):
            sent.size += bytes_of(part)
            return self.accelerator.pin(part) if pins else part
        part = part.pin_memory() if pins else part
        sent.size += sum(bytes_of(tensor) for tensor in tensors_in(part) or ())
        return part


class Mover(Pinner):
    """Copies batches to a device, from page-locked memory.

    All copies are queued on one stream. The current stream of the consumer's thread waits for them. That
    stream is recorded in the allocator, so that the memory is not reused before the stream has read it.
    If the device does not support this, the thread that takes a batch copies it, on its stream.
    """

    stage = "to"

    def __init__(self, accelerator: Accelerator, batches_ahead: int, buffer_bytes: int) -> None:
        super().__init__(accelerator, batches_ahead, buffer_bytes)
        self.stream: Any = None  # of the copies; None before `prepare`, and if they are not queued
        self._sent: deque[list[StreamMark]] = deque()  # `taken` of the last batches

    def prepare(self) -> None:
        super().prepare()
        self.stream = self.accelerator.side_stream()

    def send(self, batch: Any) -> Sent:
        accelerator, sent = self.accelerator, Sent()
        if self.stream is not None:
            self._let_the_device_catch_up(sent)
            with accelerator.on(self.stream):
                sent.data = self._handled(batch, sent, handed=True)
                sent.mark = accelerator.mark(self.stream)
        else:
            sent.data = mapped(
                batch,
                moves_itself,
                lambda part: self._pin(sent, part) if pins_itself(part) else part,
            )
            sent.late = True
        return sent

    def take(self, sent: Sent) -> Any:
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
        return mapped(
            sent.data, lambda part: type(part) is _Late, lambda late: self._to_device(late.part)
        )

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
        # As in `move`: the memory of a part that did not pin itself may be reused at once.
        pinned = self.accelerator.pins and pins_itself(part)
        if pinned and self.accelerator.queues_copies and takes_non_blocking(type(part)):
            return part.to(name, non_blocking=True)
        return part.to(name)


class _Late(NamedTuple):
    """Part of a batch that the consumer's thread moves."""

    part: Any


# -- devices of torch, of any kind


class StreamMark(Protocol):
    """Point in a stream, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return True if the device has reached it. Never waits."""


_LOOK = 0.001
"""Seconds between two queries of an event: the copies of several batches are queued meanwhile."""


_side_streams: dict[torch.device, Any] = {}
"""Stream of each device of this process beside the user's, if usable, made once. torch's allocator keeps
the memory that a stream has used for that stream, so a new one each epoch would take as much again."""


class Accelerator:
    """Device of torch: CUDA, XPU, MPS or any other that `torch.accelerator` knows.

    Its methods may be called from any thread. Asking `queues_copies` may make a context on the device;
    the other properties do not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device  # with its index

    def __repr__(self) -> str:
        return f"Accelerator({self.name!r})"

    @property
    def name(self) -> str:
        """Name of the device as ``tensor.to`` takes it: ``"cuda:1"``."""
        return str(self.device)

    @property
    def pins(self) -> bool:
        """True if the device supports page-locked memory."""
        # torch's loader excludes MPS too: https://github.com/pytorch/pytorch/issues/86060
        return self.device.type != "mps"

    @property
    def queues_copies(self) -> bool:
        """True if `move` may return before the copy is made.

        Such a device supports marks in streams, streams that wait for marks, and an allocator that
        accepts further streams of a tensor. If False, `side_stream`, `mark`, `hold_up`, `wait` and
        `keep_for` are not called, and a batch is safe only on the stream that copied it.
        """
        return self.side_stream() is not None

    def enter(self) -> None:
        """Make it the current device of this thread, permanently."""
        import torch

        torch.accelerator.set_device_index(self.device.index)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` in page-locked memory: itself if it is page-locked or on a device.

        Raises `RuntimeError`, also if the system locks no more pages.
        """
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    def side_stream(self) -> Any:
        """Return a stream that runs in parallel to the user's; None if copies are not queued."""
        if not self.pins:
            return None
        if self.device not in _side_streams:
            _side_streams.setdefault(self.device, self._asked())
        return _side_streams[self.device]

    def current_stream(self) -> Any:
        """Return the current stream of this thread."""
        # The device's own class of streams, if any: objects with a `record_stream` may need it.
        import torch

        return getattr(self._module, "current_stream", torch.accelerator.current_stream)(
            self.device
        )

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make `stream` the current stream of this thread within the block."""
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
        """Return True if `tensor` is on this device: parts of a moved batch may stay on the host."""
        return tensor.device == self.device

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` to the device on this thread's stream; return itself if it is there.

        The host waits for the copy, unless it `queues_copies` and the memory is page-locked.
        """
        # Only page-locked memory is kept until the copy has read it, on every kind of device.
        return tensor.to(self.device, non_blocking=self.queues_copies and tensor.is_pinned())

    def mark(self, stream: Any) -> StreamMark:
        """Return a mark after all work that is queued on `stream` now."""
        if self._captures(stream):
            raise RuntimeError(
                f"{stream} is being captured into a graph, which can't wait for a copy that is outside "
                "it; take batches outside the capture"
            )
        mark: StreamMark = stream.record_event()
        return mark

    def hold_up(self, stream: Any, mark: StreamMark) -> None:
        """Make `stream` wait for `mark`; the host does not wait."""
        stream.wait_event(mark)

    def wait(self, mark: StreamMark) -> None:
        """Make the host wait until the device has reached `mark`."""
        while not mark.query():  # `synchronize` of most events keeps a core busy
            time.sleep(_LOOK)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Record in the allocator that `stream` uses `tensor` too, so that it frees the memory later.

        Called only for a tensor that the device `holds`: torch refuses others.
        """
        import torch

        # Only dense tensors have `record_stream`.
        nested = tensor.layout is torch.strided and tensor.is_nested
        for part in dense_parts(tensor) or [tensor.values() if nested else tensor]:
            part.record_stream(stream)

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

    @property
    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.device)


def current() -> Accelerator | None:
    """Return the device that is current on this thread; None if there is no accelerator."""
    import torch

    from hybridloader._support.installed_torch import current_accelerator

    kind = current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return None
    return Accelerator(torch.device(kind.type, _current_index(kind)))


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
    return Accelerator(torch.device(kind.type, index))


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


# -- parts of a batch that are pinned or moved
#
# Containers are rebuilt by the rules of torch's `pin_memory`, and dataclasses too.


def mapped(data: Any, is_part: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Return `data` with its parts changed; containers are rebuilt as torch's `pin_memory` does it.

    A dataclass of which a field has changed is copied without a call of its constructor.
    """
    if is_part(data):
        return change(data)
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, abc.Mapping):
        return like(data, {key: mapped(value, is_part, change) for key, value in data.items()})
    if isinstance(data, tuple):
        parts = [mapped(value, is_part, change) for value in data]
        return type(data)(*parts) if has(data, "_fields") else type(data)(parts)
    if isinstance(data, abc.Sequence):
        parts = [mapped(value, is_part, change) for value in data]
        try:
            if isinstance(data, abc.MutableSequence):
                clone: Any = copy.copy(data)
                for i, value in enumerate(parts):
                    clone[i] = value
                return clone
            return type(data)(parts)  # type: ignore[call-arg]
        except TypeError:  # for example a range
            return parts
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _with_fields(data, is_part, change)
    return data


def like(first: abc.Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `first` with other values, as `default_collate` makes one."""
    if type(first) is dict:
        return values
    try:
        if not isinstance(first, abc.MutableMapping):
            return type(first)(values)  # type: ignore[call-arg]
        clone: Any = copy.copy(first)  # it may have more than its items
        if isinstance(first, Counter):  # `Counter.update` adds
            dict.update(clone, values)
        else:
            clone.update(values)
        return clone
    except TypeError:  # it can't be copied, updated or made of a dict
        return values


def _with_fields(data: Any, is_part: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    clone = None
    for field in dataclasses.fields(data):
        if not has(data, field.name):
            continue
        before = getattr(data, field.name)
        after = mapped(before, is_part, change)
        if after is not before:
            clone = copy.copy(data) if clone is None else clone
            object.__setattr__(clone, field.name, after)  # works for a frozen dataclass too
    return data if clone is None else clone


def tensors_in(data: Any) -> list[torch.Tensor] | None:
    """Return the tensors in a container; None for another object, whose tensors can't be found."""
    parts: Iterable[Any]
    if is_tensor(data):
        return [data]
    if isinstance(data, (str, bytes)):
        return []
    if isinstance(data, abc.Mapping):
        parts = data.values()
    elif isinstance(data, abc.Sequence):
        parts = data
    elif dataclasses.is_dataclass(data):
        parts = [attribute(data, field.name) for field in dataclasses.fields(data)]
    else:
        return None
    return [tensor for part in parts for tensor in tensors_in(part) or ()]


def is_tensor(part: Any) -> bool:
    """Return True if `part` is a tensor of torch's, of any kind."""
    import torch

    return isinstance(part, torch.Tensor)


def pins_itself(part: Any) -> bool:
    """Return True if `part` is pinned as a whole: a tensor, or an object with a `pin_memory()`."""
    return is_tensor(part) or has(part, "pin_memory")


def is_tensor_or_movable(part: Any) -> bool:
    return is_tensor(part) or takes_device(type(part))


def moves_itself(part: Any) -> bool:
    """Return True if `part` is pinned or moved as a whole."""
    return pins_itself(part) or takes_device(type(part))


@functools.lru_cache(maxsize=256)
def _parameters_of_to(kind: type) -> tuple[inspect.Parameter, ...]:
    to = getattr(kind, "to", None)
    if not callable(to):
        return ()
    try:
        return tuple(inspect.signature(to).parameters.values())[1:]
    except (TypeError, ValueError):  # some classes in C have no signature
        return ()


def takes_device(kind: type) -> bool:
    """Return True if the `to()` of `kind` takes a device, and not a unit or a time zone."""
    first = _parameters_of_to(kind)[:1]
    return any(p.name == "device" or p.kind is inspect.Parameter.VAR_POSITIONAL for p in first)


def takes_non_blocking(kind: type) -> bool:
    return any(
        p.name == "non_blocking" or p.kind is inspect.Parameter.VAR_KEYWORD
        for p in _parameters_of_to(kind)
    )


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense tensor; 0 for others."""
    import torch

    return tensor.nbytes if tensor.layout is torch.strided else 0
