"""`Parquet`: a dataset of the rows of Parquet files, read a row group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from hybridloader._support.arguments import flag, whole
from hybridloader.errors import SourceError
from hybridloader.sources.block_reader import AHEAD
from hybridloader.sources.block_reader import CACHE as DISK
from hybridloader.sources.columns import Columns, Ints, Part, Selection, pyarrow_modules
from hybridloader.sources.listing import Root, Urls, list_files
from hybridloader.sources.per_worker import PerWorker
from hybridloader.sources.row_groups import ParquetFile, RowGroups
from hybridloader.sources.shards import Shards
from hybridloader.sources.store import RETRY, each

CACHE = 256 << 20
"""Bytes of decoded row groups that a process keeps."""


_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Name of a folder for a missing value."""


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
        Names of the columns to read. Default: all, those that folders name last: ``year=2024/a.parquet``
        has a column ``year``, of whole numbers if it is one everywhere, else of text.
    filter
        Expression of pyarrow, such as ``pyarrow.dataset.field("label") >= 0``: only such rows are
        samples. They are counted here, once; row groups whose statistics exclude them are not read. It
        may name the columns of folders.
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
    >>> file = tempfile.NamedTemporaryFile(suffix=".parquet")
    >>> table = pyarrow.table({"x": [0.0, 0.5, 1.0], "name": ["a", "b", "c"]})
    >>> pyarrow.parquet.write_table(table, file.name, row_group_size=2)
    >>> rows = Parquet(file.name)
    >>> len(rows), rows[2], rows.block_sizes
    (3, {'x': 1.0, 'name': 'c'}, array([2, 1]))
    >>> Parquet(file.name, columns=["x"], tensors=True).__getitems__([2, 0])
    {'x': tensor([1., 0.], dtype=torch.float64)}
    >>> file.close()
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
        pyarrow_modules()
        if isinstance(columns, str):
            raise TypeError(f"columns must be a sequence of names, such as [{columns!r}]")
        if columns is not None and len(set(columns)) < len(columns):
            raise ValueError(f"columns has a name twice: {', '.join(columns)}")
        self._tensors, self._filter = flag("tensors", tensors), filter
        # As in pyarrow's datasets: Spark and others keep files without rows under such names.
        roots, stores = list_files(
            urls, storage_options or {}, ignored=("_", "."), retry=retry_seconds
        )
        folders, numbers = iter(_folder_columns(roots)), count()
        places = [
            (store, path) for root, store in zip(roots, stores, strict=True) for path in root.paths
        ]
        stamps = each(lambda place: place[0].stamp(place[1]), places, stores)
        self._files = [
            ParquetFile(*place, stamp, next(folders), next(numbers))
            for place, stamp in zip(places, stamps, strict=True)
        ]
        self.columns: tuple[str, ...] = () if columns is None else tuple(columns)
        groups = self._index(columns is None)
        counts = np.zeros(len(self._files), np.int64)
        np.add.at(counts, groups[:, 0], groups[:, 2])
        super().__init__([file.name for file in self._files], counts)
        self._groups = groups
        self._group_stops: Ints = np.cumsum(groups[:, 2])
        self._finder = Finder(self._group_stops)
        ahead = whole("ahead_bytes", ahead_bytes, 0) or None
        remote = filter is None and any(not file.store.is_local for file in self._files)
        self._read_blocks(ahead if remote else None, cache_dir, cache_bytes, warns=False)
        # Separate from `_cache`, so that the decoded row groups are in the workers that share it.
        self._places = PerWorker(partial(RowGroups, 0), per="process")
        self._cache = PerWorker(
            partial(RowGroups, whole("memory_cache_bytes", memory_cache_bytes, 0)), per="process"
        )

    def _index(self, all_columns: bool) -> Ints:
        """Return file, number and rows of each row group that has rows."""

        def described(file: ParquetFile) -> tuple[Any, list[tuple[int, int]] | Exception]:
            with file.open() as (_, _, fragment, _):
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
                names = (*schema.names, *(n for n in file.folders if n not in schema.names))
                if all_columns:
                    self.columns = names
                if unknown := [name for name in self.columns if name not in names]:
                    raise ValueError(
                        f"{file.name} has no column {unknown[0]!r}; it has {', '.join(names)}"
                    )
            self._check_schema(file, found, schema, all_columns)
            if isinstance(counted, Exception):
                raise counted
            groups += [(file.number, *group) for group in counted]
        return np.array(groups, np.int64).reshape(len(groups), 3)

    def _check_schema(self, file: ParquetFile, found: Any, schema: Any, all_columns: bool) -> None:
        first = self._files[0].name
        for name in self.columns:
            if name in file.folders:
                continue
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
                schema = file.schema(fragment)
                left = fragment.subset(filter=self._filter, schema=schema)
                # Not `count_rows`: for a file whose rows all match, as by its folder, pyarrow 26
                # counts the file once for each of its row groups.
                counted = [
                    (
                        group.id,
                        fragment.subset(row_group_ids=[group.id])
                        .to_table(schema=schema, columns=[], filter=self._filter, use_threads=False)
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
        file, number, _ = self._groups[self._group_at(shard, first)].tolist()
        place = self._files[file]
        ranges = self._places().ranges(place, number, self.columns)
        try:
            found = [
                place.store.remote_range(place.path, start, stop)
                for start, stop in zip(ranges.starts, ranges.stops, strict=True)
            ]
        except Exception as error:
            place.raise_named(error, f"row group {number}")
        return found[0] if len(found) == 1 else b"".join(found)

    def fetch_key(self, shard: int, first: int, last: int) -> str:
        file, number, _ = self._groups[self._group_at(shard, first)].tolist()
        place = self._files[file]
        return f"parquet {place.name} {tuple(place.stamp)} {number} {self.columns}"

    def _group_at(self, shard: int, number: int) -> int:
        index = number + (self._ends[shard - 1] if shard else 0)
        return int(np.searchsorted(self._group_stops, index, "right"))

    def read_ahead(
        self, sizes: Ints, order: Iterator[Ints] | None, blocks: int
    ) -> Callable[[int], None] | None:
        # Row groups are fetched, whichever blocks the sampler has.
        return super().read_ahead(self.block_sizes, order, blocks)

    def close(self) -> None:
        super().close()
        self._places.close()
        self._cache.close()
        for file in self._files:
            file.store.close()

    def read(self, shard: int, number: int) -> dict[str, Any]:
        index = int(number + (self._ends[shard - 1] if shard else 0))
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
        return np.array([at + (self._ends[s - 1] if s else 0) for s, at in located])

    def _in_order(self, start: int, stop: int) -> Selection:
        """Select the samples from `start` to before `stop`."""
        first, last = np.searchsorted(self._group_stops, (start, stop - 1), "right").tolist()
        row_groups = self._row_groups(range(first, last + 1), in_order=True)
        parts = []
        for group in range(first, last + 1):
            end = int(self._group_stops[group])
            begin = end - int(self._groups[group, 2])
            rows = slice(max(start, begin) - begin, min(stop, end) - begin)
            parts.append(Part(row_groups[group], rows))
        return Selection(parts, None, stop - start)

    def _shuffled(self, wanted: Ints) -> Selection:
        groups = self._finder.find(wanted)
        by_group = groups.argsort(kind="stable")
        groups, indices = groups[by_group], wanted[by_group]
        starts = [0, *(np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist(), len(wanted)]
        found = groups[starts[:-1]].tolist()
        row_groups = self._row_groups(found)
        parts = []
        for group, start, stop in zip(found, starts, starts[1:], strict=False):
            begin = self._group_stops[group] - self._groups[group, 2]
            parts.append(Part(row_groups[group], indices[start:stop] - begin))
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
            fetched = partial(self._fetched_bytes, int(self._group_stops[group]) - rows, rows)
        return cache.get(
            *(self._files[file], number, self.columns, self._filter, rows),
            wait=wait,
            fetched=fetched,
        )

    def _fetched_bytes(self, index: int, rows: int) -> Any:
        """Return the bytes of the row group that begins with this sample, if they were fetched."""
        found = None if self._reader is None else self._reader.find(self, index, rows)
        return None if found is None else found.data

    @staticmethod
    def collate_fn(samples: Any) -> Any:
        """Return a batch that is one already, or make it of samples that were read one by one."""
        if isinstance(samples, dict):
            return dict(samples)
        from torch.utils.data import default_collate

        return default_collate(samples)


class Finder:
    """Search of intervals that follow each other from 0 on, for many numbers in any order.

    A table has the interval of every 2**k-th number, so a search begins at most a few intervals before
    its end. 4,096 numbers in random order take 15 us, and 90 with `numpy.searchsorted`.

    Parameters
    ----------
    stops
        Numbers that follow the last one of each interval; none is empty.
    """

    def __init__(self, stops: Ints) -> None:
        self._stops = stops
        count = int(stops[-1]) if len(stops) else 0
        self._shift = max(0, (count // (4 * max(1, len(stops)))).bit_length() - 1)
        known = np.arange(0, count, 1 << self._shift)
        # The smallest type that holds the numbers: 16-bit ones sort in a tenth of the time.
        kind = np.min_scalar_type(len(stops))
        self._first: npt.NDArray[Any] = np.searchsorted(stops, known, "right").astype(kind)

    def find(self, numbers: Ints) -> npt.NDArray[Any]:
        """Return the interval of each number; all must lie in one."""
        found: npt.NDArray[Any] = self._first[numbers >> self._shift]
        while (past := numbers >= self._stops[found]).any():
            found += past
        return found


def _folder_columns(roots: Sequence[Root]) -> list[dict[str, Any]]:
    """Return the columns in the names of folders: for each file, scalars of pyarrow by name.

    Hive and Spark write them, as ``year=2024/a.parquet``.
    """
    pyarrow, _ = pyarrow_modules()
    paths = [path for root in roots for path in root.paths]
    found: list[dict[str, Any]] = []
    for root in roots:
        for path in root.paths:
            parts = path[len(root.folder) :].split("/")[:-1]
            pairs = (part.split("=", 1) for part in parts if "=" in part)
            found.append({unquote(name): unquote(value) for name, value in pairs})
            if found[-1].keys() != found[0].keys():
                here, there = (", ".join(one) or "none" for one in (found[-1], found[0]))
                raise SourceError(
                    f"{path} has the columns {here} in the names of its folders, and {paths[0]} has "
                    f"{there}; pass files with the same columns"
                )
    for name in found[0] if found else ():
        values = [None if one[name] == _NULL else one[name] for one in found]
        column = pyarrow.array(values, pyarrow.string())
        with suppress(pyarrow.ArrowInvalid):  # text
            column = column.cast(pyarrow.int64())
        for one, value in zip(found, column, strict=True):
            one[name] = value
    return found


def _follow_each_other(numbers: npt.NDArray[Any]) -> bool:
    """Return True if each number is one more than the one before it.

    Their bytes are compared, as each of NumPy's calls would let the GIL go.
    """
    if numbers.dtype != np.int64 or int(numbers[-1]) - int(numbers[0]) != len(numbers) - 1:
        return False
    return numbers.tobytes() == np.arange(numbers[0], numbers[-1] + 1).tobytes()
