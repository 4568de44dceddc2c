"""A device that a test moves on: no GPU needed to test what waits for one.

What is queued on its streams happens when the test says so, and a copy reads its source only then. So
memory that was used again too early shows as a wrong batch, as on a real device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class FakeMark:
    """A point in a `FakeStream`."""

    def __init__(self, device: FakeAccelerator) -> None:
        self._device = device
        self.reached = False

    def passed(self) -> bool:
        return self.reached

    def wait(self) -> None:
        with self._device.moved:
            self._device.moved.wait_for(lambda: self.reached)


class FakeStream:
    """What is queued on it happens in order, as far as marks of other streams let it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], bool]] = deque()  # each tells whether it could happen

    def __repr__(self) -> str:
        return f"FakeStream({self.name!r}, {len(self.queue)} queued)"


class FakeAccelerator:
    """An accelerator in this process's memory; its tensors are ordinary ones.

    Parameters
    ----------
    name
        Of the device.
    lockable
        Bytes that may be page-locked at once; None: any number.
    manual
        Whether the streams stand still until `run` is called; else all happens at once.

    Attributes
    ----------
    locked
        Bytes that are page-locked now, by address.
    entered
        Identities of the threads that chose the device.
    kept
        What `keep_for` was told: streams, by the identity of the tensor's memory.
    """

    pins = True

    def __init__(
        self, name: str = "fake:0", *, lockable: int | None = None, manual: bool = True
    ) -> None:
        self.name = name
        self.lockable = lockable
        self.manual = manual
        self.moved = threading.Condition(threading.RLock())  # finalizers take it too
        self.default = FakeStream("default")
        # All the other mutable state:
        self.streams = [self.default]
        self.locked: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.entered: list[int] = []
        self.kept: list[tuple[int, FakeStream]] = []
        self._here = threading.local()

    def enter(self) -> None:
        self.entered.append(threading.get_ident())

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_pinned(tensor):
            return tensor
        copy = tensor.clone()
        with self.moved:
            self.pinned.add(copy.untyped_storage().data_ptr())
        return copy

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it was made by `pin`, or lies in pages that are locked."""
        address = tensor.untyped_storage().data_ptr()
        with self.moved:
            return address in self.pinned or any(
                start <= address < start + size for start, size in self.locked.items()
            )

    def page_lock(self, address: int, size: int) -> None:
        with self.moved:
            if self.lockable is not None and sum(self.locked.values()) + size > self.lockable:
                raise OSError(f"the fake device locks at most {self.lockable:,} bytes")
            if address in self.locked:
                raise OSError("these pages are locked already")
            self.locked[address] = size

    def page_unlock(self, address: int) -> None:
        with self.moved:
            del self.locked[address]

    def side_stream(self) -> FakeStream:
        with self.moved:
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

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        copy = torch.zeros_like(tensor)

        def happen() -> bool:
            copy.copy_(tensor)
            return True

        # Only pinned memory is read later: of other memory the driver makes a copy first.
        self._queue(self.current_stream(), happen, at_once=not self.is_pinned(tensor))
        return copy

    def mark(self, stream: Any) -> FakeMark:
        mark = FakeMark(self)

        def happen() -> bool:
            mark.reached = True
            return True

        self._queue(stream, happen)
        return mark

    def hold_up(self, stream: Any, mark: Any) -> None:
        self._queue(stream, mark.passed)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        self.kept.append((tensor.untyped_storage().data_ptr(), stream))

    def run(self, *streams: FakeStream) -> None:
        """Move on `streams` (all, if none is given) as far as they come."""
        with self.moved:
            moved = True
            while moved:
                moved = False
                for stream in streams or tuple(self.streams):
                    while stream.queue and stream.queue[0]():
                        stream.queue.popleft()
                        moved = True
            self.moved.notify_all()

    @property
    def queued(self) -> int:
        """How much is queued on all streams."""
        with self.moved:
            return sum(len(stream.queue) for stream in self.streams)

    def _queue(
        self, stream: FakeStream, happen: Callable[[], bool], *, at_once: bool = False
    ) -> None:
        with self.moved:
            if at_once:
                happen()
                return
            stream.queue.append(happen)
            if not self.manual:
                self.run()
