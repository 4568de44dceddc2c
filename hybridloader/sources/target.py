"""`Target`: a folder that shards are written to, of this machine or of a store.

Each file appears as a whole, or not at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hybridloader.sources.kept import write_whole
from hybridloader.sources.store import Stamp, Store

_PART = ".part-"
"""Prefix of the names of local files that are being written."""


class Target:
    """Folder that shards are written to.

    Parameters
    ----------
    url
        Path or URL of the folder; it is made with the first file.
    options
        Options of fsspec.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._store = Store(url, options)
        path = url if self._store.is_local else str(self._store.fs._strip_protocol(url))
        if self._store.is_local:
            path = os.path.abspath(path.partition("://")[2] or path)
        self._path = path.rstrip("/")
        self.url = url

    def path(self, name: str) -> str:
        return f"{self._path}/{name}"

    def names(self) -> set[str]:
        """Return the names that are there."""
        try:
            if self._store.is_local:
                return {*os.listdir(self._path)}
            self._store.forget_listings()
            found = self._store.fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return set()
        except Exception as error:
            self._store.raise_named(error, self._path)
        return {str(one).rstrip("/").rpartition("/")[2] for one in found}

    def read(self, name: str) -> bytes:
        return self._store.read(self.path(name))

    def put_bytes(self, name: str, data: bytes) -> None:
        try:
            if self._store.is_local:
                os.makedirs(self._path, exist_ok=True)
                write_whole(self.path(name), data)
            else:
                self._store.fs.pipe_file(self.path(name), data)
        except Exception as error:
            self._store.raise_named(error, self.path(name), "writing")

    @contextmanager
    def put(self, name: str) -> Iterator[Any]:
        """Yield a file to write; it appears under `name` after the block, unless that raises."""
        if self._store.is_local:
            os.makedirs(self._path, exist_ok=True)
            part = self.path(f"{_PART}{name}.{os.urandom(6).hex()}")
        else:
            number, part = tempfile.mkstemp()
            os.close(number)
        try:
            with open(part, "w+b") as file:
                yield file
            try:
                if self._store.is_local:
                    os.rename(part, self.path(name))
                else:
                    self._store.fs.put_file(part, self.path(name))
            except Exception as error:
                self._store.raise_named(error, self.path(name), "writing")
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)

    def stamp(self, name: str) -> Stamp:
        """Return size and mark of a file that has been written."""
        return self._store.stamp(self.path(name), refresh=True)

    def clear_parts(self) -> None:
        """Remove the files that a killed writer has left."""
        if self._store.is_local:
            for name in self.names():
                if name.startswith(_PART):
                    os.unlink(self.path(name))
