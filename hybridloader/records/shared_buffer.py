"""`SharedBuffer`: memory that is written once, read by many processes, and pickled as a reference.

Where descriptors can be opened through ``/proc``, it is an anonymous file. Its reference is a process
and the number of a descriptor there, which the receiver opens. Elsewhere it is a named segment. A
mapping lives exactly as long as something in its process refers to it.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from hybridloader._support import system
from hybridloader.errors import HybridLoaderError
from hybridloader.memory.segments import nameless_file

Data = bytes | mmap.mmap

TOKEN = 16
"""Random bytes at the start of every buffer. Unlike process numbers, descriptors, inodes and names,
they are never used again."""


class BufferGone(HybridLoaderError, RuntimeError):
    """A shared container was unpickled after its memory was freed."""

    anchor = "buffergone"


class BufferTicket(NamedTuple):
    """Reference with which another process maps a buffer."""

    token: bytes
    size: int  # bytes
    what: str
    name: str | None  # of a named segment
    file: tuple[int, int]  # device and inode of an anonymous file
    places: tuple[tuple[int, int], ...]  # processes that have it open, and by which descriptor


class SharedBuffer:
    """Read-only memory that any number of processes of this machine map.

    It is unmapped when this object and every view of `data`, the mapping, are gone. A slice of `data` is
    a copy, as bytes. The mapping holds the only descriptor, so a forked child closes and unmaps only its
    own. A pickle can be read while a process that made or pickled the buffer keeps it.
    """

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
        # The mapping has a descriptor (a dup, by mmap.mmap) but does not tell its number. Another one
        # would double the descriptors; the search takes 2 microseconds for each open one.
        for entry in os.listdir(f"{system.PROC}/self/fd"):
            try:
                if _is(os.fstat(int(entry)), self._ticket):
                    return int(entry)
            except OSError:  # the descriptor that listed them
                continue
        raise BufferGone(f"the descriptor of this {self._ticket.what} was closed by other code")


_here: weakref.WeakValueDictionary[bytes, SharedBuffer] = weakref.WeakValueDictionary()
"""Buffers of this process by token: a container that is twice in a pickle is mapped once."""


class Staging:
    """Bytes that become a buffer, in its anonymous file or in private memory."""

    def __init__(self, what: str) -> None:
        self.what, self._token = what, os.urandom(TOKEN)
        self.size = 0  # bytes so far, with the token
        nameless = nameless_usable()
        self._file = io.FileIO(nameless_file(), "r+") if nameless else io.BytesIO()
        self.write(self._token)

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        try:
            while len(view):  # Linux writes 2 GiB at most, and reserves the pages: no SIGBUS
                done = self._file.write(view)
                self.size, view = self.size + done, view[done:]
        except (OSError, MemoryError) as error:
            raise _no_room(self.what, self.size + len(view), error) from error

    def read(self) -> Data:
        """The bytes so far; slices are bytes."""
        if isinstance(self._file, io.BytesIO):
            return self._file.getvalue()
        return _map(self._file.fileno(), self.size, self.what)

    def close(self) -> None:
        self._file.close()

    def share(self) -> SharedBuffer:
        """Make the buffer, and close this object."""
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

        # The resource tracker knows it, and unlinks it if this process is killed.
        name = f"hl-{os.getpid()}-{os.urandom(6).hex()}"  # macOS takes 30 characters
        try:
            segment = shared_memory.SharedMemory(name, create=True, size=self.size)
            try:
                if system.FALLOCATE:  # a full /dev/shm would be a SIGBUS
                    os.posix_fallocate(segment._fd, 0, self.size)  # type: ignore[attr-defined]
                assert segment.buf is not None
                segment.buf[: self.size] = file.getbuffer()
                ticket = BufferTicket(self._token, self.size, self.what, segment.name, (0, 0), ())
                buffer = SharedBuffer(_map_named(ticket), ticket)
            except BaseException:
                segment.unlink()
                raise
            finally:
                segment.close()
        except OSError as error:
            raise _no_room(self.what, self.size, error) from error
        weakref.finalize(buffer, _unlink, segment, os.getpid())
        return buffer


def nameless_usable() -> bool:
    """True if other processes can open an anonymous file of this one."""
    return system.MEMFD and os.path.exists(f"{system.PROC}/self/fd")


def open_ticket(*fields: Any) -> SharedBuffer:
    """Map the buffer of the ticket with these fields.

    Raises `BufferGone` if no process has it any more, `MemoryError` if there is no address space for it.
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
        path = f"{system.PROC}/{pid}/fd/{number}"
        try:
            if not _is(os.stat(path), ticket):  # before it is opened: a pipe may block
                continue
            fd = os.open(path, os.O_RDONLY)
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
    # Not by SharedMemory: before Python 3.13 an open of one tells the resource tracker, which all
    # processes of a family share and which would unlink it (https://github.com/python/cpython/issues/82300).
    name = str(ticket.name)
    shm = system.module("_posixshmem")
    if shm is None:
        return mmap.mmap(-1, ticket.size, tagname=name, access=mmap.ACCESS_READ)  # type: ignore[call-arg,unused-ignore]
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
    plain = ticket.what.removeprefix("Shared").lower()
    return BufferGone(
        f"a pickled {ticket.what} is a reference to memory of {ticket.size:,} bytes, and the process "
        "that had it has ended, has let go of it, or does not let this one look. Keep the "
        f"{ticket.what} alive until all have received it; to save one, pickle {plain}(shared)."
    )


