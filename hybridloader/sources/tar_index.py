"""Index of one tar archive: samples by key, and the place of each of their members.

It is made in one pass over the headers, and may be kept in a file. Nothing here reads members.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridloader.errors import SourceError
from hybridloader.sources.store import Stamp, Store, write_whole

VERSION = 2
"""Version of a kept index."""

BLOCK = 512
"""Bytes of a header. Members are padded to a multiple of it."""

_FIRST = 256 << 10
"""Bytes of the first read of a remote archive, which shows the sizes of members."""

_LEAP = 512 << 10
"""Mean distance of headers, in bytes, above which each header is read separately: a request takes about
as long as half a MiB takes to arrive."""

_SMALL, _LARGE = 16 << 10, 8 << 20
"""Bytes of a read of one header, with the small members after it (a class, a text); and of a read if
headers are close to each other."""

_NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
"""Key and extension, as in webdataset: the name is cut at the first dot after the last slash. Names that
begin with a dot don't match, also within a folder."""

_META = re.compile(r"__[^/]*__($|/)")
"""Names of members that webdataset ignores too."""

_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"\x04\x22\x4d\x18": "lz4",
}

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TarIndex:
    """Samples of one archive, in the order of their first members.

    Attributes
    ----------
    stamp
        Size and mark of the archive that was indexed.
    keys
        Key of each sample.
    starts
        First member of each sample, and, last, the number of members.
    extensions
        All extensions of the archive.
    extension
        Number of the extension of each member.
    offset, size
        Place of the data of each member, in bytes; its header is the block in front of it.
    header
        Checksum of the header of each member.
    ignored
        Number of files that are no sample's: without an extension, or hidden.
    """

    stamp: Stamp
    keys: list[str]
    starts: Ints
    extensions: list[str]
    extension: Ints
    offset: Ints
    size: Ints
    header: Ints
    ignored: int


class Headers(io.RawIOBase):
    """A remote archive that is read from its beginning on by leaps: only the parts that are read."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        self._store, self._path, self._size = store, path, size
        # All the mutable state:
        self._at = self._reads = 0
        self._start, self._data = 0, b""  # the part that was fetched last

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
            members = self._reads / 3  # tarfile and the index read three times for each member
            ahead = _SMALL if start > members * _LEAP else _LARGE
            end = min(max(stop, start + (ahead if self._data else _FIRST)), self._size)
            self._data = self._store.remote_range(self._path, start, end)
            self._start = start
        self._at = stop
        return self._data[start - self._start : stop - self._start]


def header_sum(block: bytes | memoryview) -> int:
    """Return the checksum of a header, by which it is known again."""
    return zlib.crc32(block)


def name_parts(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member, in lower case; None if it is of no sample."""
    found = _NAME.fullmatch(name)
    if found is None or _META.match(name):
        return None
    return found[1], found[2].lower()


def make_index(name: str, file: Any, stamp: Stamp) -> TarIndex:
    """Index the archive `name`, which is open for reading from its beginning.

    Raises
    ------
    SourceError
        It is no tar archive, is compressed or cut short, or has members that can't be found by an
        offset, names that lead outside, or two members of one name.
    """
    start = file.read(6)
    for magic, method in _PACKED.items():
        if start.startswith(magic):
            raise SourceError(
                f"{name} is compressed by {method}, so its members can't be found by an offset: write "
                "it uncompressed (images, sound and video hardly get smaller). To read it from "
                "beginning to end, give a generator over it to Pipeline.from_iterable"
            )
    file.seek(0)
    members: dict[str, dict[str, tuple[int, int, int]]] = {}
    ignored = 0
    for member in _members(name, file):
        found = name_parts(member.name)
        if found is None:
            ignored += 1
            continue
        key, extension = found
        parts = members.setdefault(key, {})
        if extension in parts:
            raise SourceError(
                f"{name} has two members {key}.{extension}, so one would be lost; rename one"
            )
        file.seek(member.offset_data - BLOCK)
        header = header_sum(file.read(BLOCK))
        parts[extension] = member.offset_data, member.size, header
    extensions = sorted({extension for parts in members.values() for extension in parts})
    number = {extension: at for at, extension in enumerate(extensions)}
    rows = [
        (number[extension], *place)
        for parts in members.values()
        for extension, place in parts.items()
    ]
    columns = np.array(rows, np.int64).reshape(len(rows), 4).T.copy()
    starts = np.cumsum([0, *map(len, members.values())], dtype=np.int64)
    codes, offsets, sizes, headers = columns
    return TarIndex(stamp, [*members], starts, extensions, codes, offsets, sizes, headers, ignored)


