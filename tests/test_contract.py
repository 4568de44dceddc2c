"""The contract suite over every backend, and over the ways that other platforms would take."""

from __future__ import annotations

import pytest

from hybridloader import Fork, Inline, Memory, SharedMemory, Spawn, Threads
from hybridloader.backends import sockets
from hybridloader.testing import BackendContract


class TestInline(BackendContract):
    backend = Inline()


class TestThreads(BackendContract):
    backend = Threads()


class TestThreadsWithCopies(BackendContract):
    backend = Threads(copy_dataset=True)


class TestFork(BackendContract):
    backend = Fork()


class TestSpawn(BackendContract):
    backend = Spawn()


class TestSharedMemory(BackendContract):
    backend = SharedMemory()


class TestSharedMemoryUnderLoky(BackendContract):
    backend = SharedMemory(start_method="loky")


class TestForkWithoutPidfd(BackendContract):
    """As on macOS: the end of a process is seen through multiprocessing's sentinel."""

    backend = Fork()

    @pytest.fixture(autouse=True)
    def _no_pidfd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("os.pidfd_open", raising=False)


class TestSharedMemoryWithoutMemfd(BackendContract):
    """As on macOS: slots are POSIX shared memory that loses its name at once."""

    backend = SharedMemory(start_method="fork")

    @pytest.fixture(autouse=True)
    def _no_memfd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("os.memfd_create")


class TestPortableTransport(BackendContract):
    """As on Windows: connections instead of polled sockets, no descriptors, slots with names."""

    backend = Spawn()

    @pytest.fixture(autouse=True)
    def _no_sockets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sockets, "available", lambda: False)


class TestNamedSlots(BackendContract):
    """Slots that are `multiprocessing.shared_memory`, where descriptors could be sent."""

    backend = Fork(memory=Memory(kind="named"))


class TestStream(BackendContract):
    """No slots at all."""

    backend = Fork(memory=Memory(kind="stream"))