# -- Columns: many Python objects as consecutive bytes, of which each can be read back.
#
# A column holds elements of one kind: ints, floats, texts or bytes. Elements of mixed or other types
# are a pickle each. The kind is found while the elements are written, a few at a time. Type and value
# of an element are kept exactly. Nothing here knows of processes.


_KINDS = {int: "int", float: "float", str: "str", bytes: "bytes"}
"""Kinds by exact type: a bool or a subclass of str must not be read back as an int or a str."""

_CODES = {"int": "q", "float": "d"}
"""Type codes of `array`, for the kinds whose elements take eight bytes each and need no offsets."""

_PIECE = 1 << 20
"""Bytes that are encoded or decoded at a time, about: more than a cache holds is no faster."""

_MOST = 8192  # the most elements that are encoded at a time

_READ = 256
"""Elements that an iterator makes at a time. In a forked child a new object may fill a hole in a page
that was shared: 8192 at a time made 4 MB private, 256 make 0.6 MB and are as fast."""


class ColumnLayout(NamedTuple):
    """Layout of a buffer: the elements, then, unless they take eight bytes each, their offsets."""

    kind: str
    length: int


class Column:
    """A column that is being written to its own buffer, for a container of the class `what`."""

    def __init__(self, what: str) -> None:
        # All the mutable state:
        self._stage = Staging(what)
        self._layout = ColumnLayout("", 0)
        self._offsets = array("q", [TOKEN])

    @property
    def size(self) -> int:
        return self._stage.size

    def extend(self, elements: Iterable[Any]) -> None:
        for chunk in chunks(elements, lambda: self.size):
            self.add(chunk)

    def add(self, chunk: Sequence[Any]) -> None:
        """Append the elements of `chunk`, which is not empty."""
        types = set(map(type, chunk))
        found = _KINDS.get(types.pop(), "pickle") if len(types) == 1 else "pickle"
        if found != self._layout.kind != "pickle":
            self._begin_as(found if not self._layout.kind else "pickle")
        try:
            data, lengths = _encode(self._layout.kind, chunk)
        except OverflowError:  # an int beyond 64 bits
            self._begin_as("pickle")
            data, lengths = _encode("pickle", chunk)
        self._stage.write(data)
        kind, length = self._layout
        self._layout = ColumnLayout(kind, length + len(chunk))
        if lengths is not None:
            self._offsets.extend(islice(accumulate(lengths, initial=self._offsets[-1]), 1, None))

    def _begin_as(self, kind: str) -> None:
        """Continue with elements of `kind`, and convert those that were written."""
        layout, stage, offsets = self._layout, self._stage, self._offsets
        self._layout = ColumnLayout(kind, 0)
        if layout.length:
            self._stage, self._offsets = Staging(stage.what), array("q", [TOKEN])
            data = stage.read()
            self.extend(elements(layout.kind, data, *bounds(layout, data, memoryview(offsets))))
            stage.close()

    def share(self) -> tuple[SharedBuffer, ColumnLayout]:
        kind, length = self._layout
        if kind not in _CODES:
            self._stage.write(bytes(-self.size % 8))
            self._stage.write(self._offsets)
        return self._stage.share(), ColumnLayout(kind or "pickle", length)

    def close(self) -> None:
        """Discard the elements unless they were shared. Idempotent."""
        self._stage.close()