def _members(name: str, file: Any) -> Iterator[tarfile.TarInfo]:
    """Yield the members that are regular files. Raises `SourceError` for members that would be lost."""
    last = "its beginning"
    try:
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  # the file is the caller's
        for member in archive:
            archive.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps all members
            last = f"member {member.name!r}"
            if member.issparse():
                raise SourceError(f"{name}, {last} is sparse; write the archive without --sparse")
            if member.islnk() or member.issym():
                raise SourceError(
                    f"{name}, {last} is a link to {member.linkname!r} and has no data; write the "
                    "archive with --dereference --hard-dereference"
                )
            if member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
                raise SourceError(
                    f"{name}, {last}: its name leads out of the archive; write it without "
                    "'..' and a leading slash"
                )
            if member.isreg():
                yield member
        end = archive.offset
    except (tarfile.TarError, EOFError) as error:
        raise SourceError(
            f"{name} is not a tar archive, or it is damaged or truncated after {last}: {error}"
        ) from error
    file.seek(end)
    # tarfile reads a damaged header, and the end of the file, as the end of the archive.
    if file.read(BLOCK) != bytes(BLOCK):
        raise SourceError(
            f"{name} is damaged or truncated after {last}: there is neither a header nor the end of an "
            f"archive at byte {end}"
        )
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            raise SourceError(
                f"{name} has more data after the end of the archive, at byte {end}: cat joined "
                "archives; use tar --concatenate, or several files"
            )


def save_index(path: str, index: TarIndex) -> None:
    """Write an index to a local file, at once or not at all."""
    write_whole(path, packed_index(index))


def packed_index(index: TarIndex) -> memoryview:
    """Return the contents of the file of an index."""
    about = {
        "version": VERSION,
        "stamp": index.stamp,
        "extensions": index.extensions,
        "ignored": index.ignored,
    }
    keys = "\0".join(index.keys).encode("utf-8", "surrogateescape")
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    packed = io.BytesIO()
    np.savez(
        packed,
        about=np.frombuffer(json.dumps(about).encode(), np.uint8),
        keys=np.frombuffer(keys, np.uint8),
        **arrays,
    )
    return packed.getbuffer()


_ARRAYS = ("starts", "extension", "offset", "size", "header")


def load_index(path: str | io.BytesIO, stamp: Stamp) -> TarIndex | None:
    """Read a kept index from its file or its contents; None if there is none with this stamp."""
    try:
        with np.load(path, allow_pickle=False) as held:
            about = json.loads(held["about"].tobytes())
            if about["version"] != VERSION or Stamp(*about["stamp"]) != stamp:
                return None
            arrays = {name: held[name] for name in _ARRAYS}
            text = held["keys"].tobytes().decode("utf-8", "surrogateescape")
            keys = text.split("\0") if len(arrays["starts"]) > 1 else []
            index = TarIndex(
                stamp, keys, extensions=about["extensions"], ignored=about["ignored"], **arrays
            )
            return index if _agrees(index) else None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None


def _agrees(index: TarIndex) -> bool:
    """True if the arrays of an index agree with each other, and with the size of the archive."""
    starts, size = index.starts, index.stamp.size
    members = len(index.offset)
    columns = [getattr(index, name) for name in _ARRAYS]
    return (
        all(column.ndim == 1 and column.dtype == np.int64 for column in columns)
        and all(len(column) == members for column in columns[1:])
        and len(starts) == len(index.keys) + 1
        and (starts[0], starts[-1]) == (0, members)
        and bool((np.diff(starts) > 0).all())
        and bool(((index.extension >= 0) & (index.extension < len(index.extensions))).all())
        and bool(((index.offset >= BLOCK) & (index.size >= 0)).all())
        and (size < 0 or bool((index.offset + index.size <= size).all()))
    )
