"""`BlockCache`: blocks of remote sources in a local folder, which all processes of a machine share.

Each block is a file, written under a lock and renamed when it is whole; its last bytes are a checksum of
the others. Who uses a block holds a shared lock on its file, so that another process which makes room
leaves it. Locks are the kernel's: those of a process that was killed are gone with it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hybridloader._support import system
from hybridloader._support.text import warn_once

fcntl = system.module("fcntl")  # None on Windows, which can't remove an open file either

_LOCKS = 256
"""Lock files for blocks that are being fetched; blocks whose names end alike share one."""

_TRAILER = 12
"""Bytes after the data: the length, and a checksum of the data and the length."""

_SPARE = 0.05
"""Share of the limit that is freed at a time. The folder is listed again after as many bytes."""

_PRIVATE = "hybridloader-blocks-"
"""Prefix of the names of folders that are removed when their process ends."""


class BlockCache:
    """Blocks in a folder.

    Parameters
    ----------
    folder
        It is made if it is not there. Several sources and several jobs may share it.
    limit
        Bytes of all files in it, those of other jobs included. The files used longest ago are
        removed first; a file that a process uses stays. If there is no room for a block, it is not kept.

    Attributes
    ----------
    private
        True if it lasts only as long as the process that made it.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.private = False
        self._lock = threading.Lock()
        # All the mutable state:
        self._room = 0.0  # bytes that may be written until the folder is listed again

    def __reduce__(self) -> Any:
        return BlockCache, (self.folder, self.limit)

    def get(
        self, key: str, fetch: Callable[[], Any], fetched: Callable[[Any], object] | None = None
    ) -> Any:
        """Return the bytes of a block, by `fetch` if no process has put it here yet.

        Of several that ask for it at a time one fetches it, and the others wait.

        Parameters
        ----------
        fetched
            Called with the result of `fetch` before it is written: a disk may be slow.
        """
        name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        path = os.path.join(self.folder, f"{name}.block")
        found = self._open(path)
        if found is None:
            try:
                os.makedirs(self.folder, exist_ok=True)
                lock = _locked(os.path.join(self.folder, f"{int(name[:8], 16) % _LOCKS:03d}.lock"))
            except OSError as error:
                self._warn(error)
                return fetch()
            with lock:
                found = self._open(path)
                if found is None:
                    data = fetch()
                    if fetched is not None:
                        fetched(data)
                        self._write(path, data)
                        return data
                    # Map the written file, so that the block takes no private memory.
                    found = self._open(path, check=False) if self._write(path, data) else None
                    return data if found is None else found
        return found

    def _open(self, path: str, *, check: bool = True) -> Any:
        """Return the data of a file if it is whole. It is in use as long as these are."""
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_SH)
            held = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            data = memoryview(held)[:-_TRAILER]
            if check and held[-_TRAILER:] != _trailer(data):
                data.release()
                held.close()
                return None
            with suppress(OSError):
                os.utime(path)
        except (OSError, ValueError):  # ValueError: the file is empty
            return None
        finally:
            os.close(fd)  # the map keeps a duplicate of it, and with it the lock
        return data

    def _write(self, path: str, data: Any) -> bool:
        part = f"{path[: -len('.block')]}.part"  # one left by a killed process is overwritten
        try:
            if not self._make_room(len(data) + _TRAILER):
                return False
            with open(part, "wb") as file:
                file.write(data)
                file.write(_trailer(data))
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            self._warn(error)
            return False
        return True

    def _make_room(self, size: int) -> bool:
        """Make room by removing the files used longest ago. Return False if there is none."""
        with self._lock:
            if size <= self._room:
                self._room -= size
                return True
        with _locked(os.path.join(self.folder, "room.lock")):
            files = []
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.name.endswith((".block", ".part")):
                            stat = entry.stat()
                            files.append((stat.st_mtime_ns, stat.st_size, entry.path))
            total = sum(size for _, size, _ in files) + size
            target = self.limit if total <= self.limit else self.limit * (1 - _SPARE)
            for _, bytes_of, path in sorted(files):
                if total <= target:
                    break
                if path.endswith(".block") and _removed(path):
                    total -= bytes_of
        with self._lock:
            self._room = max(0.0, min(self.limit * _SPARE, self.limit - total))
        return total <= self.limit

    def _warn(self, error: OSError) -> None:
        warn_once(
            f"blocks are not kept in {self.folder}: {type(error).__name__}: {error.strerror}; set "
            "cache_dir= to a folder that is writable and has room for cache_bytes=",
            "blocks-not-kept",
        )


def private_cache(limit: int) -> BlockCache:
    """Return a cache that is removed with this object, or by the next process if this one is killed."""
    base = os.path.join(system.ROOT, "dev/shm")
    if not os.access(base, os.W_OK) or shutil.disk_usage(base).free < 2 * limit:
        base = tempfile.gettempdir()
    for name in os.listdir(base):
        if name.startswith(_PRIVATE):
            with suppress(OSError):
                _remove_abandoned(os.path.join(base, name))
    folder = tempfile.mkdtemp(prefix=f"{_PRIVATE}", dir=base)
    owner = _locked(os.path.join(folder, "owner"))
    owner.__enter__()
    cache = BlockCache(folder, limit)
    cache.private = True
    weakref.finalize(cache, _remove, folder, owner, os.getpid())
    return cache


def _remove(folder: str, owner: _locked, process: int) -> None:
    if os.getpid() == process:  # not in a fork of the process
        shutil.rmtree(folder, ignore_errors=True)
    owner.__exit__()


def _remove_abandoned(folder: str) -> None:
    """Remove a folder whose owner does not live."""
    if fcntl is None:
        return
    fd = os.open(os.path.join(folder, "owner"), os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)


def _trailer(data: Any) -> bytes:
    length = len(data).to_bytes(8, "little")
    return length + zlib.crc32(length, zlib.crc32(data)).to_bytes(4, "little")


def _removed(path: str) -> bool:
    """Remove a file unless some process uses it."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


class _locked:
    """Lock of a file, against threads and processes. It is gone with the process."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def __enter__(self) -> None:
        if fcntl is not None:
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: Any) -> None:
        os.close(self._fd)
