"""`Files`: a dataset of files, one sample each, from any place that fsspec knows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np

from hybridloader._support.text import flag
from hybridloader._support.user_objects import add_note
from hybridloader.errors import SourceError
from hybridloader.sources.listing import Root, Texts, Urls, list_files
from hybridloader.sources.shards import Shards
from hybridloader.sources.store import RETRY

Decode = Literal["bytes", "text"] | Callable[[bytes], Any]


class Files(Shards[Any]):
    """A dataset of files: the contents of each are a sample.

    Files are listed once, when this object is made, and workers get the list. Samples have the order of
    `urls`; within each of these, files are sorted by name.

    Parameters
    ----------
    urls
        A path or URL, or several: of a file; of a folder, with all files below it (one that is not local
        ends in ``/``); or a glob, in which ``**`` stands for any number of folders and ``{000..123}``
        for these numbers, as in bash. Any URL of fsspec, such as ``s3://``, ``gs://``, ``https://``,
        ``memory://`` or ``zip://*.jpg::file:///data/photos.zip``. A file that several of them name is
        there once; to have some more often, use a `WeightedSampler`.
    decode
        ``"bytes"``, ``"text"`` (UTF-8), or a function of the bytes that makes the sample.
    class_from_folder
        True gives pairs of a sample and the number of its class: the name of its folder, the first one
        below the folder or glob of `urls`. `classes` has these names, sorted.
    index
        Path of a local file that keeps the list for the next time. Delete it to list again.
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
    >>> files = Files(folder.name, decode="text", class_from_folder=True)
    >>> len(files), files[2], files.classes
    (3, ('DOG/1.TXT', 1), ['cat', 'dog'])
    >>> folder.cleanup()
    """

    def __init__(
        self,
        urls: Urls,
        *,
        decode: Decode = "bytes",
        class_from_folder: bool = False,
        index: str | None = None,
        retry_seconds: float = RETRY,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(decode) and decode not in ("bytes", "text"):
            raise ValueError(
                f"decode must be 'bytes', 'text' or a function that takes bytes, got {decode!r}"
            )
        roots, stores = list_files(urls, storage_options or {}, index, retry=retry_seconds)
        super().__init__(Texts(root.url for root in roots), [len(root.paths) for root in roots])
        self._decode = decode
        numbers = {store: number for number, store in enumerate(dict.fromkeys(stores))}
        self._shard_stores = list(numbers)
        self._store_of = array("L", (numbers[store] for store in stores))
        self.paths: Texts = Texts(chain.from_iterable(root.paths for root in roots))
        self._sizes = np.array([size for root in roots for size in root.sizes], np.int64)
        self.classes: list[str] = []
        self._labels: Any = None
        if flag("class_from_folder", class_from_folder):
            folders = [_class_of(path, root) for root in roots for path in root.paths]
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

    @property
    def waits(self) -> bool:
        """True for remote files."""
        return self._is_remote

    def read(self, shard: int, number: int) -> Any:
        index = number + (self._ends[shard - 1] if shard else 0)
        store, path = self._shard_stores[self._store_of[shard]], self.paths[index]
        data: Any = store.read(path, int(self._sizes[index]))
        try:
            if callable(self._decode):
                data = self._decode(data)
            elif self._decode == "text":
                data = data.decode()
        except Exception as error:
            add_note(error, f"loading {store.name(path)}")
            raise
        return data if self._labels is None else (data, int(self._labels[index]))


def _class_of(path: str, root: Root) -> str:
    inner = path[len(root.folder) :].lstrip("/")
    name, slash, _ = inner.partition("/")
    if not slash:
        raise SourceError(
            f"{path} is in no class folder: class_from_folder=True reads the class from the first "
            f"folder below {root.folder or 'the root'}"
        )
    return name
