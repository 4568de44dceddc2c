"""Fake device in this process's memory, controlled by a test, to test without a GPU.

The device does the work queued on its streams when the test calls `run`, or while the host waits for it;
a copy reads its source only then. It reuses memory as a caching allocator does: at once on the stream
that allocated it, and waiting only for other streams that were passed to `keep_for`. So memory that host
or device reuses too early shows as a wrong batch, as on a real device. The device refuses calls that
torch or a driver would refuse; docs/devices.md lists them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from hybridloader.devices import pinning
from hybridloader.devices.pinning import (
    BUFFER_BYTES,
    Accelerator,
    Mover,
    Pinner,
    Sent,
    current,
    find,
)

if TYPE_CHECKING:
    import torch

__all__ = ["BUFFER_BYTES", "Accelerator", "Mover", "Pinner", "Sent", "current", "pinning"]
"""Parts of the inside, which tests of devices import from here alone."""


@dataclass(eq=False)
class FakeMark:
    """Point in a `FakeStream`."""

    reached: bool = False

    def query(self) -> bool:
        return self.reached


@dataclass(eq=False)
class FakeStream:
    """Stream that does its work in order, as far as marks of other streams allow."""

    name: str
    queue: deque[Callable[[], object]] = field(default_factory=deque)  # a False: not possible yet


@dataclass(eq=False)
class _Block:
    """Memory of the device, and the marks that must be reached before its reuse."""

    memory: Any
    stream: FakeStream
    keepers: list[FakeStream] = field(default_factory=list)
    marks: list[FakeMark] = field(default_factory=list)


class FakeAccelerator:
    """Accelerator whose tensors are ordinary ones.

    Parameters
    ----------
    name
        Name of the device.
    pinnable
        Most bytes of living tensors made by `pin`; None for no limit.
    manual
        If True, streams stand still until `run` or `wait` is called; else all work is done at once.

    Attributes
    ----------
    pinned
        Bytes of living memory made by `pin`, by address.
    entered
        Identities of the threads that chose the device.
    kept
        Calls of `keep_for`: the address of the tensor's memory, and the stream.
    refused
        Texts of all refusals.
    """

    pins = True
    queues_copies = True

    def __init__(
        self,
        name: str = "fake:0",
        *,
        pinnable: int | None = None,
        manual: bool = True,
    ) -> None:
        self.name = name
        self.pinnable, self.manual = pinnable, manual
        self._lock = threading.RLock()  # finalizers take it too
        self._running = False  # under the lock
        self.default = FakeStream("default")
        # All the other mutable state:
        self.streams = [self.default]
        self._side: FakeStream | None = None
        self.pinned: dict[int, int] = {}
        self.entered: list[int] = []
        self.kept: list[tuple[int, FakeStream]] = []
        self.refused: list[str] = []
        self._user: int | None = None  # the process that has used it
        self._blocks: dict[int, _Block] = {}  # that are in use, by address
        self._free: list[_Block] = []
        self._here = threading.local()

    def __repr__(self) -> str:
        return f"FakeAccelerator({self.name!r})"

    def enter(self) -> None:
        self._use()
        self.entered.append(threading.get_ident())

    # -- memory of the host ----------------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._use()
        if self.is_pinned(tensor) or self.holds(tensor):
            return tensor
        if any(
            stride == 0 and n > 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise RuntimeError(  # torch keeps the strides, and copies into it
                "unsupported operation: more than one element of the written-to tensor refers to a "
                "single memory location. Please clone() the tensor before performing the operation."
            )
        size = _size_of(tensor)
        with self._lock:
            most = self.pinnable
            if most is not None and sum(self.pinned.values()) + size > most:
                raise RuntimeError(f"the fake device pins at most {most:,} bytes")
            memory = (ctypes.c_char * size)()
            address = ctypes.addressof(memory)
            self.pinned[address] = size
            weakref.finalize(memory, self.pinned.pop, address).atexit = False
        copy = _over(memory, tensor)
        copy.copy_(tensor)
        return copy

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` was made by `pin`."""
        return tensor.untyped_storage().data_ptr() in self.pinned

    # -- streams ---------------------------------------------------------------------------------------

    def side_stream(self) -> FakeStream | None:
        with self._lock:
            if self._side is None and self.queues_copies:
                self._side = self.new_stream()
        return self._side

    def new_stream(self) -> FakeStream:
        """Make a stream for a user of the device."""
        self._use()
        with self._lock:
            self.streams.append(FakeStream(f"side {len(self.streams)}"))
            return self.streams[-1]

    def current_stream(self) -> FakeStream:
        found: FakeStream = getattr(self._here, "stream", self.default)
        return found

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self._check(stream)
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def mark(self, stream: Any) -> FakeMark:
        self._check(stream)
        return self._marked(stream)

    def _marked(self, stream: FakeStream) -> FakeMark:
        mark = FakeMark()
        self._queue(stream, lambda: setattr(mark, "reached", True))
        return mark

    def hold_up(self, stream: Any, mark: Any) -> None:
        self._check(stream)
        if not isinstance(mark, FakeMark):
            raise self._refusal(TypeError(f"{mark!r} is no mark of a stream"))
        self._queue(stream, mark.query)

    def wait(self, mark: Any) -> None:
        """Do the queued work until `mark` is reached."""
        self._use()
        self._run(self.streams, mark)

    def _check(self, stream: Any) -> None:
        self._use()
        if not any(stream is own for own in self.streams):
            raise self._refusal(TypeError(f"{stream!r} is no stream of {self.name}"))

    def _use(self) -> None:
        """Refuse use in a fork of a process that has used the device, as a CUDA context does."""
        if self._user is None:
            self._user = os.getpid()
        elif self._user != os.getpid():
            raise self._refusal(RuntimeError(f"{self.name} was in use before this fork"))

    def _refusal(self, error: Exception) -> Exception:
        self.refused.append(str(error))
        return error

    # -- memory of the device --------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` was made by `move`."""
        import torch

        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        with self._lock:
            return tensor.untyped_storage().data_ptr() in self._blocks

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        self._use()
        if self.holds(tensor):
            return tensor
        stream = self.current_stream()
        view = self._allocate(_size_of(tensor), stream)
        copy = _over(view, tensor)
        target = _over(self._blocks[ctypes.addressof(view)].memory, tensor)
        # torch's allocator keeps its pinned memory until then; the driver stages other memory now.
        source = tensor if self.is_pinned(tensor) else tensor.clone()
        self._queue(stream, lambda: target.copy_(source))  # it does not keep the block in use
        if not self.queues_copies:  # the host waits until the copy is made
            self.run(stream)
            if stream.queue:
                self.run()
        return copy

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        self._check(stream)
        if not self.queues_copies or not self.holds(tensor):
            where = f"{self.name} backend" if self.holds(tensor) else "'CPU' backend"
            raise self._refusal(
                NotImplementedError(
                    f"Could not run 'aten::record_stream' with arguments from the {where}"
                )
            )
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            self.kept.append((address, stream))
            self._blocks[address].keepers.append(stream)

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queue `kernel` on this thread's stream."""
        self._queue(self.current_stream(), lambda: [kernel()])

    # -- for the test -----------------------------------------------------------------------------------

    def run(self, *streams: FakeStream) -> None:
        """Do the work of `streams` (all, if none is given) as far as possible."""
        self._run(streams or self.streams, FakeMark())

    def _run(self, streams: Sequence[FakeStream], until: FakeMark) -> None:
        with self._lock:
            if self._running:
                return  # a finalizer interrupts an entry of this thread; the loop comes to the new one
            moved = self._running = True
            try:
                while moved:
                    moved = False
                    for stream in tuple(streams):
                        while not until.reached and stream.queue and stream.queue[0]() is not False:
                            stream.queue.popleft()
                            moved = True
            finally:
                self._running = False

    @property
    def reserved(self) -> int:
        """Bytes of its memory that are in use, or that it keeps for reuse."""
        with self._lock:
            blocks = (*self._blocks.values(), *self._free)
            return sum(ctypes.sizeof(block.memory) for block in blocks)

    def _queue(self, stream: FakeStream, happen: Callable[[], object]) -> None:
        with self._lock:
            stream.queue.append(happen)
            if not self.manual:
                self.run()

    def _allocate(self, size: int, stream: FakeStream) -> Any:
        with self._lock:
            for block in self._free:
                fits = block.stream is stream and ctypes.sizeof(block.memory) == size
                if fits and all(mark.reached for mark in block.marks):
                    self._free.remove(block)
                    break
            else:
                block = _Block((ctypes.c_char * size)(), stream)
            block.keepers.clear()
            address = ctypes.addressof(block.memory)
            self._blocks[address] = block
            view = (ctypes.c_char * size).from_buffer(block.memory)
            weakref.finalize(view, self._release, address).atexit = False
        return view

    def _release(self, address: int) -> None:
        if self._user != os.getpid():
            return  # in a fork: the thread that held the lock does not exist there
        with self._lock:
            block = self._blocks.pop(address)
            block.marks = [self._marked(stream) for stream in block.keepers]
            self._free.append(block)


def _size_of(tensor: torch.Tensor) -> int:
    """Return the bytes to allocate: at least one element, so that an empty tensor has an address."""
    return max(tensor.nbytes, tensor.element_size())


def _over(memory: Any, like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.frombuffer(memory, dtype=like.dtype)[: like.numel()].view(like.shape)


@contextmanager
def taken_for_current(accelerator: FakeAccelerator) -> Iterator[None]:
    """Make `accelerator` the device that torch would find, also by its name, within the block."""

    def named(device: Any) -> Any:
        known = str(device) in (accelerator.name, accelerator.name.partition(":")[0])
        return accelerator if known else find(device)

    with (
        mock.patch.object(pinning, "current", return_value=accelerator),
        mock.patch.object(pinning, "find", named),
    ):
        yield
