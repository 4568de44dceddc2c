"""`Parquet`: a dataset of the rows of Parquet files, read a row group at a time."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from hybridloader._support.text import flag, warn_once, whole
from hybridloader.errors import SourceError
from hybridloader.sources.files import Urls, list_files
from hybridloader.sources.per_worker import PerWorker
from hybridloader.sources.shards import AHEAD, Fetched, Shards
from hybridloader.sources.shards import CACHE as DISK
from hybridloader.sources.store import (
    RETRY,
    Ranges,
    RemoteFile,
    Stamp,
    Store,
    check_unchanged,
    each,
)

Ints = npt.NDArray[np.int64]
Names = tuple[str, ...]


class Columns:
    """Decoded columns of one row group. Threads share them."""

    def __init__(self, table: Any, where: str) -> None:
        self._where, self._rows, self._lock = where, len(table), threading.RLock()
        # All the mutable state:
        self.table = table.combine_chunks()  # without the columns that `matrix` has taken out of it
        self.nbytes = int(self.table.nbytes)  # of all columns
        self._arrays: dict[str, npt.NDArray[Any] | None] = {}
        self._matrices: dict[Names, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._rows

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """Return a column as numbers, without a copy but of booleans; None if it is of other things.

        Lists of a fixed size are rows of a matrix. Raises `SourceError` for numbers with nulls.
        """
        if name not in self._arrays:
            with self._lock:
                if name not in self._arrays:
                    self._arrays[name] = self._made(name)
        return self._arrays[name]

    def matrix(self, names: Names) -> npt.NDArray[Any]:
        """Return several columns of numbers of one dtype side by side: a row of each sample.

        It takes their place here, so that they are in memory once.
        """
        if names not in self._matrices:
            with self._lock:
                if names not in self._matrices:
                    matrix = _side_by_side([self.array(name) for name in names])
                    # Other threads may be reading: replace the arrays before the matrix appears.
                    self._arrays.update((name, matrix[:, at]) for at, name in enumerate(names))
                    self._matrices[names] = matrix
                    self.table = self.table.drop_columns(list(names))
        return self._matrices[names]

    def _made(self, name: str) -> npt.NDArray[Any] | None:
        import pyarrow
        from pyarrow import types

        column = self.table.column(name)
        kind, widths = column.type, []
        while types.is_fixed_size_list(kind):
            widths.append(kind.list_size)
            kind = kind.value_type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            return None
        count = len(column)
        values = column.chunk(0) if column.num_chunks else pyarrow.array([], column.type)
        for _ in widths:
            self._check(values, name)
            values = values.flatten()
        if not types.is_floating(kind):  # a null of a float column is a NaN
            self._check(values, name)
        array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
        return array.reshape(count, *widths)

    def _check(self, values: Any, name: str) -> None:
        if values.null_count:
            raise SourceError(
                f"{self._where}, column {name} has {values.null_count} nulls, which a tensor of numbers "
                "can't hold; exclude these rows by filter=, omit the column from columns=, or read rows"
            )


_AT_ONCE = 8192
"""Rows that are transposed at a time: 19 columns of them fit into the second-level cache of a core. Each
part releases the GIL twice: parts of 1,024 rows take as long on one thread, and 1.3 times as long on
two."""


def _side_by_side(columns: list[Any]) -> npt.NDArray[Any]:
    """Return columns as a matrix with a row of each sample; a quarter of the time of one transpose."""
    rows = len(columns[0])
    matrix = np.empty((rows, len(columns)), columns[0].dtype)
    for start in range(0, rows, _AT_ONCE):
        stop = start + _AT_ONCE
        matrix[start:stop] = np.array([column[start:stop] for column in columns]).T
    return matrix


class Part(NamedTuple):
    """Rows of one row group."""

    columns: Columns
    rows: Any  # array of row numbers; a slice for consecutive samples
    at: slice  # position of these samples among those of all parts


class Selection(NamedTuple):
    """Samples of a batch."""

    parts: Sequence[Part]  # samples of the same row group, one group after the other
    order: Ints | None
    """Position among the parts of each sample of the batch; None: the parts are in order."""
    size: int  # number of samples

    def rows(self) -> list[dict[str, Any]]:
        """Return the samples as dicts of Python's objects."""
        return self._listed(_rows_of(one.columns.table, one.rows) for one in self.parts)

    def tensors(self, names: Sequence[str]) -> dict[str, Any]:
        """Return these columns of the batch: tensors of numbers, and lists of Python's objects."""
        batch: dict[str, Any] = dict.fromkeys(names)
        alike: dict[Any, list[str]] = {}
        first = self.parts[0]
        for name in names:
            array = first.columns.array(name)
            if array is None:
                batch[name] = self._listed(
                    _rows_of(one.columns.table.column(name), one.rows) for one in self.parts
                )
            elif array.ndim > 1:
                batch[name] = self._tensor(name, array)
            else:
                alike.setdefault(array.dtype, []).append(name)
        for dtype, several in alike.items():
            batch.update(zip(several, self._unbound(tuple(several), dtype), strict=True))
        return batch

    def _listed(self, parts: Iterator[list[Any]]) -> list[Any]:
        found = list(chain.from_iterable(parts))
        return found if self.order is None else [found[place] for place in self.order.tolist()]

    def _tensor(self, name: str, first: npt.NDArray[Any]) -> Any:
        """Return a column of arrays; `first` is that of the first part."""
        tensor = _empty((self.size, *first.shape[1:]), first.dtype)
        target = tensor.numpy()
        if self.order is None:
            for columns, rows, at in self.parts:
                array: Any = columns.array(name)
                target[at] = array[rows]
        else:
            arrays = [one.columns.array(name) for one in self.parts]
            # An assignment by index takes twice as long as two takes into the target.
            self._gathered(arrays).take(self.order, axis=0, out=target, mode="clip")
        return tensor

    def _unbound(self, names: tuple[str, ...], dtype: npt.DTypeLike) -> Sequence[Any]:
        """Return columns of one dtype, each with separate memory.

        Few calls let the GIL go: two threads would take turns at each. 19 columns of 4,096 samples from
        8 row groups take 0.22 ms this way and 0.55 one by one, on two threads at once 0.27 and 0.9.
        """
        import torch

        from hybridloader.fetching.collate import slot_for

        if self.order is None:
            matrix, axis = torch.from_numpy(self._copied(names, dtype)), 0
        else:
            matrices = [one.columns.matrix(names) for one in self.parts]
            matrix, axis = torch.from_numpy(self._gathered(matrices).take(self.order, axis=0)), 1
        unbind_copy: Any = torch.unbind_copy  # torch's stubs lack the form without `out`
        slot = slot_for((self.size,), matrix.dtype)
        if slot is None:
            return [matrix.flatten()] if len(names) == 1 else unbind_copy(matrix, axis)
        out = [slot, *(_empty((self.size,), dtype) for _ in names[1:])]
        unbind_copy(matrix, axis, out=out)
        return out

    def _copied(self, names: tuple[str, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return columns at rows that follow each other, as the rows of an array."""
        joined: Any = np.empty((len(names), self.size), dtype)
        for target, name in zip(joined, names, strict=True):
            for columns, rows, at in self.parts:
                array: Any = columns.array(name)
                if (at.stop - at.start) * array.strides[0] <= _SHORT:
                    memoryview(target)[at] = memoryview(array)[rows]
                else:
                    target[at] = array[rows]
        return joined  # type: ignore[no-any-return]

    def _gathered(self, arrays: Sequence[Any]) -> npt.NDArray[Any]:
        """Return rows of an array of each part, which lie in any order, one part after the other."""
        joined = np.empty((self.size, *arrays[0].shape[1:]), arrays[0].dtype)
        for array, (_, rows, at) in zip(arrays, self.parts, strict=True):
            array.take(rows, axis=0, out=joined[at], mode="clip")  # "raise" would copy twice
        return joined


_SHORT = 1 << 16
"""Bytes of a column that are copied holding the GIL: 5 us. Acquiring it again takes as long."""


def _rows_of(values: Any, rows: Ints | slice) -> list[Any]:
    """Return rows of a table, or values of a column of pyarrow's."""
    if isinstance(rows, slice):
        values = values.slice(rows.start, rows.stop - rows.start)
    else:
        values = values.take(rows)
    found: list[Any] = values.to_pylist()
    return found


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a new tensor, in shared memory where the batch goes to another process."""
    import torch

    from hybridloader.fetching.collate import slot_for

    kind = _dtype_of(dtype)
    slot = slot_for(shape, kind)
    return torch.empty(shape, dtype=kind) if slot is None else slot


@cache
def _dtype_of(dtype: npt.DTypeLike) -> Any:
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


# -- Row groups of Parquet files in one process: read, decoded, and kept within a bound.
#
# Threads share them: a row group that several want is decoded once.


class OpenParquet(NamedTuple):
    """A file that is open."""

    number: int  # number of the file in the table
    source: Any  # pyarrow file
    fragment: Any  # fragment of pyarrow.dataset, with its metadata
    remote: _RemoteFile | None  # the remote file that `source` reads, if it is remote


class ParquetFile(NamedTuple):
    """A file that was indexed."""

    store: Store
    path: str
    stamp: Stamp
    number: int = 0  # number of the file in the table: files of two archives may have the same path

    @property
    def name(self) -> str:
        return self.store.name(self.path)

    def open(self, what: str = "") -> OpenParquet:
        """Open the file; `what` of it is named in errors."""
        # Not through a file system of pyarrow: that closes files late, on its threads, and reports
        # every failure of fsspec as a missing file.
        import pyarrow
        from pyarrow import dataset

        source = remote = None
        try:
            if self.store.is_local:
                source = pyarrow.OSFile(self.path)
            else:
                if self.stamp.size < 0:
                    raise SourceError(
                        f"{self.name} can't be read by ranges, as its store reports no size; copy it "
                        "to a store that does"
                    )
                remote = _RemoteFile(self.store, self.path, self.stamp.size)
                source = pyarrow.PythonFile(remote, mode="r")
            fragment = dataset.ParquetFileFormat().make_fragment(source)
            fragment.ensure_complete_metadata()
        except Exception as error:
            if source is not None:
                source.close()
            self.raise_named(error, what)
        return OpenParquet(self.number, source, fragment, remote)

    def raise_named(self, error: Exception, what: str = "") -> NoReturn:
        """Raise `error`, or a hybridloader error in its place, that names the file and `what` of it."""
        import pyarrow

        # pyarrow reports bad data by its classes, or by an OSError without errno.
        bad = isinstance(error, pyarrow.ArrowException)
        if bad or (type(error) is OSError and error.errno is None):
            where = f"{self.name}{what and ', '}{what}"
            raise SourceError(
                f"{where} is not a Parquet file, or it is damaged or truncated: {error}"
            ) from error
        self.store.raise_named(error, self.path, what)


class _RemoteFile(RemoteFile):
    """A remote file for pyarrow, which asks for each range once, and not beyond the end.

    One thread at a time reads it: pyarrow has a lock around it.
    """

    fetched: tuple[Ranges, Any] | None = None  # parts that are fetched already, and their bytes

    def fetch(self, start: int, stop: int) -> bytes:
        if self.fetched is not None:
            ranges, data = self.fetched
            at = ranges.find(start, stop)
            if at is not None:
                return bytes(data[at : at + stop - start])
        try:
            return self.store.remote_range(self.path, start, stop)
        except OSError as error:
            if error.errno is None:  # pyarrow would report an error without errno as bad data
                error.errno = errno.EIO
            raise


_LATELY, _OFTEN = 8, 16
"""Row groups dropped last that are remembered, as many as the default window of a `BlockShuffleSampler`;
and how often one of these is decoded again before a warning."""

_OPEN = 32  # files that stay open in a process while unused; each holds its decoded metadata


class RowGroups:
    """Row groups of one process, the last ones used, up to `limit` bytes and at least one.

    They have these `columns`, and the rows that meet a `condition` (None: all).
    """

    def __init__(self, limit: int, columns: Sequence[str], condition: Any) -> None:
        self._limit, self._columns, self._condition = limit, columns, condition
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
        rows: int,
        *,
        wait: bool = True,
        fetched: Callable[[], Fetched | None] | None = None,
    ) -> Columns | None:
        """Return the row group of number `group` in its file.

        None if another thread decodes it, and this one shall not `wait`. `fetched` returns the bytes of
        its `ranges`, or None if these are not there. Raises `SourceError` if it has not the `rows` rows
        that were counted.
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
                block = None if fetched is None else fetched()
                data = None if block is None else block.data
                found = self._read(file, group, data)
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

    def ranges(self, file: ParquetFile, group: int) -> Ranges:
        """Return the parts of a file that have the columns of a row group."""
        with self._ranges_lock:  # otherwise each thread would open the file
            found = self._ranges.get(file.number)
            if found is None:
                with self._opened(file, f"row group {group}") as opened:
                    metadata = opened.fragment.metadata
                found = [
                    _ranges_of(metadata.row_group(number), self._columns)
                    for number in range(metadata.num_row_groups)
                ]
                self._ranges[file.number] = found
        return found[group]

    def _read(self, file: ParquetFile, group: int, data: Any) -> Columns:
        from pyarrow import parquet

        what = f"row group {group}"
        ranges = None if data is None else self.ranges(file, group)
        names = list(self._columns)
        with self._opened(file, what) as (_, source, fragment, remote):
            try:
                if ranges is not None and remote is not None:
                    remote.fetched = ranges, data
                # On this thread only: there are many workers, and some are forked.
                if self._condition is None:  # in 0.6 of the time of a scan, on other threads
                    reader = parquet.ParquetFile(source, metadata=fragment.metadata)
                    table = reader.read_row_group(group, names, use_threads=False).select(names)
                else:
                    table = fragment.subset(row_group_ids=[group]).to_table(
                        columns=names,
                        filter=self._condition,
                        use_threads=False,
                    )
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
            found = file.store.stamp(file.path, refresh=True)
            check_unchanged(file.name, file.stamp, found, "Parquet source")
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

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._bytes = 0
            idle, self._idle = self._idle, []
        for one in idle:
            one.source.close()


def _ranges_of(row_group: Any, columns: Sequence[str]) -> Ranges:
    """Return the parts of a file that have the column chunks of a row group."""
    chunks = []
    for number in range(row_group.num_columns):
        chunk = row_group.column(number)
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            first = chunk.dictionary_page_offset or chunk.data_page_offset
            start = min(first, chunk.data_page_offset)
            chunks.append((start, start + chunk.total_compressed_size))
    return Ranges.joining(chunks)


class _Entry:
    """A row group, or the place where it will be."""

    __slots__ = ("columns", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.columns: Columns | None = None


CACHE = 256 << 20  # bytes of decoded row groups that a process keeps


class _Batch(dict[str, Any]):
    """Batch that was made as a whole. Asked for a sample by its number, it raises an error with the
    remedy."""

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, int):
            raise TypeError(
                "Parquet(tensors=True) makes whole batches, so there are no samples to collate; pass "
                "collate_fn=Parquet.collate_fn"
            )
        raise KeyError(key)


class Parquet(Shards[Any]):
    """A dataset of the rows of Parquet files.

    A row group is read and decoded as a whole, and kept for the next rows. `block_sizes` are the row
    groups, so a `BlockShuffleSampler` reads each of them once: give this dataset room for its window.

    Parameters
    ----------
    urls
        Paths or URLs of files, folders or globs, as for `Files`.
    columns
        Names of the columns to read. Default: all. Names of folders, as in ``year=2024/a.parquet``, are
        no columns; a glob of `urls` selects by them.
    filter
        Expression of pyarrow, such as ``pyarrow.dataset.field("label") >= 0``: only such rows are
        samples. They are counted here, once; row groups whose statistics exclude them are not read.
    tensors
        True makes a batch in one call: a dict of tensors, gathered together, into shared memory where
        the batch goes to another process. Give the loader ``collate_fn=Parquet.collate_fn``. Columns of
        numbers and booleans are tensors, lists of a fixed size (Arrow's `FixedSizeList`) rows of a
        matrix, and others lists of Python's objects. Default: a row is a dict of Python's objects.
    memory_cache_bytes
        Bytes of decoded row groups that a process keeps: the ones used last, and at least one.
    ahead_bytes
        Bytes of row groups of remote files, as they are stored, that a process fetches ahead under a
        `BlockShuffleSampler`. 0: none. With a `filter` none are.
    cache_dir
        Local folder in which such row groups are kept for the next epoch: one copy for all workers and
        ranks of this machine, and for other jobs that name it.
    cache_bytes
        Bytes of all files in `cache_dir`; a window must have room. The file that was used longest ago
        goes first, and none in use.
    retry_seconds
        Seconds from the first failure of a request within which it is made again, with pauses that
        grow: answers such as 503, timeouts, broken connections. 0: never.
    storage_options
        Options of fsspec for the places of `urls`.

    Attributes
    ----------
    columns : tuple of str
        Names of the columns that are read.

    Raises
    ------
    ImportError
        pyarrow is not installed; the message has the line that installs it.
    SourceError
        A file is no Parquet, is damaged, or has another schema than the first one.
    ValueError
        There is no such column.

    Notes
    -----
    Workers that are threads share the row groups. Each process decodes those of the window for itself.

    Examples
    --------
    >>> import tempfile, pyarrow, pyarrow.parquet
    >>> folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    >>> path = f"{folder.name}/rows.parquet"
    >>> table = pyarrow.table({"x": [0.0, 0.5, 1.0], "name": ["a", "b", "c"]})
    >>> pyarrow.parquet.write_table(table, path, row_group_size=2)
    >>> rows = Parquet(path)
    >>> len(rows), rows[2], rows.block_sizes.tolist()
    (3, {'x': 1.0, 'name': 'c'}, [2, 1])
    >>> Parquet(path, columns=["x"], tensors=True).__getitems__([2, 0])
    {'x': tensor([1., 0.], dtype=torch.float64)}
    >>> rows.close()
    >>> folder.cleanup()
    """

    takes_arrays: ClassVar[bool] = True
    """True if `__getitems__` takes arrays too. The samplers of hybridloader then pass arrays."""

    def __init__(
        self,
        urls: Urls,
        *,
        columns: Sequence[str] | None = None,
        filter: Any = None,
        tensors: bool = False,
        memory_cache_bytes: int = CACHE,
        ahead_bytes: int = AHEAD,
        cache_dir: str | None = None,
        cache_bytes: int = DISK,
        retry_seconds: float = RETRY,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import pyarrow.dataset  # noqa: F401
        except ImportError as error:
            raise ImportError("reading Parquet requires pyarrow: pip install pyarrow") from error
        if isinstance(columns, str):
            raise TypeError(f"columns must be a sequence of names, such as [{columns!r}]")
        if columns is not None and len(set(columns)) < len(columns):
            raise ValueError(f"columns has a name twice: {', '.join(columns)}")
        self._tensors, self._filter = flag("tensors", tensors), filter
        # As in pyarrow's datasets: Spark and others keep files without rows under such names.
        roots = list_files(urls, storage_options or {}, ignored=("_", "."), retry=retry_seconds)
        places = [(root.store, path) for root in roots for path in root.paths]
        stores = (store for store, _ in places)
        stamps = each(lambda place: place[0].stamp(place[1]), places, stores)
        self._files = [
            ParquetFile(*place, stamp, number)
            for number, (place, stamp) in enumerate(zip(places, stamps, strict=True))
        ]
        self.columns: tuple[str, ...] = () if columns is None else tuple(columns)
        groups = self._index(columns is None)
        counts = np.zeros(len(self._files), np.int64)
        np.add.at(counts, groups[:, 0], groups[:, 2])
        super().__init__([file.name for file in self._files], counts)
        self._groups = groups
        self._group_stops: Ints = np.cumsum(groups[:, 2])
        # The smallest type that holds the numbers: 16-bit ones sort in a tenth of the time.
        self._group_type = np.min_scalar_type(len(groups))
        self._shard_stores = list(dict.fromkeys(file.store for file in self._files))
        remote = self._is_remote and filter is None
        self._read_blocks(ahead_bytes, cache_dir, cache_bytes, remote=remote, warns=False)
        limit = whole("memory_cache_bytes", memory_cache_bytes, 0)
        self._cache = PerWorker(partial(RowGroups, limit, self.columns, filter), per="process")

    def _index(self, all_columns: bool) -> Ints:
        """Return file, number and rows of each row group that has rows."""

        def described(file: ParquetFile) -> tuple[Any, list[tuple[int, int]] | Exception]:
            _, source, fragment, _ = file.open()
            with closing(source):
                try:
                    return fragment.physical_schema, self._counted(file, fragment)
                except Exception as error:  # a missing column explains it better
                    return fragment.physical_schema, error

        schema: Any = None
        groups = []
        all_described = each(described, self._files, (file.store for file in self._files))
        for file, (found, counted) in zip(self._files, all_described, strict=True):
            if schema is None:
                schema = found
                if all_columns:
                    self.columns = tuple(schema.names)
                if unknown := [name for name in self.columns if name not in schema.names]:
                    raise ValueError(
                        f"{file.name} has no column {unknown[0]!r}; it has {', '.join(schema.names)}"
                    )
            self._check_schema(file, found, schema, all_columns)
            if isinstance(counted, Exception):
                raise counted
            groups += [(file.number, *group) for group in counted]
        return np.array(groups, np.int64).reshape(len(groups), 3)

    def _check_schema(self, file: ParquetFile, found: Any, schema: Any, all_columns: bool) -> None:
        first = self._files[0].name
        for name in self.columns:
            here = found.field(name).type if name in found.names else "missing"
            if here != schema.field(name).type:
                raise SourceError(
                    f"{file.name} has another schema than {first}: column {name} is {here}, and "
                    f"{schema.field(name).type} there"
                )
        if all_columns and (more := [name for name in found.names if name not in schema.names]):
            raise SourceError(
                f"{file.name} has another schema than {first}, which has no column {more[0]}; name "
                "the columns to read"
            )

    def _counted(self, file: ParquetFile, fragment: Any) -> list[tuple[int, int]]:
        """Return number and rows of the row groups of one file, without those of no row."""
        if self._filter is None:
            counted = [(group.id, group.num_rows) for group in fragment.row_groups]
        else:
            try:
                left = fragment.subset(filter=self._filter)
                # Not `count_rows`: for a file whose rows all match, pyarrow 26 counts the file once for
                # each of its row groups.
                counted = [
                    (
                        group.id,
                        fragment.subset(row_group_ids=[group.id])
                        .to_table(columns=[], filter=self._filter, use_threads=False)
                        .num_rows,
                    )
                    for group in left.row_groups
                ]
            except Exception as error:
                file.raise_named(error, "filter")
        return [(number, rows) for number, rows in counted if rows]

    @property
    def block_sizes(self) -> Ints:
        sizes: Ints = self._groups[:, 2]
        return sizes

    def fetch(self, shard: int, first: int, last: int) -> bytes:
        place, number = self._group_at(shard, first)
        ranges = self._cache().ranges(place, number)
        what = f"row group {number}"
        return place.store.read_ranges(place.path, ranges, place.stamp, lambda _: what)

    def fetch_key(self, shard: int, first: int, last: int) -> str:
        place, number = self._group_at(shard, first)
        return f"parquet {place.name} {tuple(place.stamp)} {number} {self.columns}"

    def _group_at(self, shard: int, number: int) -> tuple[ParquetFile, int]:
        """Return the file of a sample, and the number of its row group there."""
        index = self._firsts[shard] + number
        group = np.searchsorted(self._group_stops, index, "right")
        file, found, _ = self._groups[group].tolist()
        return self._files[file], found

    def read_ahead(
        self, sizes: Ints, order: Iterator[Ints] | None, blocks: int
    ) -> Callable[[int], None] | None:
        # Row groups are fetched, whichever blocks the sampler has.
        return super().read_ahead(self.block_sizes, order, blocks)

    def close(self) -> None:
        super().close()
        self._cache.close()

    def read(self, shard: int, number: int) -> dict[str, Any]:
        index = int(self._firsts[shard] + number)
        selection = self._in_order(index, index + 1)
        if not self._tensors:
            return selection.rows()[0]
        return {name: values[0] for name, values in selection.tensors(self.columns).items()}

    def __getitems__(self, indices: Sequence[int] | Ints) -> Any:
        """Return rows of a batch: a dict of tensors, or a list of dicts."""
        wanted = np.asarray(indices)
        if not wanted.size:
            return []
        if _follow_each_other(wanted) and wanted[0] >= 0 and wanted[-1] < len(self):
            selection = self._in_order(int(wanted[0]), int(wanted[-1]) + 1)
        else:
            selection = self._shuffled(self._checked(wanted))
        if self._tensors:
            return _Batch(selection.tensors(self.columns))
        return selection.rows()

    def _checked(self, wanted: npt.NDArray[Any]) -> Ints:
        if wanted.dtype.kind in "iu" and wanted.min() >= 0 and wanted.max() < len(self):
            return wanted
        # Indices from the end; others raise the error of a single sample.
        located = [self.locate(index) for index in wanted.tolist()]
        return np.array([self._firsts[shard] + number for shard, number in located])

    def _in_order(self, start: int, stop: int) -> Selection:
        """Select the samples from `start` to before `stop`."""
        first, last = np.searchsorted(self._group_stops, (start, stop - 1), "right").tolist()
        row_groups = self._row_groups(range(first, last + 1), in_order=True)
        parts = []
        for group in range(first, last + 1):
            end = int(self._group_stops[group])
            begin = end - int(self._groups[group, 2])
            one, other = max(start, begin), min(stop, end)
            rows, at = slice(one - begin, other - begin), slice(one - start, other - start)
            parts.append(Part(row_groups[group], rows, at))
        return Selection(parts, None, stop - start)

    def _shuffled(self, wanted: Ints) -> Selection:
        groups = np.searchsorted(self._group_stops, wanted, "right").astype(self._group_type)
        by_group = groups.argsort(kind="stable")
        groups, indices = groups[by_group], wanted[by_group]
        starts = [0, *(np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist(), len(wanted)]
        found = groups[starts[:-1]].tolist()
        row_groups = self._row_groups(found)
        parts = []
        for group, start, stop in zip(found, starts, starts[1:], strict=False):
            begin = self._group_stops[group] - self._groups[group, 2]
            rows, at = indices[start:stop] - begin, slice(start, stop)
            parts.append(Part(row_groups[group], rows, at))
        order = np.empty_like(by_group)
        order[by_group] = np.arange(len(wanted))
        return Selection(parts, order, len(wanted))

    def _row_groups(self, groups: Sequence[int], *, in_order: bool = False) -> dict[int, Columns]:
        """Return row groups by number.

        Row groups that other threads are decoding are waited for last: each thread decodes another one
        meanwhile, of these or, if samples are read in their order, the next.
        """
        cache, found = self._cache(), {}
        for group in groups:
            found[group] = self._read(cache, group, wait=False)
        missing = [group for group in groups if found[group] is None]
        if missing and in_order and groups[-1] + 1 < len(self._groups) and cache.has_room:
            with suppress(Exception):  # the batch that needs the row group raises the error
                self._read(cache, groups[-1] + 1, wait=False)
        for group in missing:
            found[group] = self._read(cache, group)
        return found

    def _read(self, cache: RowGroups, group: int, *, wait: bool = True) -> Any:
        file, number, rows = self._groups[group].tolist()
        fetched = None
        if self._reader is not None:
            first = int(self._group_stops[group]) - rows
            fetched = partial(self._reader.find, self, first, rows)
        return cache.get(self._files[file], number, rows, wait=wait, fetched=fetched)

    @staticmethod
    def collate_fn(samples: Any) -> Any:
        """Return a batch that is one already, or make it of samples that were read one by one."""
        if isinstance(samples, dict):
            return dict(samples)
        from torch.utils.data import default_collate

        return default_collate(samples)


def _follow_each_other(numbers: npt.NDArray[Any]) -> bool:
    """Return True if each number is one more than the one before it.

    Their bytes are compared, as each of NumPy's calls would let the GIL go.
    """
    first, last = int(numbers[0]), int(numbers[-1])
    # On Windows, an array of numpy 1.26 has 32-bit integers.
    if numbers.dtype.kind != "i" or last - first != len(numbers) - 1:
        return False
    return numbers.tobytes() == np.arange(first, last + 1, dtype=numbers.dtype).tobytes()
