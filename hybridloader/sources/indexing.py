"""Indices of archives: read where they are kept, else made by one of the processes that share a folder.

`Tar` calls `indexed`. The command ``hybridloader index`` calls `index_archives`, which makes the same
files ahead of time.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from hybridloader._support import system
from hybridloader._support.caller import warn_once
from hybridloader._support.ranks import local_rank, ranks_here
from hybridloader.sources.headers import open_headers
from hybridloader.sources.kept import MANIFEST
from hybridloader.sources.listing import Urls, list_files
from hybridloader.sources.patience import RETRY
from hybridloader.sources.store import Stamp, Store, each
from hybridloader.sources.tar_index import (
    TarIndex,
    load_index,
    make_index,
    save_index,
)

fcntl = system.module("fcntl")  # None on Windows: each process makes the indices that are missing

BESIDE = "beside"
"""Value of `index` that keeps indices next to their archives."""

SUFFIX = ".index"
"""Suffix of the name of an index."""

_LOCK = ".lock"
"""File in a folder of indices; each index has a byte of it to lock."""

_NAMED = 100
"""Characters of an archive's name in the name of its index; most file systems allow 255 bytes."""

Place = tuple[Store, str]
"""Store of an archive, and its path there."""


def archives(urls: Urls, options: Mapping[str, Any], retry: float = RETRY) -> list[Place]:
    """List the archives that `urls` name; `retry` is that of `list_files`.

    Raises `FileNotFoundError` if there are none.
    """
    roots, stores = list_files(urls, options, retry=retry)
    places = [
        (store, path)
        for root, store in zip(roots, stores, strict=True)
        for path in root.paths
        if not path.endswith((SUFFIX, f"/{MANIFEST}"))
    ]
    if not places:
        raise FileNotFoundError(
            f"{urls!r:.200} names only indices and no archives; pass the archives"
        )
    return places


def indexed(places: Sequence[Place], kept: str | None) -> list[TarIndex]:
    """Return the index of each archive, kept or made.

    Processes that share a folder divide the archives among them: each makes those that no other makes
    at that time, then waits for the rest.
    """
    stores = [store for store, _ in places]
    with _Locks(kept) as locks:
        found = each(partial(_index_of, kept=kept, locks=locks, wait=False), places, stores)
        for at, place in enumerate(places):
            if found[at] is None:
                found[at] = _index_of(place, kept, locks, wait=True)
    return [one for one in found if one is not None]


def _index_of(place: Place, kept: str | None, locks: _Locks, wait: bool) -> TarIndex | None:
    """Return the index of one archive; None if another process makes it, unless this shall `wait`."""
    store, path = place
    stamp = store.stamp(path)
    file = None if kept is None else _file_of(store, path, kept)
    remote = kept == BESIDE and not store.is_local
    found = _loaded(store, file, stamp, remote)
    if found is not None:
        return found
    if stamp == Stamp(stamp.size, ""):  # a change would not be noticed, so no index is kept
        _warn_many_ranks(store)
        return _made(store, path, stamp)
    if file is None or remote:
        _refuse_many_ranks(store, path)
        return _made(store, path, stamp)
    with locks.held(store, file, wait) as mine:
        if not mine:
            return None
        found = load_index(file, stamp)  # another process may have made it
        if found is None:
            found = _made(store, path, stamp)
            _save(file, found)
    return found


def _made(store: Store, path: str, stamp: Stamp) -> TarIndex:
    name = store.name(path)
    with open_headers(store, path, stamp) as file:
        try:
            return make_index(name, file, stamp)
        except Exception as error:
            store.raise_named(error, path)


def _refuse_many_ranks(store: Store, path: str) -> None:
    ranks = _ranks()
    if ranks > 1 and not store.is_local:
        name = store.name(path)
        raise ValueError(
            f"{name} has no kept index, so each of the {ranks} ranks of this machine would read the "
            "archive; set index= to a folder that all ranks share, where one rank makes each index. To "
            f"fill the folder ahead of time, run: hybridloader index {name} ... -o FOLDER"
        )


def _warn_many_ranks(store: Store) -> None:
    ranks = _ranks()
    if ranks > 1 and not store.is_local:
        warn_once(
            f"each of the {ranks} ranks of this machine reads the headers of all archives: the store "
            "reports neither a time nor a checksum, so a change would not be noticed, and no index is "
            "kept; copy the archives to a store that reports one of them",
            "read-by-each-rank",
        )


