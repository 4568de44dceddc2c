"""Segments of memory that two processes map. This module does not depend on slots or batches.

There are two kinds:

- A *nameless* segment, on Linux and macOS, is an anonymous file (a memfd, or a POSIX segment whose name
  is unlinked at once). No name can leak, and the size of /dev/shm does not limit it. Its descriptor is
  sent over a socket, and closed as soon as the segment is mapped.
- A *named* segment, on Windows, is a `multiprocessing.shared_memory.SharedMemory`: connections carry no
  descriptors there. It is gone with the last process that has it open.

The import uses nothing that only POSIX has.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import lru_cache
from typing import Any, NamedTuple

from hybridloader._support import system

ALIGN = 64
"""Alignment in bytes of the memory of tensors, as torch's allocator has it: a cache line, which suits
AVX-512 loads. Consumers by dlpack copy memory that is aligned to less."""


_addressof, _first_byte = ctypes.addressof, ctypes.c_ubyte.from_buffer


class Ticket(NamedTuple):
    """Information that the other process needs in order to map a segment."""

    size: int  # bytes
    name: str | None  # None: a descriptor is sent too


class Mapping:
    """`size` bytes mapped into this process, and unmapped when the last reference is gone."""

    def __init__(self, address: int, size: int, owner: Any = None) -> None:
        self.address, self.size, self._owner = address, size, owner

    def view(self, start: int = 0, size: int | None = None) -> Any:
        """Return `size` bytes from `start`, with the buffer protocol and weak references.

        The mapping must outlive it.
        """
        length = self.size - start if size is None else size
        return (ctypes.c_ubyte * length).from_address(self.address + start)

    def lasting_view(self, start: int = 0, size: int | None = None) -> memoryview:
        """Return `size` bytes from `start`, which stay mapped as long as a view of them exists."""
        array = self.view(start, size)
        weakref.finalize(array, id, self).atexit = False
        return memoryview(array).cast("B")


def make(size: int) -> tuple[Mapping, Ticket, int | None]:
    """Make a segment of `size` bytes, and map it.

    The caller sends the descriptor with the ticket of a nameless segment, and then closes it. Raises
    `OSError` if there is no memory for the segment; nothing leaks then.
    """
    if not system.UNIX_SOCKETS:
        from multiprocessing import shared_memory

        segment = shared_memory.SharedMemory(create=True, size=size)
        return _map_named(segment), Ticket(segment.size, segment.name), None
    fd = anonymous_file(size)
    try:
        return map_descriptor(fd, size), Ticket(size, None), fd
    except BaseException:
        os.close(fd)
        raise


def make_private(size: int) -> Mapping:
    """Map `size` bytes for this process only. Raises `OSError` when there is no memory for them."""
    if not system.FORK:
        pages = mmap.mmap(-1, size)
    else:  # Python's default would share the pages with a fork
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if system.HUGE_PAGES is not None:  # one fault for 2 MB instead of 512
            try:
                pages.madvise(system.HUGE_PAGES)
            except OSError:  # a kernel without
                pass
    # An address instead of a view of the buffer: a view would keep the pages from being unmapped.
    return Mapping(ctypes.addressof(ctypes.c_ubyte.from_buffer(pages)), size, pages)


def address_of(buffer: memoryview) -> int | None:
    """Return the address of the bytes of `buffer`; None for a read-only or empty one."""
    if buffer.readonly or buffer.nbytes == 0:
        return None
    return _addressof(_first_byte(buffer))


def aligned(size: int) -> tuple[bytearray, int]:
    """Return new memory, and the place in it where `size` bytes begin at a multiple of `ALIGN`."""
    memory = bytearray(size + ALIGN)
    return memory, -_addressof(_first_byte(memory)) % ALIGN


def aligned_view(size: int) -> memoryview:
    """Return `size` bytes of new memory that begin at a multiple of `ALIGN`."""
    memory, start = aligned(size)
    return memoryview(memory)[start : start + size]


def open_named(name: str) -> Mapping:
    """Map a named segment that another process has made."""
    from multiprocessing import shared_memory

    with system.kept_open(name):
        return _map_named(shared_memory.SharedMemory(name))


def anonymous_file(size: int) -> int:
    """Make `size` bytes of shared memory without a path, and return their descriptor.

    `posix_fallocate` makes a lack of memory an error here instead of a SIGBUS later.
    """
    if system.MEMFD:
        fd = os.memfd_create("hybridloader", os.MFD_CLOEXEC)
    else:
        name = f"/hl-{os.getpid()}-{os.urandom(6).hex()}"  # macOS allows 31 bytes
        shm = system.module("_posixshmem")
        fd = shm.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        shm.shm_unlink(name)
    try:
        if size and system.FALLOCATE and system.MEMFD:
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def nameless_file() -> int:
    """Make an empty file without a path, for `write`, and return its descriptor.

    Without memfd it is an unlinked file on disk: macOS supports neither `write` to a POSIX segment nor a
    private mapping of one.
    """
    if system.MEMFD:
        return os.memfd_create("hybridloader", os.MFD_CLOEXEC)
    import tempfile

    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


def map_descriptor(fd: int, size: int, *, private: bool = False) -> Mapping:
    """Map `size` bytes of the file `fd`, for reading and writing.

    `mmap.mmap` keeps a descriptor open as long as it exists (always before Python 3.13), so ten thousand
    kept batches would reach ``ulimit -n``. libc's `mmap` keeps none. If `private`, writes are visible to
    this process only: a page is copied at its first write.
    """
    # PROT_* are 1 and 2, MAP_SHARED is 1 and MAP_PRIVATE 2 on Linux, macOS and the BSDs.
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"could not map {size} bytes: {os.strerror(code)}")
    mapping = Mapping(address, size)
    # On any thread; Python's end frees all memory by itself.
    weakref.finalize(mapping, _libc().munmap, address, size).atexit = False
    return mapping


def _map_named(segment: Any) -> Mapping:
    # An address instead of a view of the buffer: a view would make `close` fail at the end.
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(segment.buf))
    return Mapping(address, segment.size, segment)


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_ssize_t
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
