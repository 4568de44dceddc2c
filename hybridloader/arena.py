"""Recycled slots of shared memory, through which large buffers come back from worker processes.

Fresh pages, not bytes, are what a loader spends its time on: filling 38 MB of fresh memory takes
some 17 ms, of recycled memory 1 ms. So a worker owns slots that are mapped once. It fills one, tells
the parent its number, and gets the number back when the last array over it has died there.

A slot is an anonymous file: it has no name that could be left behind, and it is not limited by
the size of /dev/shm. Its descriptor goes over once and is closed on both sides as soon as the slot is
mapped, so that slots cost no descriptors. `posix_fallocate` makes a lack of memory an error here
instead of a SIGBUS later. Nothing POSIX-only is touched at import.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

ALIGN = 64
"""Bytes at which every buffer in a slot begins: a cache line, and what AVX-512 loads like best."""

_SPARE = 4
"""Free slots that a worker keeps beyond what it has in use; one more than that is given back."""


class Place(NamedTuple):
    """Where the buffers of one batch lie."""

    slot: int
    capacity: int  # bytes of the whole slot, so that the reader can map it
    spans: tuple[tuple[int, int], ...]  # (offset, bytes) of each buffer


def available() -> bool:
    """Whether this platform has nameless shared memory whose descriptor can be sent."""
    return hasattr(os, "memfd_create") or (os.name == "posix" and _posix_shm() is not None)


def _posix_shm() -> Any:
    try:
        return import_module("_posixshmem")
    except ImportError:
        return None


def _anonymous_file(size: int) -> int:
    """A descriptor of `size` bytes of shared memory that no path leads to."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hybridloader", os.MFD_CLOEXEC)
    else:  # macOS: named for an instant
        name = f"/hybridloader-{os.getpid()}-{os.urandom(6).hex()}"
        shm: Any = _posix_shm()
        fd = shm.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        shm.shm_unlink(name)
    try:
        if hasattr(os, "posix_fallocate") and hasattr(os, "memfd_create"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Mapping:
    """A slot mapped into this process; unmapped when nobody refers to it any more.

    `mmap.mmap` would keep a descriptor for as long as it lives (before Python 3.13 always), and ten
    thousand batches that are kept would run into ``ulimit -n``. libc's `mmap` keeps none.
    """

    __slots__ = ("__weakref__", "address", "size")

    def __init__(self, fd: int, size: int) -> None:
        # PROT_* are 1 and 2 and MAP_SHARED is 1 on Linux, macOS and the BSDs; mmap names them.
        address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"could not map {size} bytes: {os.strerror(code)}")
        self.address, self.size = address, size
        weakref.finalize(self, _libc().munmap, address, size).atexit = False

    def view(self) -> Any:
        """The bytes of the slot, as an object that supports the buffer protocol and weak references.

        The mapping must outlive it.
        """
        return (ctypes.c_ubyte * self.size).from_address(self.address)


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_ssize_t,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def capacity_for(size: int) -> int:
    """Round up to an eighth of a power of two (at least a page), so that slots fit again."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


class Writer:
    """A worker's own slots.

    Invariant: a slot is either free, or the parent has its number; nobody writes to the latter.
    """

    def __init__(self) -> None:
        # All the mutable state:
        self._next = 0
        self._mappings: dict[int, Mapping] = {}
        self._free: list[int] = []
        self._in_use = 0

    def write(self, buffers: Sequence[memoryview]) -> tuple[Place, int | None, list[int]]:
        """Copy `buffers` into a slot.

        Returns
        -------
        place
            Where they are; to be sent to the reader.
        fd
            The slot's descriptor if the slot is new, to be sent along and then closed.
        retired
            Numbers of slots that no longer exist, to be sent along.

        Raises
        ------
        OSError
            There is no memory for a slot. Nothing was changed.
        """
        spans, end = [], 0
        for buffer in buffers:
            start = -(-end // ALIGN) * ALIGN
            spans.append((start, buffer.nbytes))
            end = start + buffer.nbytes
        slot, fd, retired = self._take(end)
        mapping = self._mappings[slot]
        target = memoryview(mapping.view()).cast("B")
        for (start, size), buffer in zip(spans, buffers, strict=True):
            target[start : start + size] = buffer
        self._in_use += 1
        return Place(slot, mapping.size, tuple(spans)), fd, retired

    def release(self, slot: int) -> None:
        """The reader is done with `slot`."""
        if slot in self._mappings:
            self._free.append(slot)
            self._in_use -= 1

    def _take(self, size: int) -> tuple[int, int | None, list[int]]:
        fits = [s for s in self._free if size <= self._mappings[s].size <= 2 * capacity_for(size)]
        if fits:
            slot = min(fits, key=lambda s: self._mappings[s].size)
            self._free.remove(slot)
            return slot, None, []
        fd = _anonymous_file(capacity_for(size))
        try:
            mapping = Mapping(fd, capacity_for(size))
        except BaseException:
            os.close(fd)
            raise
        # Sizes have changed: what is free does not fit, so the oldest of it goes.
        retired, self._free = self._free[:-_SPARE], self._free[-_SPARE:]
        for old in retired:
            del self._mappings[old]
        slot, self._next = self._next, self._next + 1
        self._mappings[slot] = mapping
        return slot, fd, retired


class Reader:
    """The parent's view of one worker's slots."""

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}
        self.returned: deque[int] = deque()
        """Numbers of slots whose last array has died; filled from any thread."""

    def add(self, slot: int, fd: int, size: int) -> None:
        """Map a new slot; `fd` is closed."""
        try:
            self._mappings[slot] = Mapping(fd, size)
        finally:
            os.close(fd)

    def retire(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._mappings.pop(slot, None)

    def buffers(self, place: Place) -> list[memoryview]:
        """The buffers at `place`; the slot is returned when the last array over them dies."""
        mapping = self._mappings[place.slot]
        holder = mapping.view()
        # The finalizer also keeps the mapping alive for as long as there is a view of it.
        returned = self.returned
        weakref.finalize(holder, _give_back, returned, place.slot, mapping).atexit = False
        whole = memoryview(holder).cast("B")
        return [whole[start : start + size] for start, size in place.spans]

    def give_back(self, place: Place) -> None:
        """Nobody wants what is at `place`."""
        self.returned.append(place.slot)


def _give_back(returned: deque[int], slot: int, mapping: Mapping) -> None:
    returned.append(slot)
