"""`ShardWriter` and `write_shards`: samples into shards of a given size, in a folder or a store.

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
from typing import TYPE_CHECKING, Any

from hybridloader._support.text import one_of, short, whole
from hybridloader._support.user_objects import add_note
from hybridloader.errors import SourceError
from hybridloader.sources.files import Urls, list_files
from hybridloader.sources.store import MANIFEST, Stamp, Store
from hybridloader.sources.tar import make_index, name_parts, packed_index

if TYPE_CHECKING:
    from typing_extensions import Self


# -- Shards that are being written: samples go in, one file comes out. Tar and Parquet.
#
# Nothing here knows where the file will lie, or how many samples a shard has.


KEY = "__key__"  # name of a sample's key

ROWS = 1024  # rows of a row group, which is read and decoded as a whole


class TarFile:
    """Tar archive with one member for each field of a sample, as webdataset names them."""

    schema = None

    def __init__(self, file: Any, _: Any) -> None:
        self.file = file
        self.samples = self.size = 0  # bytes, with headers
        self._archive = tarfile.open(fileobj=file, mode="w")  # noqa: SIM115  # `close` closes it
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

    def close(self) -> None:
        self._archive.close()

    finish = close


class ParquetFile:
    """Parquet file with a row for each sample. `schema` None: that of the first rows."""

    def __init__(self, file: Any, schema: Any) -> None:
        self.file = file
        # All the mutable state:
        self.samples = self.size = 0  # bytes before compression
        self.schema = schema
        self._last = 0  # number of the last row
        self._rows: list[dict[str, Any]] = []
        self._writer: Any = None

    def add(self, sample: Any, number: int) -> None:
        row = fields_of(sample, number)
        if KEY not in sample:
            del row[KEY]
        self._rows.append(row)
        self._last = number
        self.samples += 1
        if len(self._rows) == ROWS:
            self._write()

    def _write(self) -> None:
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
                f"samples {self._last + 1 - len(rows)} to {self._last} don't fit the schema of the "
                f"first ones: {error}; pass schema="
            ) from error
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self.file, self.schema)
        self._writer.write_table(table, row_group_size=ROWS)
        self.size += table.nbytes

    def finish(self) -> None:
        if self._rows:
            self._write()
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


_FORMATS: dict[str, type[TarFile | ParquetFile]] = {"tar": TarFile, "parquet": ParquetFile}


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
        self._samples = [*groups.items()]
        self.classes: list[str] = []
        if classes:
            self.classes = sorted({_class_of(key) for key in groups})

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        key, files = self._samples[index]
        sample: dict[str, Any] = {KEY: key}
        for extension, (store, path, size) in files.items():
            sample[extension] = store.read(path, size)
        if self.classes:
            sample["cls"] = self.classes.index(_class_of(key))
        return sample


def _class_of(key: str) -> str:
    name, slash, _ = key.partition("/")
    if not slash:
        raise SourceError(
            f"the files {key}.* are in no class folder; move them into a folder below the packed one"
        )
    return name


VERSION = 2  # version of the manifest

BYTES = 256 << 20  # bytes of a shard if no size is given

_TRIED = 32  # samples of a dataset from which its total size is estimated

_AT_ONCE = 8  # samples of a dataset that a thread reads at a time

_PART = ".part-"  # prefix of the names of local files that are being written

_EMPTY = "the source has no samples"


def _ignore(done: int, total: int, name: str) -> None:
    pass


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


class ShardWriter:
    """Writes samples into shards, one after another, for `Tar`, `Parquet` and webdataset.

    A sample is a dict. In a tar archive each field is a member, ``KEY.NAME``: bytes, text (UTF-8) or a
    number; an array if its name ends in ``npy``, and any JSON value if it ends in ``json``. ``__key__``
    is the key, by default the number of the sample. In a Parquet file each field is a column.

    A shard is written to a local file first, and appears as a whole while the next one is filled. Each
    archive has an index beside it, for ``Tar(..., index="beside")``. As a context manager it is closed
    at the end of the block; if that raises, the last shard is not written, and the pack can be resumed.

    Parameters
    ----------
    url
        Path or URL of a folder, empty or not there. Shards are ``shard-000000.tar`` and so on.
    format
        ``"tar"`` or ``"parquet"``.
    samples_per_shard
        Number of samples of each shard but the last.
    bytes_per_shard
        Bytes at which a shard is full (for Parquet, before compression), by default 256 MiB.
    schema
        Schema of pyarrow for Parquet files; by default that of the first 1,024 samples.
    resume
        True resumes after the existing shards; then write the samples from number `written` on.
    storage_options
        Options of fsspec.

    Attributes
    ----------
    written : int
        Number of samples so far, including those of a resumed pack.
    shards : int
        Number of shards that are full.

    Raises
    ------
    FileExistsError
        The folder is not empty. Nothing is overwritten.

    Examples
    --------
    >>> import tempfile
    >>> from hybridloader.sources import ShardWriter, Tar
    >>> folder = tempfile.TemporaryDirectory()
    >>> with ShardWriter(folder.name, samples_per_shard=2) as writer:
    ...     for number in range(3):
    ...         writer.write({"txt": f"text {number}", "cls": number % 2})
    >>> tar = Tar(f"{folder.name}/*.tar", fields=("txt", "cls"), index="beside")
    >>> tar.shard_sizes.tolist(), tar[2]
    ([2, 1], (b'text 2', b'0'))
    >>> tar.close()
    >>> folder.cleanup()
    """

    def __init__(
        self,
        url: str,
        *,
        format: str = "tar",
        samples_per_shard: int | None = None,
        bytes_per_shard: int | None = None,
        schema: Any = None,
        resume: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        plan = _size_of(samples_per_shard=samples_per_shard, bytes_per_shard=bytes_per_shard)
        self._begin(url, format, schema, plan, storage_options or {}, resume)

    def _begin(
        self,
        url: str,
        form: str,
        schema: Any,
        plan: Mapping[str, Any],
        options: Mapping[str, Any],
        resume: bool,
    ) -> None:
        """Begin, or resume a pack with the same plan. Raises `FileExistsError`.

        `plan` has the sizes of the shards (``samples`` in so many ``shards``, ``samples_per_shard`` or
        ``bytes_per_shard``), and other marks of the source.
        """
        one_of("format", form, _FORMATS)
        self._folder = _Folder(url, options)
        self._form, self._plan = form, {"format": form, **plan}
        # All the mutable state:
        self._counts = self._begun(url, resume)  # samples of each shard in its place
        if schema is None and form == "parquet" and self._counts:  # that of the shards there
            from pyarrow import parquet

            with self._folder.store.open(self._folder.path(self._name(0))) as file:
                schema = parquet.read_schema(file)
        self._schema = schema
        self.written = sum(self._counts)
        self.shards = len(self._counts)  # before the one that is being filled
        self._shard: TarFile | ParquetFile | None = None  # that is being filled
        self._uploads = ThreadPoolExecutor(1, "hybridloader-write")
        self._upload: Future[None] | None = None  # of the shard before
        self._closed = False

    def _begun(self, url: str, resume: bool) -> list[int]:
        names = self._folder.names()
        if MANIFEST not in names:
            if names:
                raise FileExistsError(
                    f"{url} is not empty ({min(names)}), and no file is overwritten; name another "
                    "folder"
                )
            self._save([])
            return []
        held = json.loads(self._folder.store.read(self._folder.path(MANIFEST)))
        if held["version"] != VERSION or held["done"] or not resume:
            state = "a complete pack" if held["done"] else "an unfinished pack"
            hint = ", or resume it" if held["version"] == VERSION and not held["done"] else ""
            raise FileExistsError(
                f"{url} has {state}, and no file is overwritten; name another folder{hint}"
            )
        if held["plan"] != self._plan:
            raise FileExistsError(
                f"{url} has a pack from another source or with other sizes; pass the same, or name "
                "another folder"
            )
        counts: list[int] = held["counts"]
        return counts

    def _save(self, counts: list[int], done: bool = False) -> None:
        held = {"version": VERSION, "plan": self._plan, "counts": counts, "done": done}
        self._folder.put_bytes(MANIFEST, json.dumps(held).encode())

    def _name(self, number: int) -> str:
        return f"shard-{number:06d}.{self._form}"

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample.

        Raises
        ------
        TypeError, ValueError
            It can't be written, and a tar archive has nothing of it. Rows of Parquet are written 1,024
            at a time, so an error may be of an earlier one.
        OSError, StoreError
            The shard before could not be written. The writer is closed, and the pack can be resumed.
        """
        if self._closed:
            raise ValueError("this ShardWriter is closed; open another one")
        if self._shard is None:
            self._shard = _FORMATS[self._form](self._folder.part(), self._schema)
        self._shard.add(sample, self.written)
        self.written += 1
        if self._is_full(self._shard):
            try:
                self._end_shard()
            except BaseException:
                self._give_up()
                raise

    def _is_full(self, shard: TarFile | ParquetFile) -> bool:
        plan = self._plan
        if "shards" in plan:  # even shards: this one ends where the next one begins
            return bool(self.written == plan["samples"] * (self.shards + 1) // plan["shards"])
        if "samples_per_shard" in plan:
            return bool(shard.samples == plan["samples_per_shard"])
        return bool(shard.size >= plan.get("bytes_per_shard", BYTES))

    def _end_shard(self) -> None:
        shard = self._shard
        if shard is not None and shard.samples:
            self._wait()  # so that there are at most two local files
            shard.finish()
            self._schema = shard.schema
            self._upload = self._uploads.submit(self._place, shard, self.shards)
            self._shard = None
            self.shards += 1

    def _place(self, shard: TarFile | ParquetFile, number: int) -> None:
        """Put a full shard and its index in their places, then note it in the manifest."""
        name, folder, index = self._name(number), self._folder, None
        with shard.file as file:
            if self._form == "tar":
                size = file.tell()
                file.seek(0)
                index = make_index(name, file, Stamp(size, ""))
        folder.put(file.name, name)
        if index is not None:
            stamp = folder.store.stamp(folder.path(name), refresh=True)
            folder.put_bytes(f"{name}.index", bytes(packed_index(replace(index, stamp=stamp))))
        self._counts.append(shard.samples)
        self._save(self._counts)

    def _wait(self) -> None:
        if self._upload is not None:
            self._upload.result()

    def close(self) -> None:
        """Write the last shard, and wait until all are in their places. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._end_shard()
            self._wait()
            self._save(self._counts, done=True)
        finally:
            self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, tb: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Close, and drop the shard that is being filled."""
        self._closed = True
        self._uploads.shutdown()
        shard, self._shard = self._shard, None
        if shard is not None:
            with suppress(Exception), shard.file:
                shard.close()
            os.unlink(shard.file.name)


def write_shards(
    source: Any,
    url: str,
    *,
    format: str = "tar",
    shards: int | None = None,
    samples_per_shard: int | None = None,
    bytes_per_shard: int | None = None,
    encode: Callable[[Any], Mapping[str, Any]] | None = None,
    schema: Any = None,
    workers: int = 4,
    storage_options: Mapping[str, Any] | None = None,
    report: Callable[[int, int, str], object] = _ignore,
) -> list[int]:
    """Write all samples of a dataset or an iterable into shards; see `ShardWriter`.

    The same call resumes an interrupted pack: shards that are there stay. The source must have
    the same samples in the same order, which is checked by its length and its first sample.

    Parameters
    ----------
    source
        A dataset with ``len()`` and ``[]``: its shards are as many as their size asks for, all have the
        same number of samples or one more, and `workers` threads read samples. Or an iterable: it is
        read from its beginning to be resumed.
    url, format, schema, storage_options
        See `ShardWriter`.
    shards
        Number of shards, for a dataset: a multiple of the number of ranks gives each as many.
    samples_per_shard, bytes_per_shard
        See `ShardWriter`; of a dataset the size of a sample is estimated from 32 samples.
    encode
        Function from a sample to the dict that is written.
    workers
        Number of threads that read the samples of a dataset.
    report
        Called with the number of shards that are done, the number of all (0: not known) and an empty
        name.

    Returns
    -------
    list of int
        Number of samples in each shard.

    Raises
    ------
    FileExistsError
        The folder has a whole pack, another one, or anything else.
    TypeError, ValueError
        A sample can't be written; the message has its number.
    """
    given = _size_of(
        shards=shards, samples_per_shard=samples_per_shard, bytes_per_shard=bytes_per_shard
    )
    one_of("format", format, _FORMATS)
    workers = whole("workers", workers, 1)
    encode = encode or (lambda sample: sample)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        plan, samples_from = _dataset(source, encode, format, schema, given, workers)
    elif shards is not None:
        raise ValueError(
            "shards= needs a source with len(); for an iterable, pass samples_per_shard= or "
            "bytes_per_shard="
        )
    else:
        items = map(encode, source)
        first = [*islice(items, 1)]
        if not first:
            raise ValueError(_EMPTY)
        plan = {**given, "first": _checksum(first[0])}

        def samples_from(start: int) -> Iterator[Any]:
            return islice(chain(first, items), start, None)

    writer = ShardWriter.__new__(ShardWriter)
    writer._begin(url, format, schema, plan, storage_options or {}, True)
    total = plan.get("shards", 0)
    report(writer.shards, total, "")
    with writer:
        for sample in samples_from(writer.written):
            before = writer.shards
            writer.write(sample)
            if writer.shards != before:
                report(writer.shards, total, "")
    report(writer.shards, writer.shards, "")
    return writer._counts


def _size_of(**sizes: int | None) -> dict[str, int]:
    """Return the size that was passed, or none. Raises `ValueError` for several."""
    given = {name: whole(name, value, 1) for name, value in sizes.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"pass only one of {', '.join(given)}")
    return given


def _dataset(
    source: Any,
    encode: Callable[[Any], Any],
    form: str,
    schema: Any,
    given: Mapping[str, int],
    workers: int,
) -> tuple[dict[str, Any], Callable[[int], Iterator[Any]]]:
    """Return the plan of a pack with even shards, and a function of its samples from a number on."""

    def sample(number: int) -> Any:
        try:
            return encode(source[number])
        except Exception as error:
            add_note(error, f"packing sample {number}")
            raise

    count = len(source)
    if not count:
        raise ValueError(_EMPTY)
    steps = min(count, _TRIED)
    tried = [sample(number * count // steps) for number in range(steps)]
    if "shards" in given:
        total = given["shards"]
    elif "samples_per_shard" in given:
        total = math.ceil(count / given["samples_per_shard"])
    else:
        trial = _FORMATS[form](io.BytesIO(), schema)
        for number, one in enumerate(tried):
            trial.add(one, number)
        trial.finish()
        size = trial.size / len(tried) * count
        total = math.ceil(size / given.get("bytes_per_shard", BYTES)) or 1
    plan = {"samples": count, "shards": min(total, count), "first": _checksum(tried[0])}
    return plan, lambda start: _read(sample, range(start, count), workers)


def _checksum(sample: Any) -> int:
    """Return a checksum of the first sample, by which another source is noticed."""
    return zlib.crc32(repr(sample).encode("utf-8", "replace"))


def _read(sample: Callable[[int], Any], numbers: range, workers: int) -> Iterator[Any]:
    """Yield the samples in their order; `workers` threads read them, a few ahead."""
    asked: deque[Future[list[Any]]] = deque()
    with ThreadPoolExecutor(workers, "hybridloader-read") as threads:
        try:
            for first in range(0, len(numbers), _AT_ONCE):
                some = numbers[first : first + _AT_ONCE]
                asked.append(threads.submit(lambda some: [*map(sample, some)], some))
                if len(asked) > workers:
                    yield from asked.popleft().result()
            while asked:
                yield from asked.popleft().result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
