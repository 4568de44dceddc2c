"""Memory that is written once and then read by many processes: made, mapped, sent as a reference, freed.

Where descriptors can be opened through ``/proc`` it is an anonymous file: its reference is the
number of a process and of a descriptor there, which the receiver opens for itself. Elsewhere it is a
named segment. Either way a mapping lives exactly as long as something in this process refers to it.
Knows nothing of what lies in the memory, never writes to it again, and never takes it from others.
"""

from __future__ import annotations

import io
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from hybridloader.buffers.segments import anonymous_file
from hybridloader.errors import HybridLoaderError

TOKEN = 16
"""Bytes at the beginning of every buffer that are random and its own. Process numbers, descriptors,
inodes and names are used again; these are not."""

_MOST = 1 << 30
"""Bytes given to one write: Linux takes 2 GiB at most (write(2))."""


class BufferGone(HybridLoaderError, RuntimeError):
    """A shared container was unpickled after its memory had gone."""


class Ticket(NamedTuple):
    """All that another process needs in order to map a buffer."""

    token: bytes
    size: int  # bytes
    what: str
    name: str | None  # of a named segment
    file: tuple[int, int]  # device and inode of an anonymous file
    places: tuple[tuple[int, int], ...]  # processes that have it open, and by which descriptor


class SharedBuffer:
    """Read-only memory that any number of processes of this machine map.

    It is unmapped when this object and every view of `data` are gone. The mapping itself holds the
    one descriptor that there is; so a forked child closes and unmaps what is its own, no more.

    Attributes
    ----------
    data
        A slice of it is a copy, as bytes.
    """

    __slots__ = ("__weakref__", "_file", "_name", "_origin", "_token", "_what", "data")

    def __init__(self, data: mmap.mmap, ticket: Ticket) -> None:
        self.data = data
        self._token, self._what = ticket.token, ticket.what
        self._name, self._file = ticket.name, ticket.file
        self._origin = ticket.places[:1]
        _here[self._token] = self

    def ticket(self) -> Ticket:
        """Good for as long as a process that it names, or the maker of a name, keeps the buffer."""
        places = self._origin
        if self._name is None:
            mine = ((os.getpid(), self._descriptor()),)
            places = places if places == mine else places + mine
        return Ticket(self._token, len(self.data), self._what, self._name, self._file, places)

    def _descriptor(self) -> int:
        # The mapping has one (a dup, by mmap.mmap) but does not tell its number. To keep another
        # beside it would double the descriptors; looking takes 2 microseconds for each that is open.
        for entry in os.listdir("/proc/self/fd"):
            try:
                found = os.fstat(int(entry))
            except OSError:  # the one that listed them
                continue
            if (found.st_dev, found.st_ino) == self._file:
                return int(entry)
        raise BufferGone(f"the descriptor of this {self._what} was closed by other code")


_here: weakref.WeakValueDictionary[bytes, SharedBuffer] = weakref.WeakValueDictionary()
"""What this process has mapped: the same container twice in one pickle is mapped once."""


class Stage:
    """Bytes on their way to a buffer, in this process's own memory.

    Attributes
    ----------
    size
        Bytes so far.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.size = 0
        self._bytes = io.BytesIO()

    def write(self, data: Any) -> None:
        """Append `data`, which has the buffer protocol."""
        self.size += self._bytes.write(data)

    def align(self) -> int:
        """Where the next byte comes, after padding to eight."""
        self.write(bytes(-self.size % 8))
        return self.size

    def read(self) -> bytes | mmap.mmap:
        """What was written so far; slices of it are bytes."""
        return self._bytes.getvalue()

    def close(self) -> None:
        """Forget everything."""
        self._bytes = io.BytesIO()

    def share(self, token: bytes) -> SharedBuffer:
        """Make the buffer, which begins with `token`. The stage is at its end."""
        from multiprocessing import shared_memory

        try:
            # Known to the resource tracker, which unlinks it should this process be killed.
            name = f"hl-{os.getpid()}-{os.urandom(6).hex()}"  # macOS takes 30 letters
            segment = shared_memory.SharedMemory(name, create=True, size=self.size)
        except OSError as error:
            raise no_room(self.what, self.size, error) from error
        try:
            if sys.platform == "linux":  # or /dev/shm would run full with a SIGBUS
                os.posix_fallocate(segment._fd, 0, self.size)  # type: ignore[attr-defined]
            assert segment.buf is not None
            segment.buf[: self.size] = self._bytes.getbuffer()
            ticket = Ticket(token, self.size, self.what, segment.name, (0, 0), ())
            buffer = SharedBuffer(_map_named(segment.name, self.size, self.what), ticket)
        except BaseException as error:
            segment.unlink()
            if isinstance(error, OSError):
                raise no_room(self.what, self.size, error) from error
            raise
        finally:
            segment.close()
            self.close()
        weakref.finalize(buffer, _unlink, segment, os.getpid())
        return buffer


class FileStage(Stage):
    """Bytes on their way to a buffer, in the anonymous file that will be the buffer."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._fd = -1
        self._fd = anonymous_file(0)

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        try:
            while len(view):
                # Writing, unlike storing into a mapping, takes the pages first: no SIGBUS.
                done = os.write(self._fd, view[:_MOST])
                self.size, view = self.size + done, view[done:]
        except OSError as error:
            raise no_room(self.what, self.size + len(view), error) from error

    def read(self) -> bytes | mmap.mmap:
        return _map(self._fd, self.size, self.what) if self.size else b""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else `os` may be gone already, and the descriptor goes by itself
            self.close()

    def share(self, token: bytes) -> SharedBuffer:
        found = os.fstat(self._fd)
        data = _map(self._fd, self.size, self.what)
        self.close()
        file = found.st_dev, found.st_ino
        buffer = SharedBuffer(data, Ticket(token, self.size, self.what, None, file, ()))
        buffer._origin = buffer.ticket().places
        return buffer