def _ranks() -> int:
    """Return the number of ranks on this machine, or how many there are at least."""
    return max(ranks_here(), local_rank() + 1)


def _loaded(store: Store, file: str | None, stamp: Stamp, remote: bool) -> TarIndex | None:
    if file is None or not remote:
        return None if file is None else load_index(file, stamp)
    try:
        return load_index(io.BytesIO(store.read(file)), stamp)
    except FileNotFoundError:
        return None


def _save(file: str, index: TarIndex) -> None:
    try:
        save_index(file, index)
    except OSError as error:  # this index still works; the next process indexes the archive again
        warn_once(
            f"indices of archives are not kept in {os.path.dirname(file)}: {type(error).__name__}: "
            f"{error.strerror}; set index= to a writable folder",
            "index-not-kept",
        )


def _file_of(store: Store, path: str, kept: str) -> str:
    """Return the path of the file of an index: on this machine, or in the store of the archive."""
    if kept == BESIDE:
        return f"{path}{SUFFIX}"
    name = store.name(path)
    if name.startswith(("http://", "https://")):
        name = name.partition("?")[0]  # a query may be a signature, which differs each time
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return os.path.join(kept, f"{os.path.basename(name)[:_NAMED]}.{digest}{SUFFIX}")


class _Locks:
    """Locks of indices against other processes: bytes of one file in the folder of the indices.

    A process that ends, also one that is killed, gives its locks back.
    """

    def __init__(self, kept: str | None) -> None:
        self._folder = None if kept in (None, BESIDE) else kept
        self._lock = threading.Lock()
        # All the mutable state:
        self._file: int | None = None

    def __enter__(self) -> _Locks:
        if self._folder is not None:
            os.makedirs(self._folder, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._file is not None:
            os.close(self._file)

    @contextmanager
    def held(self, store: Store, file: str, wait: bool) -> Iterator[bool]:
        """Hold the lock of an index; yield False if another process holds it and this shall not wait.

        That of a local archive is made in less time than a lock is worth.
        """
        if fcntl is None or self._folder is None or store.is_local:
            yield True
            return
        try:
            with self._lock:
                if self._file is None:
                    flags = os.O_RDWR | os.O_CREAT
                    self._file = os.open(os.path.join(self._folder, _LOCK), flags, 0o666)
        except OSError:  # the folder isn't writable; saving the index warns about it
            yield True
            return
        byte = int(hashlib.sha256(os.path.basename(file).encode()).hexdigest()[:12], 16)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
        except (BlockingIOError, PermissionError):
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


class Failure(NamedTuple):
    """Archive that could not be indexed."""

    name: str
    error: Exception


def index_archives(
    urls: Urls,
    folder: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    at_once: int = 8,
    report: Callable[[int, int, str], object] = lambda *_: None,
) -> list[Failure]:
    """Index archives into a folder that `Tar` reads as ``index=folder``; those that are there, stay.

    Parameters
    ----------
    urls, storage_options
        See `Tar`.
    folder
        Local folder, which is made if it is not there.
    at_once
        Number of archives that are read at a time.
    report
        Called with the number of archives that are done, the number of all, and the name of one.

    Returns
    -------
    list of Failure
        Archives that could not be indexed, or whose index can't be kept. The others have theirs.

    Raises
    ------
    FileNotFoundError, SourceError, ValueError
        `urls` names no archives.
    """
    places = archives(urls, storage_options or {})
    failures = []
    with _Locks(folder) as locks, ThreadPoolExecutor(at_once) as threads:
        asked = {threads.submit(_kept, place, folder, locks): place for place in places}
        try:
            for done, future in enumerate(as_completed(asked), 1):
                store, path = asked[future]
                error = future.exception()
                if isinstance(error, Exception):
                    failures.append(Failure(store.name(path), error))
                report(done, len(places), store.name(path))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(failures, key=lambda failure: failure.name)


def _kept(place: Place, folder: str, locks: _Locks) -> None:
    index = _index_of(place, folder, locks, wait=True)
    store, path = place
    if index is not None and index.stamp == Stamp(index.stamp.size, ""):
        raise ValueError(
            f"{store.name(path)}: the store reports neither a time nor a checksum, so a change would "
            "not be noticed, and no index is kept; copy the archive to a store that reports one of them"
        )
