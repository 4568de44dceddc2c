"""`Store`: files of one place, as fsspec finds and reads them; opened in each worker for itself.

Errors are distinguished here: files that are not there, a store that did not serve, and bad data.
"""

from __future__ import annotations

import io
import os
import random
import sys
import threading
import zipfile
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from operator import methodcaller
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple, NoReturn, TypeVar

from hybridloader._support import system
from hybridloader._support.store_use import count, counting
from hybridloader._support.user_objects import add_note, attribute, described
from hybridloader.errors import SourceError, StoreError
from hybridloader.sources.per_worker import PerWorker

T = TypeVar("T")
R = TypeVar("R")

MANIFEST = "_pack.json"  # name of the file that describes the pack in a folder of shards

RETRY = 60.0  # seconds from the first failure of a request in which it is retried

_FIRST, _LONGEST = 0.1, 4.0
"""Seconds of the first and of the longest pause, at most; each pause is twice the one before."""

_PASSING = {408, 425, 429, 500, 502, 503, 504}  # HTTP status codes after which a retry may succeed

_jitter = random.SystemRandom()
"""Shared with no fork. It leaves the state of `random` unchanged."""

_FOR_GOOD = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that a retry would meet again; they stay unchanged."""

INSTALL = "pip install fsspec aiohttp"

_DAMAGED = (zipfile.BadZipFile, zlib.error)  # errors of an archive whose contents are bad

_MISTAKES = (TypeError, ValueError, ImportError, AttributeError, LookupError, AssertionError)
"""Errors of a program, which a retry would meet again. A client's errors may have these types too."""

_OPEN = 64  # local files that are kept open in a process

GAP = 64 * 1024
"""Largest gap between two parts of a file that one request reads: it costs less than a request."""

CONNECTIONS = 100  # connections to a store from a process: aiohttp's default

_SHORT = 3  # requests that return fewer bytes than announced before the file counts as shorter

_S3 = ("s3", "s3a")  # protocols of s3fs

_AT_ONCE = 8  # remote files that are indexed at the same time

_MARKS = ("ETag", "etag", "LastModified", "Last-Modified", "mtime", "md5Hash", "updated", "created")
"""Fields of a file system that change with the contents; the first one found is used."""


ahead = threading.local()
"""`ahead.reads` is True in a thread that prefetches: no worker waits for its requests."""


class Stamp(NamedTuple):
    """Mark of the contents of a file: it differs if they do."""

    size: int  # bytes; -1: unknown
    mark: str  # time of the last change, or a checksum; empty: unknown


class Ranges(NamedTuple):
    """Parts of a file that are fetched together, and where each lies in the bytes of all."""

    starts: list[int]
    stops: list[int]
    places: list[int]  # one more: the number of all bytes

    @classmethod
    def joining(cls, spans: Iterable[tuple[int, int]]) -> Ranges:
        """Return the parts that have these spans of bytes; those close together are one."""
        starts: list[int] = []
        stops: list[int] = []
        places: list[int] = []
        size, end = 0, -GAP - 1
        for start, stop in sorted(spans):
            if start - end > GAP:
                starts.append(start)
                stops.append(stop)
                places.append(size)
                size, end = size + stop - start, stop
            elif stop > end:
                stops[-1] = stop
                size, end = size + stop - end, stop
        places.append(size)
        return cls(starts, stops, places)

    def find(self, start: int, stop: int) -> int | None:
        """Return where the bytes from `start` to before `stop` of the file lie in the bytes of all."""
        part = bisect_right(self.starts, start) - 1
        if part < 0 or stop > self.stops[part]:
            return None
        return self.places[part] + start - self.starts[part]


class WrongLength(Exception):
    """A store did not send the bytes from `start` to before `stop`."""

    def __init__(self, start: int, stop: int, got: int) -> None:
        super().__init__(start, stop, got)
        self.asked, self.start, self.got = stop - start, start, got

    def named(self, where: str) -> Exception:
        named = (
            f"{where}: asked for the {self.asked} bytes from {self.start} on, and got {self.got}"
        )
        if self.got < self.asked:
            return StoreError(f"{named}: the store cut its answer short")
        return SourceError(
            f"{named}: the store sends whole files instead of ranges; copy the file to one that serves "
            "ranges"
        )


