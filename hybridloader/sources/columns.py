"""Columns of a row group, and batches that are gathered from several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridloader._support.errors import SourceError

INSTALL = "pip install 'hybridloader[parquet]'"

Ints = npt.NDArray[np.int64]


def pyarrow_modules() -> tuple[Any, Any]:
    """Import pyarrow and pyarrow.dataset. Raises `ImportError` with the line that installs them."""
    try:
        import pyarrow
        import pyarrow.dataset
        import pyarrow.fs
    except ImportError as error:
        raise ImportError(f"Parquet is read by pyarrow: {INSTALL}") from error
    return pyarrow, pyarrow.dataset


class Columns:
    """Decoded columns of one row group.

    Attributes
    ----------
    table : pyarrow.Table
        All columns, each in one piece.
    """

    def __init__(self, table: Any, where: str) -> None:
        self.table, self._where = table.combine_chunks(), where
        self._arrays: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes)

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """Return a column as numbers, without a copy but of booleans; None if it is of other things.

        Lists of a fixed size are rows of a matrix. Raises `SourceError` for numbers with nulls.
        """
        if name not in self._arrays:
            self._arrays[name] = self._made(name)
        array: npt.NDArray[Any] | None = self._arrays[name]
        return array

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
        if not types.is_floating(kind):  # in those a null is a NaN
            self._check(values, name)
        array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
        return array.reshape(count, *widths)

    def _check(self, values: Any, name: str) -> None:
        if values.null_count:
            raise SourceError(
                f"{self._where}, column {name} has {values.null_count} nulls, which no tensor of "
                "numbers holds: leave them out by filter=, leave the column out by columns=, or read "
                "rows"
            )


def gathered(
    name: str, parts: Sequence[tuple[Columns, Ints, Ints]], count: int, inverse: Ints | None
) -> Any:
    """Return one column of a batch of `count` rows: a tensor, or a list of Python's objects.

    Parameters
    ----------
    parts
        A row group, places in the batch, and the rows of the group that belong there.
    inverse
        That of the parts, as `inverse_of` has it.
    """
    arrays = [columns.array(name) for columns, _, _ in parts]
    first = arrays[0]
    if first is None:
        values: list[Any] = [None] * count
        for columns, places, rows in parts:
            found = columns.table.column(name).take(rows).to_pylist()
            for place, value in zip(places.tolist(), found, strict=True):
                values[place] = value
        return values
    import torch

    from hybridloader.fetching.collate import slot_for

    shape, dtype = (count, *first.shape[1:]), torch.from_numpy(np.empty(0, first.dtype)).dtype
    tensor = slot_for(shape, dtype)
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype)
    target = tensor.numpy()
    # One row group after the other, then into their places: an assignment by an index takes twice as
    # long as two takes that write where they are to. With "raise" for "clip" they would copy twice.
    part = target if inverse is None else np.empty_like(target)
    stop = 0
    for (_, _, rows), array in zip(parts, arrays, strict=True):
        assert array is not None
        start, stop = stop, stop + len(rows)
        array.take(rows, axis=0, out=part[start:stop], mode="clip")
    if inverse is not None:
        part.take(inverse, axis=0, out=target, mode="clip")
    return tensor


def inverse_of(parts: Sequence[tuple[Columns, Ints, Ints]]) -> Ints | None:
    """Return where each row of a batch is if its parts stand in a row; None: in its place."""
    if len(parts) == 1:
        return None
    places = np.concatenate([places for _, places, _ in parts])
    inverse = np.empty_like(places)
    inverse[places] = np.arange(len(places))
    return inverse
