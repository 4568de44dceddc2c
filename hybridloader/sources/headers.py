"""`open_headers`: an archive opened for reading its headers, of a remote one only these where it can.

A read from a store costs a request, about as long as half a MiB takes to arrive. So headers that lie
farther apart than that are read one by one, and others together with the bytes between them.
"""

from __future__ import annotations

import io
import os
from typing import Any

from hybridloader.sources.store import Stamp, Store

_LEAP = 512 << 10
"""Mean distance of headers, in bytes, above which each header is read separately."""

_FIRST = 256 << 10
"""Bytes of the first read, which shows the sizes of members."""

_SMALL = 16 << 10
"""Bytes of a read of one header: the small members after it (a class, a text) are read with it."""

_LARGE = 8 << 20
"""Bytes of a read if headers are close to each other."""


def open_headers(store: Store, path: str, stamp: Stamp) -> Any:
    """Open an archive, as a file that is read from its beginning on by leaps."""
    if store.is_local or stamp.size < 0:
        return store.open(path)
    return _Ranges(store, path, stamp.size)


class _Ranges(io.RawIOBase):
    """A remote file of which only those parts are fetched that are read, one at a time."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        self._store, self._path, self._size = store, path, size
        # All the mutable state:
        self._at = 0
        self._start, self._data = 0, b""  # the part that was fetched last
        self._reads = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        self._reads += 1
        start = self._at
        stop = self._size if size < 0 else min(start + size, self._size)
        if stop <= start:
            return b""
        if not self._start <= start <= stop <= self._start + len(self._data):
            self._fetch(start, stop)
        self._at = stop
        return self._data[start - self._start : stop - self._start]

    def _fetch(self, start: int, stop: int) -> None:
        members = self._reads / 3  # tarfile and the index read three times for each member
        if not self._data:
            ahead = _FIRST
        elif start > members * _LEAP:
            ahead = _SMALL
        else:
            ahead = _LARGE
        end = min(max(stop, start + ahead), self._size)
        self._data = self._store.remote_range(self._path, start, end)
        self._start = start
