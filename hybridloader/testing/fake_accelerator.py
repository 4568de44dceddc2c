"""A device that a test moves on: no GPU needed to test what waits for one.

What is queued on its streams happens when the test says so, and a copy reads its source only then.
Memory of the device is used again as a caching allocator does it: at once for what is queued on the
stream that it was made for, with other streams heeded only if `keep_for` was told of them. So memory
that was used again too early, on either side, shows as a wrong batch, as on a real device.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class FakeMark:
    """A point in a `FakeStream`."""

    def __init__(self) -> None:
        self.reached = False

    def passed(self) -> bool:
        return self.reached


class FakeStream:
    """What is queued on it happens in order, as far as marks of other streams let it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], bool]] = deque()  # each tells whether it could happen

    def __repr__(self) -> str:
        return f"FakeStream({self.name!r}, {len(self.queue)} queued)"


class _Block:
    """Memory of the device, and what must have happened before it is used again."""

    __slots__ = ("keepers", "marks", "memory", "stream")

    def __init__(self, memory: Any, stream: FakeStream) -> None:
        self.memory, self.stream = memory, stream
        self.keepers: list[FakeStream] = []
        self.marks: list[FakeMark] = []


class FakeAccelerator:
    """An accelerator in this process's memory; its tensors are ordinary ones.

    Parameters
    ----------
    name
        Of the device.
    lockable
        Bytes that may be page-locked at once by `page_lock`; None: any number.
    pinnable
        Bytes that `pin` may have made and that are alive at once; None: any number.
    manual
        Whether the streams stand still until `run` is called; else all happens at once.

    Attributes
    ----------
    locked
        Bytes that are page-locked now, by address.
    pinned
        Addresses of what `pin` has made and that is alive.
    entered
        Identities of the threads that chose the device.
    kept
        What `keep_for` was told: streams, by the address of the tensor's memory.
    """

    pins = True
    locks_pages = True

    def __init__(
        self,
        name: str = "fake:0",
        *,
        lockable: int | None = None,
        pinnable: int | None = None,
        manual: bool = True,
    ) -> None:
        self.name = name
        self.lockable, self.pinnable = lockable, pinnable
        self.manual = manual
        self._lock = threading.RLock()  # finalizers take it too
        self.default = FakeStream("default")
        # All the other mutable state:
        self.streams = [self.default]
        self.locked: dict[int, int] = {}
        self.pinned: dict[int, int] = {}  # bytes, by address
        self.entered: list[int] = []
        self.kept: list[tuple[int, FakeStream]] = []
        self._blocks: dict[int, _Block] = {}  # that are in use, by address
        self._free: list[_Block] = []
        self._here = threading.local()

    def __repr__(self) -> str:
        return f"FakeAccelerator({self.name!r})"

    def enter(self) -> None:
        self.entered.append(threading.get_ident())

    # -- memory of the host ----------------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_pinned(tensor) or self.holds(tensor):
            return tensor
        with self._lock:
            most = self.pinnable
            if most is not None and sum(self.pinned.values()) + tensor.nbytes > most:
                raise RuntimeError(f"the fake device pins at most {most:,} bytes")
            memory = (ctypes.c_char * tensor.nbytes)()
            address = ctypes.addressof(memory)
            self.pinned[address] = tensor.nbytes
            weakref.finalize(memory, self.pinned.pop, address).atexit = False
        copy = _over(memory, tensor)
        copy.copy_(tensor)
        return copy

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it was made by `pin`, or lies in pages that are locked."""
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            return address in self.pinned or any(
                start <= address < start + size for start, size in self.locked.items()
            )

    def page_lock(self, address: int, size: int) -> None:
        with self._lock:
            if self.lockable is not None and sum(self.locked.values()) + size > self.lockable:
                raise OSError(f"the fake device locks at most {self.lockable:,} bytes")
            if address in self.locked:
                raise OSError("these pages are locked already")
            self.locked[address] = size

    def page_unlock(self, address: int) -> None:
        with self._lock:
            del self.locked[address]

    # -- streams ---------------------------------------------------------------------------------------

    def side_stream(self) -> FakeStream:
        with self._lock:
            self.streams.append(FakeStream(f"side {len(self.streams)}"))
            return self.streams[-1]

    def current_stream(self) -> FakeStream:
        found: FakeStream = getattr(self._here, "stream", self.default)
        return found

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def mark(self, stream: Any) -> FakeMark:
        mark = FakeMark()

        def happen() -> bool:
            mark.reached = True
            return True

        self._queue(stream, happen)
        return mark

    def hold_up(self, stream: Any, mark: Any) -> None:
        self._queue(stream, mark.passed)

    # -- memory of the device --------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it was made by `move`."""
        with self._lock:
            return tensor.untyped_storage().data_ptr() in self._blocks

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.holds(tensor):
            return tensor
        stream = self.current_stream()
        copy = _over(self._allocate(tensor.nbytes, stream), tensor)
        source = self._source(tensor)

        def happen() -> bool:
            copy.copy_(source())
            return True

        self._queue(stream, happen)
        return copy

    def _source(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What a copy reads once it happens: in pages that somebody else locked, whatever is there."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self.pinned:
            return lambda: tensor  # torch's allocator keeps what it has pinned until it was read
        if not self.is_pinned(tensor):
            staged = tensor.clone()  # the driver does so before it returns
            return lambda: staged
        dtype, shape = tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset())

        def read() -> torch.Tensor:
            import torch

            if not any(start <= address < start + own for start, own in self.locked.items()):
                raise RuntimeError("a copy reads pages that were unlocked too early")
            there = (ctypes.c_char * size).from_address(address)
            whole = torch.frombuffer(there, dtype=dtype, count=size // dtype.itemsize)
            return whole.as_strided(*shape)

        return read

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            self.kept.append((address, stream))
            if address in self._blocks:
                self._blocks[address].keepers.append(stream)

    def launch(self, kernel: Callable[[], object]) -> None:
        """Have `kernel` called when this thread's stream comes to it."""

        def happen() -> bool:
            kernel()
            return True

        self._queue(self.current_stream(), happen)

    # -- what the test does ----------------------------------------------------------------------------

    def run(self, *streams: FakeStream) -> None:
        """Move on `streams` (all, if none is given) as far as they come."""
        with self._lock:
            moved = True
            while moved:
                moved = False
                for stream in streams or tuple(self.streams):
                    while stream.queue and stream.queue[0]():
                        stream.queue.popleft()
                        moved = True

    @property
    def queued(self) -> int:
        """How much is queued on all streams."""
        with self._lock:
            return sum(len(stream.queue) for stream in self.streams)

    def _queue(self, stream: FakeStream, happen: Callable[[], bool]) -> None:
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
        with self._lock:
            block = self._blocks.pop(address)
            block.marks = [self.mark(stream) for stream in block.keepers]
            self._free.append(block)


def _over(memory: Any, like: torch.Tensor) -> torch.Tensor:
    import torch

    if not like.numel():
        return torch.empty_like(like)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