class Store:
    """Files of one place: of this machine, of a bucket or server, or of an archive."""

    def __init__(
        self,
        url: str,  # any of the place, or a path
        options: Mapping[str, Any],  # of fsspec for it, such as credentials
        retry: float = RETRY,  # seconds from the first failure of a request to its last try
    ) -> None:
        self._url, self._options, self._retry = url, dict(options), retry
        self.is_local = is_local(url)
        # A file in an archive has a file position. Other stores serve all threads.
        self._opened = PerWorker(partial(_opened, url, self._options), close=_nothing)
        self._files = PerWorker(_local_files, close=methodcaller("cache_clear"), per="process")

    @property
    def fs(self) -> Any:
        """The file system of this worker."""
        return self._opened()

    def close(self) -> None:
        """Close the files that this process, or this thread, has open."""
        self._opened.close()
        self._files.close()

    def name(self, path: str) -> str:
        """Return the name of a file for errors."""
        return path if self.is_local else str(self.fs.unstrip_protocol(path))

    def forget_listings(self) -> None:
        """Drop the listings that the file system keeps (s3fs without a limit), so that it asks its
        store."""
        if not self.is_local:
            self.fs.invalidate_cache()

    def stamp(self, path: str, *, refresh: bool = False) -> Stamp:
        """Return size and mark of a file; `refresh` asks its store, not the listings that are kept."""
        if self.is_local:
            return _stamp_of(os.stat(path))
        try:
            if refresh:  # as fsspec does after it has written a file
                self.fs.invalidate_cache(path)
                self.fs.invalidate_cache(self.fs._parent(path))
            info = self.patiently(lambda: _without_cache(self.fs).info(path))
        except Exception as error:
            self.raise_named(error, path)
        # Azure's listings have checksums without quotation marks.
        found = ((name, str(info.get(name) or "").strip('"')) for name in _MARKS)
        mark = next((f"{name} {value}" for name, value in found if value), "")
        return Stamp(-1 if info.get("size") is None else int(info["size"]), mark)

    def read(self, path: str, size: int = -1) -> bytes:
        """Return the contents of a file, of `size` bytes unless that is -1."""
        try:
            if self.is_local:
                with open(path, "rb", buffering=0) as file:
                    data = file.read()
            else:
                data = self.patiently(lambda: self.fs.cat_file(path))
        except Exception as error:
            self.raise_named(error, path)
        if size >= 0 and len(data) != size:
            raise SourceError(
                f"{self.name(path)} has {len(data)} bytes, and had {size} when it was listed: it has "
                "changed or was truncated; list it again"
            )
        return bytes(data)

    def read_ranges(
        self, path: str, ranges: Ranges, stamp: Stamp, what: Callable[[int], str]
    ) -> bytes:
        """Return the bytes of all parts; `what` of the first byte of a part names it in errors.

        A local file must have the `stamp`.
        """
        found = []
        for start, stop in zip(ranges.starts, ranges.stops, strict=True):
            try:
                if self.is_local:
                    data = self._files()(path, stamp).read(start, stop)
                else:
                    data = self.remote_range(path, start, stop)
            except SourceError as error:
                add_note(error, f"reading {what(start)}")
                raise
            except Exception as error:
                self.raise_named(error, path, what(start))
            if len(data) < stop - start:
                raise SourceError(
                    f"{self.name(path)}, {what(start)}: the file ends after {len(data)} of the "
                    f"{stop - start} bytes from byte {start}: it is truncated; write it again"
                )
            found.append(data)
        return found[0] if len(found) == 1 else b"".join(found)

    def remote_range(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to before `stop` of a remote file.

        Raises the errors of its file system, or `WrongLength`; `raise_named` converts them.
        """

        def asked() -> bytes:
            data = bytes(self.fs.cat_file(path, start=start, end=stop))
            if len(data) != stop - start:
                raise WrongLength(start, stop, len(data))
            return data

        return self.patiently(asked)

    def patiently(self, call: Callable[[], R]) -> R:
        """Return the result of `call`, which is repeated after errors of the store that may pass."""
        # A local name such as zip::b is no chain, which the file system of its "URL" would be.
        counts = counting() and not self.is_local
        # The pauses are random ("full jitter"), so that workers which failed together do not come back
        # together. None begins that would end more than `_retry` seconds after the first failure.
        longest, until, tries, short = _FIRST, None, 0, 0
        while True:
            try:
                return self._counted(call, int(tries > 0)) if counts else call()
            except Exception as error:
                now = monotonic()
                until = now + self._retry if until is None else until
                pause = _jitter.uniform(longest / 10, longest)
                tries, short = tries + 1, short + isinstance(error, WrongLength)
                if now + pause > until or short >= _SHORT or not self._may_pass(error):
                    raise
            sleep(pause)
            longest = min(2 * longest, _LONGEST)

    def _counted(self, call: Callable[[], R], again: int) -> R:
        """Make a request and count it; `again` is 1 if it repeats one."""
        began, size = perf_counter(), 0
        try:
            found = call()
            size = len(found) if isinstance(found, bytes) else 0
            return found
        finally:
            seconds = perf_counter() - began
            waited = 0.0 if attribute(ahead, "reads", False) else seconds
            count(self._url, requests=1, retries=again, bytes=size, seconds=seconds, waited=waited)

    def _may_pass(self, error: Exception) -> bool:
        if not isinstance(self._named(error, ""), StoreError):
            return False
        statuses = (attribute(one, "status") for one in (error, attribute(error, "__cause__")))
        status = next((one for one in statuses if isinstance(one, int)), None)
        return status is None or status in _PASSING

    def raise_named(self, error: Exception, path: str, what: str = "") -> NoReturn:
        """Raise `error`, or a hybridloader error in its place, that names the file and `what` of it."""
        named = self._named(error, path, what)
        if named is error:
            raise
        raise named from error

    def _named(self, error: Exception, path: str, what: str = "") -> Exception:
        """Return `error`, or a hybridloader error, that names the file."""
        try:
            where = f"{self.name(path)}{what and ', '}{what}"
        except Exception:  # the store could not be opened
            where = f"{path}{what and ', '}{what}"
        if isinstance(error, (SourceError, StoreError, MemoryError)):
            return error
        if isinstance(error, WrongLength):
            return error.named(where)
        # For HTTP, fsspec reports a missing file for every answer to its request for the size.
        cause = error.__cause__
        unknown = isinstance(error, FileNotFoundError) and _is_of_connection(cause)
        gone = attribute(cause, "status", 503 if unknown else 404) in (404, 410)
        damaged = isinstance(error, _DAMAGED) or (isinstance(error, KeyError) and "::" in self._url)
        mistake = isinstance(error, _MISTAKES) and type(error).__module__ == "builtins"
        if (
            (isinstance(error, _FOR_GOOD) and gone)
            or (isinstance(error, OSError) and self.is_local)
            or (mistake and not damaged)
        ):
            add_note(error, f"reading {where}")
            return error
        text = described(error if cause is None or gone else cause).rstrip(": ")
        if damaged:
            return SourceError(f"{where} can't be read: {text}")
        return StoreError(
            f"{where} was not served: {text}. Requests that a retry could help were repeated for up to "
            f"{self._retry:g} s; a larger retry_seconds= waits longer for the store"
        )


def each(function: Callable[[T], R], files: Sequence[T], stores: Iterable[Store]) -> list[R]:
    """Return the result of `function` for each of `files`, which lie in `stores`.

    It is called for several at a time if it waits for a store.
    """
    if len(files) < 2 or all(store.is_local for store in stores):
        return [*map(function, files)]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return [*threads.map(function, files)]


def _nothing(_: Any) -> None:
    """Leave it to its destructor: several threads may use one file system."""


def is_local(url: str) -> bool:
    """Return True if `url` names files of this machine; without ``://``, ``::`` is a part of a name."""
    protocol, separator, path = url.partition("://")
    return not separator or (protocol in ("file", "local") and "::" not in path)


def fsspec_module(url: str) -> Any:
    """Import fsspec. Raises `ImportError` with the line that installs it."""
    try:
        import fsspec.core
    except ImportError as error:
        raise ImportError(f"{url} requires fsspec: {INSTALL}") from error
    return fsspec


def _opened(url: str, options: Mapping[str, Any]) -> Any:
    fsspec = fsspec_module(url)
    options = _with_connections(url, options)
    try:
        _, chained, inner = url.rpartition("::")
        if chained:  # opening an archive requests the size of its file
            # The same instance: fsspec keeps one for each set of options.
            of_inner = options.get(inner.partition("://")[0], {})
            fsspec.core.url_to_fs(inner, **of_inner)[0].invalidate_cache()
        fs = fsspec.core.url_to_fs(url, **options)[0]
        if not fs.async_impl:  # only this thread uses it, and it may have old listings
            fs.invalidate_cache()
        return fs
    except ImportError as error:  # the error of fsspec names the package to install
        raise ImportError(f"{url} can't be opened: {error}. For http(s): {INSTALL}") from error
    except zipfile.BadZipFile as error:
        raise SourceError(f"{url} is not a zip archive, or it is truncated: {error}") from error


def _is_of_connection(error: Any) -> bool:
    """True of an error without an answer, after which it is not known whether a file is there."""
    if not isinstance(error, Exception) or isinstance(error, _FOR_GOOD):
        return False
    return isinstance(error, OSError) or type(error).__module__.startswith(("aiohttp.", "asyncio."))


def _without_cache(fs: Any) -> Any:
    """Return the file system that a cache of fsspec reads: it has more fields of its files."""
    cached = sys.modules.get("fsspec.implementations.cached")
    return fs.fs if cached is not None and isinstance(fs, cached.CachingFileSystem) else fs


def _with_connections(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with room for many requests at once: s3fs has 10 connections by default."""
    first, *others = (part.partition("://")[0] for part in url.split("::"))
    found = dict(options)
    if first in _S3:
        found["config_kwargs"] = {
            "max_pool_connections": CONNECTIONS,
            **found.get("config_kwargs", {}),
        }
    for protocol in others:
        if protocol in _S3:
            found[protocol] = _with_connections(f"{protocol}://", found.get(protocol, {}))
    return found


def _stamp_of(stat: os.stat_result) -> Stamp:
    return Stamp(stat.st_size, f"mtime {stat.st_mtime_ns}")


def check_unchanged(name: str, indexed: Stamp, found: Stamp, source: str) -> None:
    """Raise `SourceError` if the file `name` of a `source` has another stamp than when indexed."""
    if found != indexed:
        raise SourceError(
            f"{name} has changed since it was indexed: it had {indexed.size} bytes ({indexed.mark}), "
            f"and has {found.size} ({found.mark}); make the {source} again"
        )


def write_whole(path: str, data: Any) -> None:
    """Write a local file at once or not at all; a link at `path` is replaced, not written through."""
    beside = f"{path}.{os.urandom(6).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.BINARY
    try:
        with open(os.open(beside, flags, 0o666), "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


class _LocalFile:
    """Open local file, closed when nothing refers to it. Raises `SourceError` for another `stamp`."""

    def __init__(self, path: str, stamp: Stamp) -> None:
        self._path, self._fd = path, os.open(path, os.O_RDONLY)
        check_unchanged(path, stamp, _stamp_of(os.fstat(self._fd)), "source")

    def read(self, start: int, stop: int) -> bytes:
        if not system.PREAD:
            with open(self._path, "rb", buffering=0) as own:
                own.seek(start)
                return own.read(stop - start)
        parts: list[bytes] = []
        while start < stop:
            part = os.pread(self._fd, stop - start, start)  # a call returns at most 2 GiB
            if not part:
                break
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending() and hasattr(self, "_fd"):
            os.close(self._fd)


def _local_files() -> Any:
    """Return a function that opens local files; the last `_OPEN` of them stay open."""
    return lru_cache(_OPEN)(_LocalFile)


class RemoteFile(io.RawIOBase, ABC):
    """A remote file of `size` bytes. A subclass defines `fetch`, which chooses the requests."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        self.store, self.path, self.size = store, path, size
        self._at = 0

    @abstractmethod
    def fetch(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to before `stop`, of which there is at least one."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        start = self._at
        stop = self.size if size < 0 else min(start + size, self.size)
        self._at = max(start, stop)
        return self.fetch(start, stop) if start < stop else b""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at
