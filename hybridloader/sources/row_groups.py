"""Row groups of Parquet files in one process: read, decoded, and kept within a bound.

Threads share them: a row group that several want is decoded once.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import accumulate
from operator import and_
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from hybridloader._support.text import warn_once
from hybridloader.errors import SourceError
from hybridloader.sources.columns import Columns, parquet_module, pyarrow_modules
from hybridloader.sources.store import GAP, Stamp, Store


class OpenParquet(NamedTuple):
    """A file that is open, and closed at the end of a ``with`` block."""

    number: int
    """Number of the file in the table."""
    source: Any
    """Pyarrow file."""
    fragment: Any
    """Fragment of pyarrow.dataset, with its metadata."""
    remote: _RemoteFile | None
    """The remote file that `source` reads, if it is remote."""

    def __enter__(self) -> OpenParquet:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()


class Ranges(NamedTuple):
    """Parts of a file that are fetched together, and where each lies in the bytes of all."""

    starts: list[int]
    stops: list[int]
    places: list[int]


class ParquetFile(NamedTuple):
    """A file that was indexed."""

    store: Store
    path: str
    stamp: Stamp
    folders: Mapping[str, Any] = MappingProxyType({})
    """Columns in the names of its folders: pyarrow scalars by name."""
    number: int = 0
    """Number of the file in the table: files of two archives may have the same path."""

    @property
    def name(self) -> str:
        return self.store.name(self.path)

    def open(self, what: str = "") -> OpenParquet:
        """Open the file; `what` of it is named in errors."""
        # Not through a file system of pyarrow: that closes files late, on its threads, and reports
        # every failure of fsspec as a missing file.
        pyarrow, dataset = pyarrow_modules()
        source = remote = None
        try:
            if self.store.is_local:
                source = pyarrow.OSFile(self.path)
            else:
                remote = _RemoteFile(self)
                source = pyarrow.PythonFile(remote, mode="r")
            fields = (
                dataset.field(name) == value if value.is_valid else dataset.field(name).is_null()
                for name, value in self.folders.items()
            )
            condition = reduce(and_, fields) if self.folders else None
            fragment = dataset.ParquetFileFormat().make_fragment(
                source, partition_expression=condition
            )
            fragment.ensure_complete_metadata()
        except Exception as error:
            if source is not None:
                source.close()
            self.raise_named(error, what)
        return OpenParquet(self.number, source, fragment, remote)

    def schema(self, fragment: Any) -> Any:
        """Return the schema that a filter may name: that of the file, and the columns of its folders."""
        pyarrow, _ = pyarrow_modules()
        schema = fragment.physical_schema
        for name, value in self.folders.items():
            if name not in schema.names:
                schema = schema.append(pyarrow.field(name, value.type))
        return schema

    def raise_named(self, error: Exception, what: str = "") -> NoReturn:
        """Raise `error`, or a hybridloader error in its place, that names the file and `what` of it."""
        pyarrow, _ = pyarrow_modules()
        # pyarrow reports bad data by its classes, or by an OSError without errno.
        bad = isinstance(error, pyarrow.ArrowException)
        if bad or (type(error) is OSError and error.errno is None):
            where = f"{self.name}{what and ', '}{what}"
            raise SourceError(
                f"{where} is not a Parquet file, or it is damaged or truncated: {error}"
            ) from error
        self.store.raise_named(error, self.path, what)


class _RemoteFile:
    """A remote file for pyarrow, which asks for each range once, and not beyond the end.

    One thread at a time reads it: pyarrow has a lock around it.
    """

    closed = False

    def __init__(self, file: ParquetFile) -> None:
        self._file, self._size = file, file.stamp.size
        if self._size < 0:
            raise SourceError(
                f"{file.name} can't be read by ranges, as its store reports no size; copy it to a "
                "store that does"
            )
        # All the mutable state:
        self._at = 0
        self.fetched: tuple[Ranges, Any] | None = None  # parts that are fetched already

    def read(self, size: int) -> bytes:
        start, stop = self._at, min(self._at + size, self._size)
        self._at = max(start, stop)
        if stop <= start:
            return b""
        if self.fetched is not None:
            ranges, data = self.fetched
            part = bisect_right(ranges.starts, start) - 1
            if part >= 0 and stop <= ranges.stops[part]:
                at = ranges.places[part] + start - ranges.starts[part]
                return bytes(data[at : at + stop - start])
        try:
            return self._file.store.remote_range(self._file.path, start, stop)
        except OSError as error:
            if error.errno is None:  # pyarrow would report an error without errno as bad data
                error.errno = errno.EIO
            raise

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True


_LATELY, _OFTEN = 8, 16
"""Row groups dropped last that are remembered, as many as the default window of a `BlockShuffleSampler`;
and how often one of these is decoded again before a warning."""

_OPEN = 32
"""Files that stay open in a process while unused; each holds its decoded metadata."""


class RowGroups:
    """Row groups of one process, the last ones used, up to `limit` bytes and at least one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        # All the mutable state:
        self._idle: list[OpenParquet] = []  # unused files, the most recently used one last
        self._closed = False
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._bytes = self._largest = 0  # of all row groups, and of the largest one so far
        self._dropped: deque[tuple[int, int]] = deque(maxlen=_LATELY)
        self._ranges: dict[int, list[Ranges]] = {}  # of the row groups of each file
        self._ranges_lock = threading.Lock()
        self._again = 0  # number of times that a dropped row group was decoded again

    def get(
        self,
        file: ParquetFile,
        group: int,
        columns: Sequence[str],
        condition: Any,
        rows: int,
        *,
        wait: bool = True,
        fetched: Callable[[], Any] | None = None,
    ) -> Columns | None:
        """Return the row group of number `group` in its file.

        None if another thread decodes it, and this one shall not `wait`. `fetched` returns the bytes of
        its `ranges`, if these are there, or None. Raises `SourceError` if it has
        not the `rows` rows that were counted.
        """
        key = file.number, group
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
        if entry.columns is not None:
            return entry.columns
        if not entry.lock.acquire(blocking=wait):
            return None
        try:
            if entry.columns is None:
                data = None if fetched is None else fetched()
                found = self._read(file, group, columns, condition, data)
                if len(found) != rows:
                    raise SourceError(
                        f"{file.name}, row group {group} has {len(found)} rows, and had {rows} when it "
                        "was indexed; make the Parquet source again"
                    )
                entry.columns = found
                self._keep(key, found.nbytes)
            return entry.columns
        finally:
            entry.lock.release()

    @property
    def has_room(self) -> bool:
        """True if another row group, as large as the largest so far, would drop none."""
        return self._bytes + self._largest <= self._limit

    def _keep(self, key: tuple[int, int], size: int) -> None:
        with self._lock:
            if key not in self._entries:  # closed in the meantime
                return
            self._bytes += size
            self._largest = max(self._largest, size)
            self._again += key in self._dropped
            for old in [*self._entries]:
                if self._bytes <= self._limit:
                    break
                if old != key and (columns := self._entries[old].columns) is not None:
                    del self._entries[old]
                    self._bytes -= columns.nbytes
                    self._dropped.append(old)
            held, often = len(self._entries), self._again == _OFTEN
        if often:
            warn_once(
                "Parquet: row groups are decoded repeatedly, as "
                f"memory_cache_bytes={self._limit} holds only {held} of about {size / 2**20:.1f} MB "
                "each; raise memory_cache_bytes= to hold the row groups in use at a time (the "
                "window_blocks of a BlockShuffleSampler), or lower window_blocks",
                "decoded-again",
            )

    def ranges(self, file: ParquetFile, group: int, columns: Sequence[str]) -> Ranges:
        """Return the parts of a file that have these columns of a row group."""
        with self._ranges_lock:  # otherwise each thread would open the file
            found = self._ranges.get(file.number)
            if found is None:
                with self._opened(file, f"row group {group}") as opened:
                    metadata = opened.fragment.metadata
                found = [
                    _ranges_of(metadata.row_group(number), columns)
                    for number in range(metadata.num_row_groups)
                ]
                self._ranges[file.number] = found
        return found[group]

    def _read(
        self, file: ParquetFile, group: int, columns: Sequence[str], condition: Any, data: Any
    ) -> Columns:
        what = f"row group {group}"
        ranges = None if data is None else self.ranges(file, group, columns)
        with self._opened(file, what) as (_, source, fragment, remote):
            try:
                if remote is not None:
                    remote.fetched = None if ranges is None else (ranges, data)
                names = [name for name in columns if name not in file.folders]
                # On this thread only: there are many workers, and some are forked.
                if condition is None:  # in 0.6 of the time of a scan, which reads on other threads
                    parquet = parquet_module().ParquetFile(source, metadata=fragment.metadata)
                    table = parquet.read_row_group(group, names, use_threads=False).select(names)
                else:
                    table = fragment.subset(row_group_ids=[group]).to_table(
                        columns=names,
                        filter=condition,
                        schema=file.schema(fragment),
                        use_threads=False,
                    )
                table = _with_folders(table, file, columns) if file.folders else table
            except Exception as error:
                file.raise_named(error, what)
            finally:
                if remote is not None:
                    remote.fetched = None
        return Columns(table, f"{file.name}, {what}")

    @contextmanager
    def _opened(self, file: ParquetFile, what: str) -> Iterator[OpenParquet]:
        """Open a file that has not changed. It stays open for the next reader.

        pyarrow reads an open file for one thread at a time, so each reader opens the file.
        """
        with self._lock:
            at = [one.number for one in self._idle][::-1]
            kept = self._idle.pop(-1 - at.index(file.number)) if file.number in at else None
        if kept is None or file.store.is_local:  # checking a remote file takes a request
            self._check_unchanged(file)
        opened = kept or file.open(what)
        try:
            yield opened
        except BaseException:
            opened.source.close()
            raise
        with self._lock:
            self._idle.append(opened)
            more = len(self._idle) - (0 if self._closed else _OPEN)
            surplus = [self._idle.pop(0) for _ in range(more)]
        for one in surplus:
            one.source.close()

    @staticmethod
    def _check_unchanged(file: ParquetFile) -> None:
        found = file.store.stamp(file.path, refresh=True)
        if found != file.stamp:
            raise SourceError(
                f"{file.name} has changed since it was indexed: it had {file.stamp.size} bytes "
                f"({file.stamp.mark}), and has {found.size} ({found.mark}); make the Parquet source "
                "again"
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._bytes = 0
            idle, self._idle = self._idle, []
        for one in idle:
            one.source.close()


def _ranges_of(row_group: Any, columns: Sequence[str]) -> Ranges:
    """Return the parts that have the column chunks of a row group; those close together are one."""
    chunks = []
    for number in range(row_group.num_columns):
        chunk = row_group.column(number)
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            first = chunk.dictionary_page_offset or chunk.data_page_offset
            start = min(first, chunk.data_page_offset)
            chunks.append((start, start + chunk.total_compressed_size))
    starts: list[int] = []
    stops: list[int] = []
    for start, stop in sorted(chunks):
        if starts and start - stops[-1] <= GAP:
            stops[-1] = max(stop, stops[-1])
        else:
            starts.append(start)
            stops.append(stop)
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    return Ranges(starts, stops, [0, *accumulate(sizes)])


def _with_folders(table: Any, file: ParquetFile, columns: Sequence[str]) -> Any:
    """Return `table` with the columns that the folders name, in the order of `columns`."""
    pyarrow, _ = pyarrow_modules()
    rows = len(table)
    arrays = [
        pyarrow.repeat(file.folders[name], rows) if name in file.folders else table.column(name)
        for name in columns
    ]
    return pyarrow.table(dict(zip(columns, arrays, strict=True)))


class _Entry:
    """A row group, or the place where it will be."""

    __slots__ = ("columns", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.columns: Columns | None = None
