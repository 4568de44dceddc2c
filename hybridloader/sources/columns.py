"""Decoded columns of a row group."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridloader.errors import SourceError

INSTALL = "pip install 'hybridloader[parquet]'"

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
