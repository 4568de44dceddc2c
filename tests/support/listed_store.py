"""A store in memory whose file system keeps each listing for ever, as s3fs does, and counts requests."""

from __future__ import annotations

import hashlib
import io
from typing import Any, ClassVar

from fsspec.spec import AbstractFileSystem


class ListedStore(AbstractFileSystem):  # type: ignore[misc]
    """Files by path, such as ``bucket/a.txt``; each thread has an instance, with listings of its own.

    As Azure's, a listing has checksums without quotation marks, and only `info` has them with these.
    """

    protocol = "listed"
    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []
    """``list``, ``info`` or ``get``, and the path."""

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.requests.append(f"list {path}")
            self.dircache[path] = [*self._listed(path).values()]
        found = self.dircache[path]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]

    def _listed(self, path: str) -> dict[str, dict[str, Any]]:
        found = {}
        for name in self.files:
            if name.startswith(f"{path}/"):
                end = name.find("/", len(path) + 1)
                entry = self._entry(name, "") if end < 0 else _folder(name[:end])
                found[entry["name"]] = entry
        return found

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        found = self._ls_from_cache(path)
        if found is not None:
            return next((entry for entry in found if entry["name"] == path), _folder(path))
        self.requests.append(f"info {path}")
        if path in self.files:
            return self._entry(path, '"')
        if not self._listed(path):
            raise FileNotFoundError(path)
        return _folder(path)

    def _entry(self, path: str, quote: str) -> dict[str, Any]:
        data = self.files[path]
        mark = hashlib.sha256(data).hexdigest()
        return {"name": path, "size": len(data), "type": "file", "ETag": f"{quote}{mark}{quote}"}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        size = self.info(path)["size"]
        self.requests.append(f"get {path}")
        return io.BytesIO(self.files[path][:size])

    def invalidate_cache(self, path: str | None = None) -> None:
        if path is None:
            self.dircache.clear()
        else:  # neither the folders around it, as Azure's, nor those below it, as Amazon's
            self.dircache.pop(self._strip_protocol(path), None)


class SharedListedStore(ListedStore):
    """As the stores whose requests an event loop makes: all threads share an instance."""

    protocol = "shared-listed"
    async_impl = True

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        path = self._strip_protocol(path)
        self.requests.append(f"get {path}")
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][start:end]


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}
