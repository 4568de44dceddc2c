"""Samples with fields: mappings, namedtuples and dataclasses, taken apart and put together again.

A batch that was collated is split into the samples that it was made of. A batch of columns is
distinguished from a list of samples by types, never by lengths. So all batches of a pipeline are taken
alike.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridloader._support.text import short
from hybridloader._support.user_objects import has
from hybridloader.devices.batch_parts import like


def is_named(value: Any) -> bool:
    """Return True if it is a namedtuple."""
    return isinstance(value, tuple) and has(value, "_fields")


def is_array(value: Any) -> bool:
    """Return True if it is a tensor or array with a first dimension. Imports neither torch nor numpy."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    found = (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )
    return found and value.ndim > 0


def samples_of(batch: Any, columns: bool | None, place: str = "the batch") -> Sequence[Any]:
    """Return the samples of one batch, which errors call `place`; for `columns` see `Unbatch`.

    Raises `TypeError` if it is no batch, or could be either, and `ValueError` if its columns are of
    different lengths.
    """
    if is_array(batch):
        torch = sys.modules.get("torch")
        tensor = torch is not None and isinstance(batch, torch.Tensor)
        return batch.unbind(0) if tensor else list(batch)
    if isinstance(batch, Mapping):
        names = list(batch)
        rows = _transposed([batch[name] for name in names], names, columns, place)
        return [like(batch, dict(zip(names, row, strict=True))) for row in rows]
    if is_named(batch):
        return [type(batch)(*row) for row in _transposed(batch, batch._fields, columns, place)]
    if isinstance(batch, (list, tuple)):
        if columns is None:
            columns = _holds_columns(batch, place)
        if columns and any(map(_is_column, batch)):
            return list(_transposed(batch, range(len(batch)), columns, place))
        return batch  # also strings, for example, which default_collate leaves in a list
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        rows = _transposed([getattr(batch, name) for name in names], names, columns, place)
        return [dataclasses.replace(batch, **dict(zip(names, row, strict=True))) for row in rows]
    raise TypeError(
        f"unbatch: {place} can't be split into samples: {short(batch)}; there are rules for tensors, "
        "arrays, mappings, namedtuples, dataclasses, lists and tuples; for anything else give "
        "split=, a function from a batch to an iterable of samples"
    )


def _holds_columns(batch: Sequence[Any], place: str) -> bool:
    """Return True if it holds columns: arrays of different kinds, or arrays and other things.

    Samples that are arrays are of one dtype and number of dimensions. Columns may be, too.
    """
    arrays = [value for value in batch if is_array(value)]
    if not arrays:
        return False
    if len(arrays) < len(batch) or len({(type(a), a.dtype, a.ndim) for a in arrays}) > 1:
        return True
    raise TypeError(
        f"unbatch: {place}, a {type(batch).__qualname__} of {len(batch)} x "
        f"{type(batch[0]).__qualname__}, all of one dtype and number of dimensions, may be one thing "
        "for each sample, or columns as default_collate makes of tuples; pass columns=False "
        "or columns=True"
    )


def _is_column(value: Any) -> bool:
    return (
        is_array(value)
        or isinstance(value, (Mapping, list, tuple))
        or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    )


def _transposed(
    values: Iterable[Any], names: Iterable[Any], columns: bool | None, place: str
) -> Iterable[tuple[Any, ...]]:
    named = [f"{place}[{name!r}]" for name in names]
    split = [samples_of(value, columns, name) for value, name in zip(values, named, strict=True)]
    if len(set(map(len, split))) > 1:
        lengths = ", ".join(f"{name}: {len(rows)}" for name, rows in zip(named, split, strict=True))
        raise ValueError(
            f"unbatch: columns of different lengths ({lengths}); pass columns=False or columns=True, or "
            "split=, a function that takes a batch and returns an iterable of samples"
        )
    return zip(*split, strict=True)