def stage(what: str) -> Stage:
    """Where to write the bytes of a buffer for a `what`, by what this platform can do."""
    return FileStage(what) if nameless_usable() else Stage(what)


def nameless_usable() -> bool:
    """Whether another process can open an anonymous file of this one."""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")


def open_ticket(ticket: Ticket) -> SharedBuffer:
    """Map the buffer that `ticket` is for.

    Raises
    ------
    BufferGone
        Nobody has it any more.
    MemoryError
        There is no room for the mapping.
    """
    buffer = _here.get(ticket.token)
    if buffer is not None:
        return buffer
    if ticket.name is not None:
        data = _map_named(ticket.name, ticket.size, ticket.what)
    else:
        data, place = _map_place(ticket)
        ticket = ticket._replace(places=(place,))
    if data[:TOKEN] != ticket.token:
        raise _gone(ticket)
    return SharedBuffer(data, ticket)


def no_room(what: str, size: int, error: OSError) -> MemoryError:
    """The error that says how much memory there was not."""
    return MemoryError(f"a {what} needs {size:,} bytes of shared memory or more: {error}")


def _map_place(ticket: Ticket) -> tuple[mmap.mmap, tuple[int, int]]:
    for pid, number in ticket.places:
        path = f"/proc/{pid}/fd/{number}"
        try:
            if not _is(os.stat(path), ticket):  # looked at first: to open a pipe may wait
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _is(os.fstat(fd), ticket):
                return _map(fd, ticket.size, ticket.what), (pid, number)
        finally:
            os.close(fd)
    raise _gone(ticket)


def _is(found: os.stat_result, ticket: Ticket) -> bool:
    return (found.st_dev, found.st_ino) == ticket.file and found.st_size == ticket.size


def _map(fd: int, size: int, what: str) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise no_room(what, size, error) from error


def _map_named(name: str, size: int, what: str) -> mmap.mmap:
    # Not by SharedMemory: before Python 3.13 opening one tells the resource tracker, which all
    # processes of a family share and which would unlink it (https://github.com/python/cpython/issues/82300).
    if sys.platform == "win32":
        return mmap.mmap(-1, size, tagname=name, access=mmap.ACCESS_READ)
    shm: Any = import_module("_posixshmem")
    try:
        fd = shm.shm_open(f"/{name.lstrip('/')}", os.O_RDONLY, mode=0o600)
    except FileNotFoundError as error:
        raise _gone(Ticket(b"", size, what, name, (0, 0), ())) from error
    try:
        return _map(fd, size, what)
    finally:
        os.close(fd)


def _unlink(segment: Any, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has inherited the finalizer
        segment.unlink()


def _gone(ticket: Ticket) -> BufferGone:
    alive = [pid for pid, _ in ticket.places if os.path.exists(f"/proc/{pid}")]
    if alive:
        why = f"process {alive[0]}, which had it, has let go of it, or does not let this one look"
    elif ticket.places:
        why = f"the process that made this {ticket.what} ({ticket.places[0][0]}) has ended"
    else:
        why = f"the process that made this {ticket.what} has ended, or has let go of it"
    kind = "dict" if ticket.what == "SharedDict" else "list"
    return BufferGone(
        f"a pickled {ticket.what} is a reference to memory of {ticket.size:,} bytes, and {why}. Keep "
        f"the {ticket.what} alive until all have received it; to save one, pickle {kind}(shared)."
    )
