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
from importlib import import_module
from typing import Any, NamedTuple

from hybridloader._support.errors import HybridLoaderError
from hybridloader.memory.segments import anonymous_file

Data = bytes | mmap.mmap

TOKEN = 16
"""Bytes at the beginning of every buffer that are random and its own. Process numbers, descriptors,
inodes and names are used again; these are not."""


class BufferGone(HybridLoaderError, RuntimeError):
    """A shared container was unpickled after its memory had gone."""


class BufferTicket(NamedTuple):
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
    one descriptor that there is; so a forked child closes and unmaps what is its own, no more. A
    pickle is good for as long as a process that has pickled or made the buffer keeps it.

    Attributes
    ----------
    data
        A slice of it is a copy, as bytes.
    """

    __slots__ = ("__weakref__", "_ticket", "data")

    def __init__(self, data: mmap.mmap, ticket: BufferTicket) -> None:
        self.data, self._ticket = data, ticket
        _here[ticket.token] = self

    def __reduce__(self) -> Any:
        self._add_this_process()
        return open_ticket, tuple(self._ticket)

    def _add_this_process(self) -> None:
        ticket, pid = self._ticket, os.getpid()
        if ticket.name is None and pid not in dict(ticket.places):
            places = (*ticket.places[:1], (pid, self._descriptor()))
            self._ticket = ticket._replace(places=places)

    def _descriptor(self) -> int:
        # The mapping has one (a dup, by mmap.mmap) but does not tell its number. To keep another
        # beside it would double the descriptors; looking takes 2 microseconds for each that is open.
        for entry in os.listdir("/proc/self/fd"):
            try:
                if _is(os.fstat(int(entry)), self._ticket):
                    return int(entry)
            except OSError:  # the one that listed them
                continue
        raise BufferGone(f"the descriptor of this {self._ticket.what} was closed by other code")


_here: weakref.WeakValueDictionary[bytes, SharedBuffer] = weakref.WeakValueDictionary()
"""What this process has mapped: the same container twice in one pickle is mapped once."""


class Staging:
    """Bytes on their way to a buffer, in the anonymous file that will be it, or in private memory.

    Attributes
    ----------
    size
        Bytes so far, the token's among them.
    """

    def __init__(self, what: str) -> None:
        self.what, self.size, self._token = what, 0, os.urandom(TOKEN)
        nameless = nameless_usable()
        self._file = io.FileIO(anonymous_file(0), "r+") if nameless else io.BytesIO()
        self.write(self._token)

    def write(self, data: Any) -> None:
        """Append `data`, which has the buffer protocol."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        try:
            while len(view):  # Linux takes 2 GiB at most (write(2)), and takes the pages: no SIGBUS
                done = self._file.write(view)
                self.size, view = self.size + done, view[done:]
        except (OSError, MemoryError) as error:
            raise _no_room(self.what, self.size + len(view), error) from error

    def read(self) -> Data:
        """What was written so far; slices of it are bytes."""
        if isinstance(self._file, io.BytesIO):
            return self._file.getvalue()
        return _map(self._file.fileno(), self.size, self.what)

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self._file.close()

    def share(self) -> SharedBuffer:
        """Make the buffer, which begins with the token. The stage is at its end."""
        with self._file as file:
            if isinstance(file, io.BytesIO):
                return self._share_by_name(file)
            found = os.fstat(file.fileno())
            made = BufferTicket(
                self._token, self.size, self.what, None, (found.st_dev, found.st_ino), ()
            )
            buffer = SharedBuffer(_map(file.fileno(), self.size, self.what), made)
        buffer._add_this_process()  # a fork may be the first to pickle it
        return buffer

    def _share_by_name(self, file: io.BytesIO) -> SharedBuffer:
        from multiprocessing import shared_memory

        segment = None
        try:
            # Known to the resource tracker, which unlinks it should this process be killed.
            name = f"hl-{os.getpid()}-{os.urandom(6).hex()}"  # macOS takes 30 letters
            segment = shared_memory.SharedMemory(name, create=True, size=self.size)
            if sys.platform == "linux":  # or /dev/shm would run full with a SIGBUS
                os.posix_fallocate(segment._fd, 0, self.size)  # type: ignore[attr-defined]
            assert segment.buf is not None
            segment.buf[: self.size] = file.getbuffer()
            ticket = BufferTicket(self._token, self.size, self.what, segment.name, (0, 0), ())
            buffer = SharedBuffer(_map_named(ticket), ticket)
        except BaseException as error:
            if segment is not None:
                segment.unlink()
            if isinstance(error, OSError):
                raise _no_room(self.what, self.size, error) from error
            raise
        finally:
            if segment is not None:
                segment.close()
        weakref.finalize(buffer, _unlink, segment, os.getpid())
        return buffer


def nameless_usable() -> bool:
    """True if another process can open an anonymous file of this one."""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")


def open_ticket(*fields: Any) -> SharedBuffer:
    """Map the buffer of the ticket with these fields.

    Raises
    ------
    BufferGone
        Nobody has it any more.
    MemoryError
        There is no room for the mapping.
    """
    ticket = BufferTicket(*fields)
    buffer = _here.get(ticket.token)
    if buffer is not None:
        return buffer
    if ticket.name is not None:
        data = _map_named(ticket)
    else:
        data, place = _map_place(ticket)
        ticket = ticket._replace(places=(place,))
    if data[:TOKEN] != ticket.token:
        raise _gone(ticket)
    return SharedBuffer(data, ticket)


def _no_room(what: str, size: int, error: Exception) -> MemoryError:
    return MemoryError(f"a {what} needs {size:,} bytes of shared memory or more: {error}")


def _map_place(ticket: BufferTicket) -> tuple[mmap.mmap, tuple[int, int]]:
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


def _is(found: os.stat_result, ticket: BufferTicket) -> bool:
    return (found.st_dev, found.st_ino) == ticket.file and found.st_size == ticket.size


def _map(fd: int, size: int, what: str) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _no_room(what, size, error) from error


def _map_named(ticket: BufferTicket) -> mmap.mmap:
    # Not by SharedMemory: before Python 3.13 opening one tells the resource tracker, which all
    # processes of a family share and which would unlink it (https://github.com/python/cpython/issues/82300).
    name = str(ticket.name)
    if sys.platform == "win32":
        return mmap.mmap(-1, ticket.size, tagname=name, access=mmap.ACCESS_READ)
    shm: Any = import_module("_posixshmem")
    try:
        fd = shm.shm_open(f"/{name.lstrip('/')}", os.O_RDONLY, mode=0o600)
    except FileNotFoundError as error:
        raise _gone(ticket) from error
    try:
        return _map(fd, ticket.size, ticket.what)
    finally:
        os.close(fd)


def _unlink(segment: Any, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has inherited the finalizer
        segment.unlink()


def _gone(ticket: BufferTicket) -> BufferGone:
    alive = [pid for pid, _ in ticket.places if os.path.exists(f"/proc/{pid}")]
    if alive:
        why = f"process {alive[0]}, which had it, has let go of it, or does not let this one look"
    elif ticket.places:
        why = f"the process that made this {ticket.what} ({ticket.places[0][0]}) has ended"
    else:
        why = f"the process that made this {ticket.what} has ended, or has let go of it"
    plain = ticket.what.removeprefix("Shared").lower()
    return BufferGone(
        f"a pickled {ticket.what} is a reference to memory of {ticket.size:,} bytes, and {why}. Keep "
        f"the {ticket.what} alive until all have received it; to save one, pickle {plain}(shared)."
    )
