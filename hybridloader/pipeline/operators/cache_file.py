"""File of a cache: the items of one epoch are written, and read back.

::

    head      magic, version

    records   digest of the rest | size of the pickle, number of buffers, their sizes | pickle, buffers

    index     the fingerprint (utf-8), and where each record begins

    tail      where the index begins, size of the fingerprint | digest of these and the index | magic

Numbers are in the machine's own order. Buffers begin at multiples of 64, so that arrays over them are
aligned. As the index has the beginnings of records, damage to one spoils no other. A file is written
under a temporary name beside its own and renamed when it is whole, so a reader never sees half of one;
it is not synced, because the digests find data that a power failure has cut off.

Digests find damage, not malice: unpickling runs code. So a file is written for this user alone, and one
that is somebody else's, or that others can write to, is not read.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
import struct
import tempfile
import weakref
from array import array
from contextlib import suppress
from typing import Any

from hybridloader._support import system
from hybridloader._support.error_handling import add_note
from hybridloader.errors import CacheError
from hybridloader.memory.packing import pack, unpack

_MAGIC = b"HLcache\n"
_END = b"HLwhole\n"
_VERSION = 3
_HEAD = struct.Struct("=8sI")
_SIZES = struct.Struct("=QQ")
_TAIL = struct.Struct("=QQ16s8s")
_DIGEST = 16
_ALIGNED = 64

_DIGESTS = re.compile(" #[0-9a-f]{10}")
"""Digest, in a fingerprint, of the values that a step was given."""

_BLOCK = 64 * 1024
"""Bytes that are gathered before they are written; a piece as large is not copied."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_HOW = os.O_RDONLY | system.BINARY | system.NO_WAITING


def _digest(first: Any, *pieces: Any) -> bytes:
    made = hashlib.blake2b(first, digest_size=_DIGEST)
    for piece in pieces:
        made.update(piece)
    return made.digest()


def _who_else(found: os.stat_result) -> str | None:
    """Name who besides this user and root may have written a file; None if no one, or if it is not
    known."""
    if not system.OWNERS:  # what a user's folder lets others do is inherited
        return None
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, and this process is of user {os.geteuid()}"
    if found.st_mode & _OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


class Writer:
    """A file that is being written. If it is let go without `commit`, nothing was written.

    Any method may raise `OSError`: for example, there is no room, or the file system gives files to
    others. Call `discard` then.
    """

    def __init__(self, path: str, fingerprint: str) -> None:
        folder, name = os.path.split(path)
        # 0600, as mkstemp has it: a pickle that others can write to is theirs to run.
        fd, temporary = tempfile.mkstemp(".partial", f".{name}.", folder or os.curdir)
        self._path, self._fingerprint = path, fingerprint
        self._temporary, self._fd = temporary, fd
        self._finalizer = weakref.finalize(self, _remove, fd, temporary, os.getpid())
        # All the mutable state, besides the file. The block is our own and no BufferedWriter's, which
        # in a fork of this process would write what it holds once more.
        self._block = bytearray()
        self._position = 0
        self._starts = array("Q")
        try:
            somebody = _who_else(os.fstat(fd))  # NFS with root_squash, vfat
            if somebody is not None:
                raise OSError(f"here it could not be read again: {somebody}")
            self._put(_HEAD.pack(_MAGIC, _VERSION))
        except BaseException:
            self.discard()
            raise

    def add(self, item: Any) -> None:
        """Write one more record; writes nothing if the item raises `ResultPicklingError`."""
        header, buffers = pack(item)
        sizes = _SIZES.pack(len(header), len(buffers))
        if buffers:
            sizes += array("Q", [buffer.nbytes for buffer in buffers]).tobytes()
        pieces: list[Any] = [sizes, header]
        place = self._position + _DIGEST + len(sizes) + len(header)
        for buffer in buffers:
            gap = -place % _ALIGNED
            pieces += bytes(gap), buffer
            place += gap + buffer.nbytes
        self._starts.append(self._position)
        self._put(_digest(*pieces), *pieces)

    def commit(self) -> None:
        """Give the whole file its name."""
        description = self._fingerprint.encode()
        numbers = struct.pack("=QQ", self._position, len(description))
        digest = _digest(description, self._starts, numbers)
        self._put(description, self._starts.tobytes(), numbers, digest, _END)
        self._flush()
        self._finalizer.detach()
        try:
            os.close(self._fd)
            os.replace(self._temporary, self._path)
        except BaseException:
            os.unlink(self._temporary)
            raise

    def discard(self) -> None:
        """Remove the file. Idempotent."""
        self._finalizer()

    def _put(self, *pieces: Any) -> None:
        for piece in pieces:
            self._position += len(piece)
            if len(piece) < _BLOCK:
                self._block += piece
            else:
                self._flush()
                _write(self._fd, piece)
        if len(self._block) >= _BLOCK:
            self._flush()

    def _flush(self) -> None:
        block, self._block = self._block, bytearray()
        _write(self._fd, block)