def chunks(elements: Iterable[Any], written: Callable[[], int]) -> Iterator[list[Any]]:
    """The elements in lists of about `_PIECE` bytes; `written` returns the bytes written so far."""
    iterator, most = iter(elements), 1  # they may be large
    before = written()
    while chunk := list(islice(iterator, most)):
        yield chunk
        size, before = written() - before, written()
        most = max(1, min(_MOST, 4 * len(chunk), _PIECE * len(chunk) // max(size, 1)))


def bounds(
    layout: ColumnLayout, data: Data, offsets: memoryview | None = None
) -> tuple[memoryview, memoryview]:
    """Start and end of each element; for kinds of eight bytes, twice the elements themselves."""
    view = memoryview(data)
    code = _CODES.get(layout.kind)
    if code is not None:
        values: Any = view[TOKEN : TOKEN + 8 * layout.length].cast(code)  # type: ignore[call-overload]
        return values, values
    if offsets is None:
        offsets = view[len(view) - 8 * (layout.length + 1) :].cast("q")
    return offsets[:-1], offsets[1:]


def elements(kind: str, data: Data, starts: memoryview, ends: memoryview) -> Iterator[Any]:
    """The elements from `starts` to `ends`, which are the same slice of a column's bounds."""
    return chain.from_iterable(_pieces(kind, data, starts, ends))


def _pieces(kind: str, data: Data, starts: memoryview, ends: memoryview) -> Iterator[Iterable[Any]]:
    decode = DECODERS[kind]
    for i in range(0, len(starts), _READ):
        begins = starts[i : i + _READ].tolist()
        if decode is None:
            yield begins
            continue
        stops = ends[i : i + _READ].tolist()
        first, last = begins[0], stops[-1]
        if kind == "str" and 0 <= last - first <= _PIECE and begins[1:] == stops[:-1]:
            raw = data[first:last]
            if raw.isascii():  # decoded together: a third of the time
                text = raw.decode("ascii")
                yield [text[b - first : e - first] for b, e in zip(begins, stops, strict=True)]
                continue
        yield map(decode, map(data.__getitem__, map(slice, begins, stops)))


def as_text(raw: bytes) -> str:
    try:
        return raw.decode()  # 40 ns less than with arguments
    except UnicodeDecodeError:  # lone surrogates, as in the names of files that are not UTF-8
        return raw.decode("utf-8", "surrogatepass")


DECODERS: dict[str, Callable[[bytes], Any] | None] = {
    "int": None,
    "float": None,
    "str": as_text,
    "bytes": bytes,
    "pickle": pickle.loads,
}
"""Functions from the bytes of an element to the element; None for kinds of eight bytes."""


def _encode(kind: str, chunk: Sequence[Any]) -> tuple[Any, Iterable[int] | None]:
    if kind in _CODES:
        return array(_CODES[kind], chunk), None
    if kind == "str":
        together = "".join(chunk)
        if together.isascii():
            return together.encode("ascii"), map(len, chunk)
        parts = [text.encode("utf-8", "surrogatepass") for text in chunk]
    elif kind == "bytes":
        parts = list(chunk)
    else:
        parts = [_dumps(element) for element in chunk]
    return b"".join(parts), map(len, parts)


def _dumps(element: Any) -> bytes:
    try:
        return pickle.dumps(element, 5)
    except Exception:  # pickle's own errors are of many types
        import cloudpickle

        return cloudpickle.dumps(element, 5)  # type: ignore[no-any-return]
