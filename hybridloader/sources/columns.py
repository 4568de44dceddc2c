"""Decoded columns of row groups, and the samples of a batch as rows of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridloader.errors import SourceError

INSTALL = "pip install pyarrow"

Ints = npt.NDArray[np.int64]
Names = tuple[str, ...]


def pyarrow_modules() -> tuple[Any, Any]:
    """Import pyarrow and pyarrow.dataset. Raises `ImportError` with the line that installs them."""
    try:
        import pyarrow
        import pyarrow.dataset
        import pyarrow.fs
    except ImportError as error:
        raise ImportError(f"reading Parquet requires pyarrow: {INSTALL}") from error
    return pyarrow, pyarrow.dataset


def parquet_module() -> Any:
    """Import pyarrow.parquet."""
    import pyarrow.parquet

    return pyarrow.parquet


class Columns:
    """Decoded columns of one row group. Threads share them.

    Attributes
    ----------
    table : pyarrow.Table
        The columns, each in one piece, without those that `matrix` has taken out of it.
    nbytes : int
        Bytes of all of them.
    """

    def __init__(self, table: Any, where: str) -> None:
        self.table, self._where = table.combine_chunks(), where
        self.nbytes, self._rows = int(self.table.nbytes), len(table)
        self._lock = threading.Lock()
        # All the mutable state, and `table`:
        self._arrays: dict[str, Any] = {}
        self._matrices: dict[Names, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._rows

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """Return a column as numbers, without a copy but of booleans; None if it is of other things.

        Lists of a fixed size are rows of a matrix. Raises `SourceError` for numbers with nulls.
        """
        try:
            found = self._arrays[name]
        except KeyError:
            with self._lock:
                found = self._array(name)
        array: npt.NDArray[Any] | None = found
        return array

    def matrix(self, names: Names) -> npt.NDArray[Any]:
        """Return several columns of numbers of one dtype side by side: a row of each sample.

        It takes their place here, so that they are in memory once.
        """
        try:
            return self._matrices[names]
        except KeyError:
            pass
        with self._lock:
            if names not in self._matrices:
                matrix = _side_by_side([self._array(name) for name in names])
                # Other threads may be reading: replace the arrays before the matrix appears.
                self._arrays.update((name, matrix[:, at]) for at, name in enumerate(names))
                self._matrices[names] = matrix
                self.table = self.table.drop_columns(list(names))
            return self._matrices[names]

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = self._made(name)
        return self._arrays[name]

    def _made(self, name: str) -> npt.NDArray[Any] | None:
        pyarrow, _ = pyarrow_modules()
        types = pyarrow.types
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


def _side_by_side(columns: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
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
    rows: Any
    """Array of row numbers; a slice for consecutive samples."""


class Selection(NamedTuple):
    """Samples of a batch."""

    parts: Sequence[Part]
    """Samples of the same row group, one group after the other."""
    order: Ints | None
    """Position among the parts of each sample of the batch; None: the parts are in order."""
    size: int
    """Number of samples."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the samples as dicts of Python's objects."""
        return self._listed(_rows_of(columns.table, rows) for columns, rows in self.parts)

    def tensors(self, names: Sequence[str]) -> dict[str, Any]:
        """Return these columns of the batch: tensors of numbers, and lists of Python's objects."""
        batch: dict[str, Any] = dict.fromkeys(names)
        alike: dict[Any, list[str]] = {}
        first = self.parts[0]
        for name in names:
            array = first.columns.array(name)
            if array is None:
                batch[name] = self._listed(
                    _rows_of(columns.table.column(name), rows) for columns, rows in self.parts
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
        part = target if self.order is None else np.empty_like(target)
        stop = 0
        for columns, rows in self.parts:
            array: Any = columns.array(name)
            if isinstance(rows, slice):
                start, stop = stop, stop + rows.stop - rows.start
                part[start:stop] = array[rows]
            else:
                start, stop = stop, stop + len(rows)
                # mode="raise" would copy twice.
                array.take(rows, axis=0, out=part[start:stop], mode="clip")
        if self.order is not None:
            # An assignment by index takes twice as long as two takes into the target.
            part.take(self.order, axis=0, out=target, mode="clip")
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
            matrix, axis = torch.from_numpy(self._gathered(names, dtype)), 1
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
            stop = 0
            for columns, rows in self.parts:
                array: Any = columns.array(name)
                start, stop = stop, stop + rows.stop - rows.start
                if (stop - start) * array.strides[0] <= _SHORT:
                    memoryview(target)[start:stop] = memoryview(array)[rows]
                else:
                    target[start:stop] = array[rows]
        return joined  # type: ignore[no-any-return]

    def _gathered(self, names: tuple[str, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return columns at rows in any order, as the columns of an array."""
        joined, stop = np.empty((self.size, len(names)), dtype), 0
        for columns, rows in self.parts:
            start, stop = stop, stop + len(rows)
            # mode="raise" would copy twice.
            columns.matrix(names).take(rows, axis=0, out=joined[start:stop], mode="clip")
        order: Any = self.order
        return joined.take(order, axis=0)  # type: ignore[no-any-return]


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