def _write(fd: int, piece: Any) -> None:
    with memoryview(piece) as view:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done:])


def _remove(fd: int, path: str, owner: int) -> None:
    if os.getpid() != owner:  # in a fork of the owner the file is somebody else's
        return
    try:
        os.close(fd)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


class Reader:
    """A whole file, record by record.

    It is mapped copy-on-write: arrays lie over the mapping, can be written to, and keep it for as long
    as they live; changes of them never reach the file. `CacheError` is raised if it is damaged, was
    written by another pipeline, or may have been by somebody else.
    """

    def __init__(self, path: str, fingerprint: str) -> None:
        self.path = path
        with open(path, "rb", opener=lambda name, _: os.open(name, _HOW)) as file:
            self._check_owner(os.fstat(file.fileno()))
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CacheError(
                    f"{path!r} is not a cache file; pass another path, or delete it if it is not needed"
                )
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._view = memoryview(self._map)
        try:
            self._starts = self._read_index(fingerprint)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, number: int) -> Any:
        """Return the item of record `number`, counted from 0."""
        start, end = self._starts[number], self._starts[number + 1]
        view, place = self._view, start + _DIGEST
        if _digest(view[place:end]) != self._map[start:place]:
            raise self._damaged(f"record {number} of {len(self)} is not as it was written")
        header, count = _SIZES.unpack_from(view, place)
        place += _SIZES.size
        sizes = struct.unpack_from(f"={count}Q", view, place) if count else ()
        place += 8 * count
        pickled, buffers = view[place : place + header], []
        place += header
        for size in sizes:
            place += -place % _ALIGNED
            buffers.append(view[place : place + size])
            place += size
        try:
            return unpack(pickled, buffers)
        except Exception as error:
            add_note(error, f"while record {number} of the cache file {self.path!r} was loaded")
            raise

    def close(self) -> None:
        """Let go of the file; arrays that are still in use keep the mapping. Idempotent."""
        self._view = memoryview(b"")
        try:
            self._map.close()
        except BufferError:
            pass

    def _check_owner(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise CacheError(f"{self.path!r} is no file; give another path")
        somebody = _who_else(found)
        if somebody is not None:
            raise CacheError(
                f"the cache file {self.path!r} is not read, because {somebody}, and reading a cache "
                "runs code from it; delete it to have it written again, or, if you trust it, make it "
                "yours alone (chown, chmod 600)"
            )

    def _read_index(self, fingerprint: str) -> array[int]:
        """Return the beginnings of the records, and the end of the last one."""
        view, size = self._view, len(self._view)
        if size < _HEAD.size + _TAIL.size:
            raise self._damaged(f"it is cut off, at {size} bytes")
        _, version = _HEAD.unpack_from(view)
        if version != _VERSION:
            raise CacheError(
                f"the cache file {self.path!r} is of format {version}, and this release reads format "
                f"{_VERSION}; delete it to have it written again"
            )
        place, length, digest, magic = _TAIL.unpack_from(view, size - _TAIL.size)
        if magic != _END:
            raise self._damaged(f"it is cut off, at {size} bytes, or its end was changed")
        if _digest(view[place : size - _DIGEST - len(_END)]) != digest:
            raise self._damaged("its index is not as it was written")
        before = bytes(view[place : place + length]).decode()
        if before != fingerprint:
            alike = _DIGESTS.sub("", before) == _DIGESTS.sub("", fingerprint)
            why = "Digests after # stand for the reprs of arguments and data. " * alike
            raise CacheError(
                f"the cache file {self.path!r} was written by another pipeline, {before!r}, and this "
                f"one is {fingerprint!r}. {why}Delete it, or give another path"
            )
        starts = array("Q", bytes(view[place + length : size - _TAIL.size]))
        starts.append(place)
        return starts

    def _damaged(self, what: str) -> CacheError:
        return CacheError(
            f"the cache file {self.path!r} is damaged: {what}; delete it to have it written again"
        )
