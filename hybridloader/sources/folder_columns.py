"""Columns of tables in the names of folders, as Hive and Spark write them: ``year=2024/a.parquet``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any
from urllib.parse import unquote

from hybridloader.errors import SourceError
from hybridloader.sources.listing import Root

_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Folder name for a missing value."""


def folder_columns(roots: Sequence[Root]) -> Iterator[Mapping[str, Any]]:
    """Return the columns of each file, as scalars of pyarrow by name.

    Raises
    ------
    SourceError
        The folders of one file name other columns than those of the first.
    """
    import pyarrow

    paths = [path for root in roots for path in root.paths]
    found = [_values(path, root.folder) for root in roots for path in root.paths]
    for path, values in zip(paths, found, strict=True):
        if values.keys() != found[0].keys():
            raise SourceError(
                f"{path} has the columns {_listed(values)} in the names of its folders, and {paths[0]} "
                f"has {_listed(found[0])}; pass files with the same columns"
            )
    kinds = {}
    for name in found[0] if found else ():
        given = [values[name] for values in found if values[name] != _NULL]
        whole = bool(given) and all(re.fullmatch(r"-?\d{1,18}", value) for value in given)
        kinds[name] = pyarrow.int64() if whole else pyarrow.string()
    return iter(
        [{name: _scalar(value, kinds[name]) for name, value in row.items()} for row in found]
    )


def condition_of(columns: Mapping[str, Any]) -> Any:
    """Return pyarrow's expression for the columns; there must be one."""
    from pyarrow.dataset import field

    return reduce(
        and_,
        (
            field(name) == value if value.is_valid else field(name).is_null()
            for name, value in columns.items()
        ),
    )


def _values(path: str, folder: str) -> dict[str, str]:
    parts = path[len(folder) :].split("/")[:-1]
    pairs = (part.partition("=") for part in parts if "=" in part)
    return {unquote(name): unquote(value) for name, _, value in pairs}


def _scalar(value: str, kind: Any) -> Any:
    import pyarrow

    if value == _NULL:
        return pyarrow.scalar(None, kind)
    return pyarrow.scalar(int(value) if pyarrow.types.is_integer(kind) else value, kind)


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(values) or "none"
