"""`Files`: a dataset of files, one sample each, from any place that fsspec knows.

All sources list their files by `list_files`: globs and folders of several places, in an order that is
always the same. `Texts` keeps many names as two arrays, which workers of other processes map instead of
copying them.
"""

from __future__ import annotations

import itertools
import operator
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple, overload

import numpy as np

from hybridloader._support.text import flag, function, seconds
from hybridloader._support.user_objects import add_note
from hybridloader.errors import SourceError
from hybridloader.sources.shards import Shards
from hybridloader.sources.store import RETRY, Store, fsspec_module, is_local

_RANGE = re.compile(r"(?<!\[)\{([0-9]+\.\.[0-9]+)\}")

_OTHER_BRACES = re.compile(r"(?<!\[)\{[^}]*(?:,|\.\.)[^}]*\}")
"""Braces that a shell would expand, or that are a mistake, in a URL without its ranges."""

_AROUND = "around"  # type of a link to a folder that contains the link

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Root(NamedTuple):
    """Files that one URL names."""

    url: str
    folder: str  # common parent of the names in the URL, without a final slash
    paths: list[str]  # sorted
    sizes: list[int]  # bytes; -1: unknown
    store: Store


def _expanded(url: str) -> Iterable[str]:
    """Write out ranges of numbers, as bash does, unless they name a local file.

    Raises `ValueError` for other braces.
    """
    if "{" not in url or (is_local(url) and os.path.exists(url)):
        return [url]
    parts = _RANGE.split(url)
    if _OTHER_BRACES.search("".join(parts[::2])) is not None:
        raise ValueError(
            f"{url}: these braces are not expanded, only ranges such as {{000..127}} are; list the "
            "names one by one, or write [{] for a { that is part of a name"
        )
    choices = [_range(*part.split("..")) if at % 2 else [part] for at, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _range(first: str, last: str) -> list[str]:
    """Count from `first` to `last`, up or down; if one has zeros in front, all numbers are as long."""
    padded = any(end[0] == "0" and len(end) > 1 for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    start, stop = int(first), int(last)
    way = 1 if start <= stop else -1
    return [f"{number:0{width}d}" for number in range(start, stop + way, way)]


def list_files(
    urls: Urls,  # of files; of folders, which end in ``/`` unless they are local; or globs
    options: Mapping[str, Any],  # of fsspec
    *,
    # Beginnings of names that are left out of a folder, at any depth:
    ignored: tuple[str, ...] = (),
    retry: float = RETRY,  # seconds within which a request that failed is made again
) -> list[Root]:
    """List the files that `urls` name; the URLs of one place share its store.

    A file that several name is only in the first of them. Stores are asked, not the listings that
    fsspec keeps.

    Raises `ValueError` if no files are named, and `FileNotFoundError` if a glob or a folder has none, or
    a local file is not there. Raises `SourceError` if a name leads out of its folder.
    """
    seconds("retry_seconds", retry)
    many = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    wanted = [one for url in many for one in _expanded(os.fspath(url))]
    if not wanted:
        raise ValueError("no files were named; pass a path, a URL, a glob, or a list of these")
    places = [_place_of(url) for url in wanted]
    urls_by_place = dict(zip(places, wanted, strict=True))
    by_place = {place: Store(url, options, retry) for place, url in urls_by_place.items()}
    stores = [by_place[place] for place in places]
    for store in by_place.values():
        store.forget_listings()
    seen: set[tuple[Store, str]] = set()
    roots = []
    for url, store in zip(wanted, stores, strict=True):
        root = store.patiently(partial(_listed, url, store, ignored))
        fresh = [at for at, path in enumerate(root.paths) if (store, path) not in seen]
        seen.update((store, path) for path in root.paths)
        paths, sizes = [root.paths[at] for at in fresh], [root.sizes[at] for at in fresh]
        roots.append(root._replace(paths=paths, sizes=sizes))
    return roots


def _place_of(url: str) -> str:
    """Return the part of a URL that names its file system."""
    if is_local(url):
        return "file"
    first, chained, rest = url.partition("::")
    protocol, separator, path = first.partition("://")
    if not separator:  # such as simplecache::, which names no file
        return f"{first}::{_place_of(rest)}"
    if chained:
        return f"{protocol}::{rest}"
    return f"{protocol}://{path.partition('/')[0]}"


def _listed(url: str, store: Store, ignored: tuple[str, ...]) -> Root:
    fs = _following_links(url) if store.is_local else store.fs
    # The first part of a chain that names a file: of simplecache::http://a, the second.
    named = url if store.is_local else next(part for part in url.split("::") if "://" in part)
    path = str(fs._strip_protocol(named))
    asks = "://" not in url or "::" in url[url.find(named) :]  # in http, ? begins a query
    magic = re.search(r"[*?\[]" if asks else r"[*\[]", path)
    if magic is not None and not (store.is_local and os.path.exists(path)):
        found = fs.glob(path, detail=True)
        folder = path[: magic.start()].rpartition("/")[0]
    elif named.endswith("/") or (store.is_local and os.path.isdir(path)):
        folder = path.rstrip("/")
        found = fs.find(folder + "/" if folder else "", detail=True)
        if ignored:
            hidden = re.compile(f"(?:^|/)(?:{'|'.join(map(re.escape, ignored))})")
            found = {n: info for n, info in found.items() if not hidden.search(n, len(folder))}
    else:  # not checked: a list of a million URLs would take as many requests
        if store.is_local:
            return Root(url, os.path.dirname(path), [path], [os.stat(path).st_size], store)
        return Root(url, path.rpartition("/")[0], [path], [-1], store)
    files = {n: info for n, info in found.items() if info.get("type") not in ("directory", _AROUND)}
    if not files:
        pattern = "" if magic is None else "; *, ? and [ are read as a pattern; write [[] for a ["
        raise FileNotFoundError(f"{url} matches no files{pattern}")
    for name in files:
        if ".." in PurePosixPath(name.replace("\\", "/")).parts and ".." not in url:
            raise SourceError(f"{url} lists {name!r}, a name outside its folder")
    paths = sorted(files)
    sizes = [files[name].get("size") for name in paths]
    return Root(url, folder, paths, [-1 if size is None else int(size) for size in sizes], store)


def _following_links(url: str) -> Any:
    """Return a local file system that goes into folders that are links, as torchvision's folders do.

    fsspec's own lists such a link as if it were a file, and finds nothing below it. A link to a folder
    around it is left out: its files are listed there, and to follow it would never end.
    """
    fsspec_module(url)
    from fsspec.implementations.local import LocalFileSystem

    class Following(LocalFileSystem):  # type: ignore[misc]
        cachable = False

        def info(self, path: Any, **kwargs: Any) -> Any:
            found = super().info(path, **kwargs)
            if found["islink"] and found["type"] == "other" and os.path.isdir(found["name"]):
                found["type"] = _AROUND if _leads_around(found["name"]) else "directory"
            return found

    return Following()


def _leads_around(link: str) -> bool:
    """Return True if a link to a folder is itself in that folder."""
    target, folder = os.path.realpath(link), os.path.realpath(os.path.dirname(link))
    return os.path.commonpath([target, folder]) == target


_AT_ONCE = 4096  # texts that an iterator decodes at a time


class Texts(Sequence[str]):
    """Texts that do not change.

    A list of a million names takes some 100 MB, and in a forked process each name that is looked at is
    copied with its page. Two arrays are sent to fresh processes as they are.

    Parameters
    ----------
    texts
        Any texts; names of files that are not UTF-8 too.

    Examples
    --------
    >>> names = Texts(["a.jpg", "b.jpg"])
    >>> names[-1], names[:1], len(names), "b.jpg" in names
    ('b.jpg', ['a.jpg'], 2, True)
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self._data = np.frombuffer(b"".join(parts), np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        at = operator.index(index)
        at += len(self) if at < 0 else 0
        if not 0 <= at < len(self):
            raise IndexError(f"no text {index} of {len(self)}")
        start, stop = self._ends[at : at + 2].tolist()
        return self._data[start:stop].tobytes().decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _AT_ONCE):
            ends = self._ends[first : first + _AT_ONCE + 1].tolist()
            data = self._data[ends[0] : ends[-1]].tobytes()
            for start, stop in itertools.pairwise(ends):
                yield data[start - ends[0] : stop - ends[0]].decode("utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Texts, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        more = ", ..." if len(self) > 3 else ""
        return f"Texts([{', '.join(map(repr, self[:3]))}{more}])"


class Files(Shards[Any]):
    """A dataset of files: the contents of each are a sample.

    Files are listed once, when this object is made, and workers get the list; a pickle of this object
    keeps it for the next time. Samples have the order of `urls`; within each of these, files are sorted
    by name.

    Parameters
    ----------
    urls
        A path or URL, or several: of a file; of a folder, with all files below it (one that is not local
        ends in ``/``); or a glob, in which ``**`` stands for any number of folders and ``{000..123}``
        for these numbers, as in bash. Any URL of fsspec, such as ``s3://``, ``gs://``, ``https://``,
        ``memory://`` or ``zip://*.jpg::file:///data/photos.zip``. A file that several of them name is
        there once; to have some more often, use a `WeightedSampler`.
    decode
        Function of the bytes that makes the sample, such as ``bytes.decode``. Default: the bytes.
    class_from_folder
        True gives pairs of a sample and the number of its class: the name of its folder, the first one
        below the folder or glob of `urls`. `classes` has these names, sorted.
    retry_seconds
        Seconds from the first failure of a request within which it is made again, with pauses that
        grow: answers such as 503, timeouts, broken connections. 0: never.
    storage_options
        Options of fsspec for the places of `urls`, such as credentials.

    Attributes
    ----------
    paths : Texts
        Path of each file, without a protocol.
    classes : list of str
        Names of the classes; empty unless asked for.

    Raises
    ------
    FileNotFoundError
        A glob or folder has no files, or a local file is not there.
    ImportError
        The library that reads such a URL is not installed; the message has the line that installs it.

    Notes
    -----
    Reading a file raises `FileNotFoundError` if it was deleted, `SourceError` if its size differs from
    the listed one, and `StoreError` if its store did not serve it.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> folder = tempfile.TemporaryDirectory()
    >>> for name in ("cat/1.txt", "cat/2.txt", "dog/1.txt"):
    ...     path = pathlib.Path(folder.name, name)
    ...     path.parent.mkdir(exist_ok=True)
    ...     _ = path.write_text(name.upper())
    >>> files = Files(folder.name, decode=bytes.decode, class_from_folder=True)
    >>> len(files), files[2], files.classes
    (3, ('DOG/1.TXT', 1), ['cat', 'dog'])
    >>> folder.cleanup()
    """

    def __init__(
        self,
        urls: Urls,
        *,
        decode: Callable[[bytes], Any] | None = None,
        class_from_folder: bool = False,
        retry_seconds: float = RETRY,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if decode is not None:
            function("decode", decode, "a function that takes bytes")
        roots = list_files(urls, storage_options or {}, retry=retry_seconds)
        super().__init__(Texts(root.url for root in roots), [len(root.paths) for root in roots])
        self._decode = decode
        self._shard_stores = list(dict.fromkeys(root.store for root in roots))
        numbers = {store: number for number, store in enumerate(self._shard_stores)}
        self._store_of = array("L", (numbers[root.store] for root in roots))
        self.paths: Texts = Texts(itertools.chain.from_iterable(root.paths for root in roots))
        self._sizes = np.array([size for root in roots for size in root.sizes], np.int64)
        self.classes: list[str] = []
        self._labels: Any = None
        if flag("class_from_folder", class_from_folder):
            folders = [class_of(path, root) for root in roots for path in root.paths]
            self.classes = sorted({*folders})
            number = {name: at for at, name in enumerate(self.classes)}
            self._labels = np.array([number[name] for name in folders], np.int64)

    @property
    def labels(self) -> Sequence[int]:
        """Number of the class of each file. Raises `ValueError` without `class_from_folder`."""
        if self._labels is None:
            raise ValueError("these Files have no classes; pass class_from_folder=True to Files")
        labels: list[int] = self._labels.tolist()
        return labels

    def read(self, shard: int, number: int) -> Any:
        index = self._firsts[shard] + number
        store, path = self._shard_stores[self._store_of[shard]], self.paths[index]
        data: Any = store.read(path, int(self._sizes[index]))
        try:
            if self._decode is not None:
                data = self._decode(data)
        except Exception as error:
            add_note(error, f"loading {store.name(path)}")
            raise
        return data if self._labels is None else (data, int(self._labels[index]))


def class_of(path: str, root: Root) -> str:
    """Return the first folder below that of `root`."""
    inner = path[len(root.folder) :].lstrip("/")
    name, slash, _ = inner.partition("/")
    if not slash:
        raise SourceError(
            f"{path} is in no class folder: the class is the first folder below "
            f"{root.folder or 'the root'}"
        )
    return name
