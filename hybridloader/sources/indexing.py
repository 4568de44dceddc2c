"""Indices of archives: read where they are kept, else made by one of the processes that share a folder.

`Tar` calls `indexed`. The command ``hybridloader index`` calls `index_archives`, which makes the same
files ahead of time.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from hybridloader._support import system
from hybridloader._support.text import warn_once
from hybridloader.memory.limits import local_rank, ranks_here
from hybridloader.sources.listing import Urls, list_files
from hybridloader.sources.store import MANIFEST, RETRY, Stamp, Store, each
from hybridloader.sources.tar_index import Headers, TarIndex, load_index, make_index, save_index

fcntl = system.module("fcntl")  # None on Windows: each process makes the indices that are missing

BESIDE = "beside"
"""Value of `index` that keeps indices next to their archives."""

SUFFIX = ".index"
"""Suffix of the name of an index."""

_LOCK = ".lock"
"""File in a folder of indices that is locked while they are made."""

_NAMED = 100
"""Characters of an archive's name in the name of its index; most file systems allow 255 bytes."""

Place = tuple[Store, str]
"""Store of an archive, and its path there."""

Wanted = tuple[Place, Stamp]


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

    Of the processes that share a folder one makes those that are missing, while the others wait.
    """
    stores = [store for store, _ in places]
    stamps = each(lambda place: place[0].stamp(place[1]), places, stores)
    wanted = [*zip(places, stamps, strict=True)]
    found = each(partial(_loaded, kept=kept), wanted, stores)
    missing = [one for one, index in zip(wanted, found, strict=True) if index is None]
    if missing:
        with _alone(kept):
            made = each(partial(_index_of, kept=kept), missing, [place[0] for place, _ in missing])
        left = iter(made)
        found = [index or next(left) for index in found]
    return [index for index in found if index is not None]


def _index_of(wanted: Wanted, kept: str | None) -> TarIndex:
    """Return the index of one archive, which is kept if it can be."""
    (store, path), stamp = wanted
    if stamp == Stamp(stamp.size, ""):  # a change would not be noticed, so no index is kept
        _warn_many_ranks(store)
        return _made(store, path, stamp)
    if kept is None or (kept == BESIDE and not store.is_local):
        _refuse_many_ranks(store, path)
        return _made(store, path, stamp)
    file = _file_of(store, path, kept)
    index = load_index(file, stamp)  # another process may have made it
    if index is None:
        index = _made(store, path, stamp)
        _save(file, index)
    return index


def _made(store: Store, path: str, stamp: Stamp) -> TarIndex:
    name = store.name(path)
    whole = store.is_local or stamp.size < 0
    with store.open(path) if whole else Headers(store, path, stamp.size) as file:
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


def _loaded(wanted: Wanted, kept: str | None) -> TarIndex | None:
    """Return the kept index of an archive, if there is one with its stamp."""
    (store, path), stamp = wanted
    if kept is None:
        return None
    file = _file_of(store, path, kept)
    if kept != BESIDE or store.is_local:
        return load_index(file, stamp)
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


@contextmanager
def _alone(kept: str | None) -> Iterator[None]:
    """Hold the lock of a folder of indices; a process that ends, also by a signal, gives it back."""
    if kept in (None, BESIDE):
        yield
        return
    assert kept is not None
    os.makedirs(kept, exist_ok=True)
    try:
        lock = open(os.path.join(kept, _LOCK), "ab")  # noqa: SIM115
    except OSError:  # the folder isn't writable; saving an index warns about it
        yield
        return
    with lock:
        if fcntl is not None:
            with suppress(
                OSError
            ):  # a file system without locks: each process makes what is missing
                fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


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
    with _alone(folder), ThreadPoolExecutor(at_once) as threads:
        asked = {threads.submit(_keep, place, folder): place for place in places}
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


def _keep(place: Place, folder: str) -> None:
    store, path = place
    index = _index_of((place, store.stamp(path)), folder)
    if index.stamp == Stamp(index.stamp.size, ""):
        raise ValueError(
            f"{store.name(path)}: the store reports neither a time nor a checksum, so a change would "
            "not be noticed, and no index is kept; copy the archive to a store that reports one of them"
        )
