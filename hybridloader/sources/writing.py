"""`write_shards`: samples into tar archives of a given size, in a folder or a store.

A small file beside the shards, the manifest, names their pack and the complete shards. With it a
pack that was interrupted is resumed. Without it nothing is written where something is.
"""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from hybridloader._support.text import short, whole
from hybridloader._support.user_objects import add_note
from hybridloader.errors import SourceError
from hybridloader.sources.files import Urls, class_of, list_files
from hybridloader.sources.store import MANIFEST, Stamp, Store
from hybridloader.sources.tar import make_index, name_parts, packed_index

KEY = "__key__"  # name of a sample's key


class _Archive:
    """Tar archive that is being filled: one member for each field, as webdataset names them."""

    def __init__(self, file: Any) -> None:
        self.file = file  # local; it does not know where it will lie
        self.samples = self.size = 0  # bytes, with headers
        self._archive = tarfile.open(fileobj=file, mode="w")  # noqa: SIM115  # `close` closes it
        self._names: set[str] = set()

    def add(self, sample: Any, number: int) -> None:
        """Add a sample, or nothing of it if it can't be written. `number` is for errors and its key."""
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"sample {number} must be a dict of fields by name, such as {{'jpg': b'...'}}, not "
                f"{short(sample)}; a map() makes such dicts"
            )
        fields = {name: value for name, value in sample.items() if name[:2] != "__"}
        key = str(sample.get(KEY, f"{number:09d}"))
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

    def close(self) -> None:
        self._archive.close()

    def drop(self) -> None:
        """Remove the file."""
        with suppress(Exception), self.file:
            self.close()
        os.unlink(self.file.name)


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
        "name an array .npy, and name JSON .json"
    )


