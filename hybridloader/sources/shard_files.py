"""Shards that are being written: samples go in, one file comes out. Tar and Parquet.

Nothing here knows where the file will lie, or how many samples a shard has.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any

from hybridloader._support.text import short
from hybridloader.sources.indexing import name_parts

KEY = "__key__"
"""Name of a sample's key."""

ROWS = 1024
"""Rows of a row group, which is read and decoded as a whole."""


class TarFile:
    """Tar archive with one member for each field of a sample, as webdataset names them."""

    def __init__(self, file: Any) -> None:
        self.samples = self.size = 0  # bytes, with headers
        self.schema = None
        self._archive = tarfile.open(fileobj=file, mode="w")  # noqa: SIM115  # `finish` closes it
        self._names: set[str] = set()

    def add(self, sample: Any, number: int) -> None:
        fields = fields_of(sample, number)
        key = fields.pop(KEY)
        members = []
        for extension, value in fields.items():
            name = f"{key}.{extension}"
            outside = key.startswith("/") or ".." in key.split("/")
            if outside or name_parts(name) != (key, extension):
                raise ValueError(
                    f"sample {number}: {name!r} would not be read as the member {extension!r} of "
                    f"{key!r}: a key has no dot after its last slash and no '..', no part of the name "
                    "is hidden or like '__this__', and extensions are lowercase"
                )
            if name in self._names:
                raise ValueError(
                    f"sample {number}: its shard already has a member {name!r}; give each sample a "
                    "different __key__"
                )
            members.append((name, _encoded(value, extension, number)))
        if not members:
            raise ValueError(
                f"sample {number}, {key!r}, has no fields, so it would be lost; add a field"
            )
        for name, data in members:
            # Without times and owners, the same samples make the same archive.
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            self._archive.addfile(member, io.BytesIO(data))
            self._names.add(name)
            self.size += 512 + -len(data) // 512 * -512
        self.samples += 1

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        self._archive.close()


class ParquetFile:
    """Parquet file with a row for each sample.

    Parameters
    ----------
    schema
        Schema of pyarrow; None: that of the first rows.
    """

    def __init__(self, file: Any, schema: Any) -> None:
        self._file = file
        # All the mutable state:
        self.samples = self.size = 0  # bytes before compression
        self.schema = schema
        self._rows: list[dict[str, Any]] = []
        self._writer: Any = None

    def add(self, sample: Any, number: int) -> None:
        row = fields_of(sample, number)
        if KEY not in sample:
            del row[KEY]
        self._rows.append(row)
        self.samples += 1
        if len(self._rows) == ROWS:
            self._write(number)

    def _write(self, number: int) -> None:
        import pyarrow
        from pyarrow import parquet

        rows, self._rows = self._rows, []
        names = dict.fromkeys(name for row in rows for name in row)
        try:
            if self.schema is None:
                columns = {name: [row.get(name) for row in rows] for name in names}
                self.schema = pyarrow.table(columns).schema
            if more := sorted({*names} - {*self.schema.names}):
                raise ValueError(f"the schema has no column {', '.join(more)}")
            table = pyarrow.Table.from_pylist(rows, schema=self.schema)
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise ValueError(
                f"samples {number + 1 - len(rows)} to {number} don't fit the schema of the first ones: "
                f"{error}; pass schema="
            ) from error
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._file, self.schema)
        self._writer.write_table(table, row_group_size=ROWS)
        self.size += table.nbytes

    def finish(self) -> None:
        if self._rows or self._writer is None:
            self._write(self.samples - 1)
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def fields_of(sample: Any, number: int) -> dict[str, Any]:
    if not isinstance(sample, Mapping):
        raise TypeError(
            f"sample {number} must be a dict of fields by name, such as {{'jpg': b'...', 'cls': 3}}, "
            f"not {short(sample)}; pass encode=, a function that returns such a dict"
        )
    fields = {name: value for name, value in sample.items() if name[:2] != "__"}
    return {KEY: str(sample.get(KEY, f"{number:09d}")), **fields}


def _encoded(value: Any, extension: str, number: int) -> bytes:
    """Return the contents of a member: bytes, text, a number, an array (npy) or JSON (json)."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    if extension.rpartition(".")[2] == "json":
        return json.dumps(value).encode()
    if extension.rpartition(".")[2] == "npy":
        import numpy as np

        packed = io.BytesIO()
        np.save(packed, np.asarray(value), allow_pickle=False)
        return packed.getvalue()
    if hasattr(value, "__index__") or isinstance(value, float):
        return str(value).encode()
    raise TypeError(
        f"sample {number}: {extension!r} is {short(value)}, which is neither bytes, text nor a number; "
        "name an array .npy, name JSON .json, or pass encode="
    )