class FolderSamples:
    """Samples as dicts of bytes by extension: files whose names agree up to the first dot are one.

    `classes` adds ``cls``: the number of the first folder below the folder of `urls`, sorted by name.
    """

    def __init__(
        self,
        urls: Urls,
        *,
        classes: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.ignored = 0  # number of files that are no sample's: hidden, or without an extension
        groups: dict[str, dict[str, tuple[Store, str, int]]] = {}
        named: dict[str, str] = {}  # class of each sample
        for root in list_files(urls, storage_options or {}):
            for path, size in zip(root.paths, root.sizes, strict=True):
                parts = name_parts(path[len(root.folder) :].lstrip("/"))
                if parts is None:
                    self.ignored += 1
                    continue
                files = groups.setdefault(parts[0], {})
                if parts[1] in files:
                    raise SourceError(
                        f"{files[parts[1]][1]} and {path} are both {'.'.join(parts)}, so one would be "
                        "lost; pack their folders separately"
                    )
                files[parts[1]] = root.store, path, size
                if classes:
                    named[parts[0]] = class_of(path, root)
        self._samples, self._named = [*groups.items()], named
        self.classes = sorted({*named.values()})

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        key, files = self._samples[index]
        sample: dict[str, Any] = {KEY: key}
        for extension, (store, path, size) in files.items():
            sample[extension] = store.read(path, size)
        if self.classes:
            sample["cls"] = self.classes.index(self._named[key])
        return sample


VERSION = 3  # version of the manifest

BYTES = 256 << 20  # bytes of a shard if no size is given

_AHEAD = 8  # samples of a dataset that are read ahead for each thread

_PART = ".part-"  # prefix of the names of local files that are being written


class _Folder:
    """Folder that shards are written to, local or of a store; it is made with the first file.

    Each file appears as a whole, or not at all.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.store = Store(url, options)
        path = url if self.store.is_local else str(self.store.fs._strip_protocol(url))
        if self.store.is_local:
            path = os.path.abspath(path.partition("://")[2] or path)
        self._path = path.rstrip("/")

    def path(self, name: str) -> str:
        return f"{self._path}/{name}"

    def names(self) -> set[str]:
        """Return the names of its files. Local files that a killed writer has left are removed."""
        try:
            if not self.store.is_local:
                self.store.forget_listings()
                found = self.store.fs.ls(self._path, detail=False)
                return {str(one).rstrip("/").rpartition("/")[2] for one in found}
            names = {*os.listdir(self._path)}
        except FileNotFoundError:
            return set()
        except Exception as error:
            self.store.raise_named(error, self._path)
        parts = {name for name in names if name.startswith(_PART)}
        for name in parts:
            os.unlink(self.path(name))
        return names - parts

    def part(self) -> Any:
        """Open a new local file to fill; `put` gives it its name."""
        if not self.store.is_local:
            return tempfile.NamedTemporaryFile(delete=False)
        os.makedirs(self._path, exist_ok=True)
        return open(self.path(f"{_PART}{os.urandom(6).hex()}"), "w+b")

    def put(self, part: str, name: str) -> None:
        """Move a file of `part` to its place."""
        try:
            if self.store.is_local:
                os.replace(part, self.path(name))
            else:
                self.store.fs.put_file(part, self.path(name))
        except Exception as error:
            self.store.raise_named(error, self.path(name), "writing")
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)

    def put_bytes(self, name: str, data: bytes) -> None:
        with self.part() as part:
            part.write(data)
        self.put(part.name, name)


class _Pack:
    """Shards in a folder, with their manifest: begun now, or resumed from the same plan.

    `plan` has the size of a shard (``samples_per_shard`` or ``bytes_per_shard``), and marks of the
    source. Raises `FileExistsError` if the folder has anything else.
    """

    def __init__(self, url: str, options: Mapping[str, Any], plan: Mapping[str, int]) -> None:
        self._folder, self._plan = _Folder(url, options), plan
        # All the mutable state:
        self.counts: list[int] = []  # samples of each shard in its place
        names = self._folder.names()
        if not names:
            self.save()
            return
        if MANIFEST not in names:
            raise FileExistsError(
                f"{url} is not empty ({min(names)}), and no file is overwritten; name another folder"
            )
        held = json.loads(self._folder.store.read(self._folder.path(MANIFEST)))
        if held["done"]:
            raise FileExistsError(
                f"{url} has a complete pack, and no file is overwritten; name another folder"
            )
        if (held["version"], held["plan"]) != (VERSION, self._plan):
            raise FileExistsError(
                f"{url} has a pack from another source or with other sizes; pass the same, or name "
                "another folder"
            )
        self.counts = held["counts"]

    def save(self, *, done: bool = False) -> None:
        held = {"version": VERSION, "plan": self._plan, "counts": self.counts, "done": done}
        self._folder.put_bytes(MANIFEST, json.dumps(held).encode())

    def fill(self, samples: Iterator[Any], first: int) -> _Archive | None:
        """Return an archive of the next samples, from number `first` on; None if there are none."""
        most = self._plan.get("samples_per_shard", math.inf)
        size = self._plan.get("bytes_per_shard", math.inf)
        archive: _Archive | None = None
        try:
            for sample in samples:
                archive = archive or _Archive(self._folder.part())
                archive.add(sample, first + archive.samples)
                if archive.samples >= most or archive.size >= size:
                    break
            if archive is not None:
                archive.close()
        except BaseException:
            if archive is not None:
                archive.drop()
            raise
        return archive

    def place(self, archive: _Archive) -> None:
        """Put a full archive and its index in their places, then note it in the manifest."""
        name, folder = f"shard-{len(self.counts):06d}.tar", self._folder
        with archive.file as file:
            size = file.tell()
            file.seek(0)
            index = make_index(name, file, Stamp(size, ""))
        folder.put(file.name, name)
        stamp = folder.store.stamp(folder.path(name), refresh=True)
        folder.put_bytes(f"{name}.index", bytes(packed_index(replace(index, stamp=stamp))))
        self.counts.append(archive.samples)
        self.save()


def write_shards(
    source: Any,
    url: str,
    *,
    samples_per_shard: int | None = None,
    bytes_per_shard: int | None = None,
    workers: int = 4,
    storage_options: Mapping[str, Any] | None = None,
    report: Callable[[int], object] | None = None,
) -> list[int]:
    """Write all samples of a dataset or an iterable into shards, for `Tar` and webdataset.

    A sample is a dict. Each field is a member of a tar archive, ``KEY.NAME``: bytes, text (UTF-8) or a
    number; an array if its name ends in ``npy``, and any JSON value if it ends in ``json``. ``__key__``
    is the key, by default the number of the sample.

    A shard is written to a local file first, and appears as a whole while the next one is filled. Each
    archive has an index beside it, for ``Tar(..., index="beside")``. The same call resumes an
    interrupted pack: shards that are there stay. The source must have the same samples in the same
    order, which is checked by its length and its first sample.

    Parameters
    ----------
    source
        A dataset with ``len()`` and ``[]``: `workers` threads read samples. Or an iterable: it is read
        from its beginning to be resumed.
    url
        Path or URL of a folder, empty or not there. Shards are ``shard-000000.tar`` and so on.
    samples_per_shard
        Number of samples of each shard but the last.
    bytes_per_shard
        Bytes at which a shard is full, by default 256 MiB.
    workers
        Number of threads that read the samples of a dataset.
    storage_options
        Options of fsspec.
    report
        Called with the number of shards that are done.

    Returns
    -------
    list of int
        Number of samples in each shard.

    Raises
    ------
    FileExistsError
        The folder has a whole pack, another one, or anything else. Nothing is overwritten.
    TypeError, ValueError
        A sample can't be written; the message has its number.

    Examples
    --------
    >>> import tempfile
    >>> from hybridloader.sources import Tar, write_shards
    >>> folder = tempfile.TemporaryDirectory()
    >>> samples = [{"txt": f"text {number}", "cls": number % 2} for number in range(3)]
    >>> write_shards(samples, folder.name, samples_per_shard=2)
    [2, 1]
    >>> tar = Tar(f"{folder.name}/*.tar", fields=("txt", "cls"), index="beside")
    >>> tar[2]
    (b'text 2', b'0')
    >>> tar.close()
    >>> folder.cleanup()
    """
    sizes = {"samples_per_shard": samples_per_shard, "bytes_per_shard": bytes_per_shard}
    plan = {name: whole(name, size, 1) for name, size in sizes.items() if size is not None}
    if len(plan) > 1:
        raise ValueError(f"pass only one of {', '.join(plan)}")
    plan = plan or {"bytes_per_shard": BYTES}
    workers = whole("workers", workers, 1)
    report = report or (lambda _: None)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        count = plan["samples"] = len(source)
        first = [*_read(source, range(min(count, 1)), 1)]

        def samples_from(start: int) -> Iterator[Any]:
            return _read(source, range(start, count), workers)
    else:
        items = iter(source)
        first = [*islice(items, 1)]

        def samples_from(start: int) -> Iterator[Any]:
            return islice(chain(first, items), start, None)

    if not first:
        raise ValueError("the source has no samples")
    plan["first"] = zlib.crc32(repr(first[0]).encode("utf-8", "replace"))
    pack = _Pack(url, storage_options or {}, plan)
    written, shards = sum(pack.counts), len(pack.counts)
    samples = samples_from(written)
    report(shards)
    with ThreadPoolExecutor(1, "hybridloader-write") as uploads:
        upload: Future[None] | None = None  # of the shard before
        while (archive := pack.fill(samples, written)) is not None:
            try:
                if upload is not None:
                    upload.result()  # so that there are at most two local files
            except BaseException:
                archive.drop()
                raise
            upload = uploads.submit(pack.place, archive)
            written, shards = written + archive.samples, shards + 1
            report(shards)
        if upload is not None:
            upload.result()
    pack.save(done=True)
    return pack.counts


def _read(source: Any, numbers: range, workers: int) -> Iterator[Any]:
    """Yield the samples in their order; `workers` threads read them, a few ahead."""

    def one(number: int) -> Any:
        try:
            return source[number]
        except Exception as error:
            add_note(error, f"packing sample {number}")
            raise

    asked: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(workers, "hybridloader-read") as threads:
        try:
            for number in numbers:
                asked.append(threads.submit(one, number))
                if len(asked) > _AHEAD * workers:
                    yield asked.popleft().result()
            while asked:
                yield asked.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)
