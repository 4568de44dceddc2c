"""`ShardWriter` and `pack`: samples into shards of a given size, in a folder or a store.

A small file beside the shards, the manifest, names their pack and its progress. With it a
pack that was interrupted is resumed. Without it nothing is written where something is.
"""

from __future__ import annotations

import base64
import io
import json
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any

from hybridloader._support.arguments import one_of, whole
from hybridloader._support.error_handling import add_note
from hybridloader.sources.kept import MANIFEST
from hybridloader.sources.shard_files import (
    ParquetFile,
    ShardFile,
    TarFile,
    row_of,
    schema_of,
)
from hybridloader.sources.store import Stamp
from hybridloader.sources.tar_index import make_index, packed_index
from hybridloader.sources.target import Target

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1
"""Version of the manifest."""

BYTES = 256 << 20
"""Bytes of a shard if no size is given."""

_TRIED = 32
"""Samples from which the total size and the schema of Parquet files are estimated."""

Report = Callable[[int, int, str], object]


def _ignore(done: int, total: int, name: str) -> None:
    pass


class _Pack:
    """Shards of one pack and its manifest. Threads may write different shards at a time."""

    def __init__(
        self, url: str, form: str, schema: Any, plan: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        one_of("format", form, ("tar", "parquet"))
        self._target = Target(url, options)
        self._url, self._form, self._schema = url, form, schema
        self._plan = {"format": form, **plan}
        self._lock = threading.Lock()
        # All the mutable state:
        self.counts: list[int] = []  # samples of each shard, of those written in order
        self.there: set[str] = set()  # names that existed at the beginning

    def begin(self, resume: bool) -> None:
        """Begin, or resume the pack of an earlier one. Raises `FileExistsError`."""
        self._target.clear_parts()
        self.there = self._target.names()
        if MANIFEST not in self.there:
            if self.there:
                raise FileExistsError(
                    f"{self._url} is not empty ({min(self.there)}), and no file is overwritten; name "
                    "another folder"
                )
            self.save()
            return
        held = json.loads(self._target.read(MANIFEST))
        if held.get("version") != VERSION or held.get("done") or not resume:
            state = "a complete pack" if held.get("done") else "an unfinished pack"
            hint = "" if held.get("done") else ", or resume it"
            raise FileExistsError(
                f"{self._url} has {state}, and no file is overwritten; name another folder{hint}"
            )
        if held["plan"] != self._plan:
            differ = [k for k in self._plan if held["plan"].get(k) != self._plan[k]]
            raise FileExistsError(
                f"{self._url} has a pack from another source or with other sizes "
                f"({', '.join(differ)} differ); pass the same, or name another folder"
            )
        self.counts = held["counts"]
        if held["schema"] is not None:
            import pyarrow

            self._schema = pyarrow.ipc.read_schema(
                pyarrow.py_buffer(base64.b64decode(held["schema"]))
            )

    def save(self, done: bool = False) -> None:
        schema = None
        if self._schema is not None:
            schema = base64.b64encode(self._schema.serialize()).decode()
        held = {
            "version": VERSION,
            "plan": self._plan,
            "counts": self.counts,
            "schema": schema,
            "done": done,
        }
        self._target.put_bytes(MANIFEST, json.dumps(held).encode())

    def name(self, number: int) -> str:
        return f"shard-{number:06d}.{self._form}"

    def is_there(self, number: int) -> bool:
        name = self.name(number)
        return name in self.there and (self._form != "tar" or f"{name}.index" in self.there)

    @contextmanager
    def shard(self, number: int) -> Iterator[ShardFile]:
        """Yield a shard to fill; it is in its place, with its index, after the block."""
        name = self.name(number)
        index = None
        with self._target.put(name) as file:
            shard = self.file(file)
            yield shard
            shard.finish()
            if self._form == "tar":
                size = file.tell()
                file.seek(0)
                index = make_index(name, file, Stamp(size, ""))
        if index is not None:
            index = replace(index, stamp=self._target.stamp(name))
            self._target.put_bytes(f"{name}.index", bytes(packed_index(index)))

    def file(self, file: Any) -> ShardFile:
        return TarFile(file) if self._form == "tar" else ParquetFile(file, self.schema_of)

    def schema_of(self, rows: list[dict[str, Any]]) -> Any:
        with self._lock:
            if self._schema is None:
                self._schema = schema_of(rows)
            return self._schema


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
    >>> tar.shard_sizes, tar[2]
    (array([2, 1]), (b'text 2', b'0'))
    >>> folder.cleanup()
    """

    _first: int | None = None  # checksum of the first sample, if known

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
        if samples_per_shard is not None and bytes_per_shard is not None:
            raise ValueError("pass samples_per_shard or bytes_per_shard, not both")
        if samples_per_shard is not None:
            samples_per_shard = whole("samples_per_shard", samples_per_shard, 1)
        else:
            bytes_per_shard = whole("bytes_per_shard", bytes_per_shard or BYTES, 1)
        plan = {
            "samples_per_shard": samples_per_shard,
            "bytes_per_shard": bytes_per_shard,
            "first": self._first,
        }
        self._most_samples, self._most_bytes = samples_per_shard, bytes_per_shard
        self._pack = _Pack(url, format, schema, plan, storage_options or {})
        self._pack.begin(resume)
        self._uploads = ThreadPoolExecutor(1, "hybridloader-write")
        # All the mutable state:
        self.written = sum(self._pack.counts)
        self.shards = len(self._pack.counts)  # before the one that is being filled
        self._block: Any = None  # context manager of the current shard
        self._shard: ShardFile | None = None
        self._upload: Future[None] | None = None
        self._closed = False

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
            self._block = self._pack.shard(self.shards)
            self._shard = self._block.__enter__()
        shard = self._shard
        shard.add(sample, self.written)
        self.written += 1
        if shard.samples == self._most_samples or (
            self._most_bytes is not None and shard.size >= self._most_bytes
        ):
            self._end_shard()

    def _end_shard(self) -> None:
        if self._shard is None:
            return
        try:
            self._wait()  # so that there are at most two local files
        except BaseException as error:
            self._give_up(error)
            raise
        block, samples = self._block, self._shard.samples
        self._block = self._shard = None
        self.shards += 1

        def finish() -> None:
            block.__exit__(None, None, None)
            self._pack.counts.append(samples)
            self._pack.save()

        self._upload = self._uploads.submit(finish)

    def _wait(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    def close(self) -> None:
        """Write the last shard, and wait until all are in their places. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._end_shard()
            self._wait()
            self._pack.save(done=True)
        finally:
            self._uploads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, tb: Any) -> None:
        if kind is None:
            self.close()
            return
        self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Close, and drop the shard that is being filled."""
        self._closed = True
        self._uploads.shutdown()
        if self._block is not None:
            block, self._block, self._shard = self._block, None, None
            block.__exit__(type(error), error, error.__traceback__)


def pack(
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
    report: Report = _ignore,
) -> list[int]:
    """Write all samples of a dataset or an iterable into shards; see `ShardWriter`.

    The same call resumes an interrupted pack: shards that are there stay. The source must have
    the same samples in the same order, which is checked by its length and its first sample.

    Parameters
    ----------
    source
        A dataset with ``len()`` and ``[]``: its shards are as many as their size asks for, all have the
        same number of samples or one more, and `workers` threads write them at a time. Or an iterable:
        its shards are written in turn, and it is read from its beginning to be resumed.
    url, format, schema, storage_options
        See `ShardWriter`.
    shards
        Number of shards, for a dataset: a multiple of the number of ranks gives each as many.
    samples_per_shard, bytes_per_shard
        See `ShardWriter`; of a dataset the size of a sample is estimated from 32 samples.
    encode
        Function from a sample to the dict that is written.
    workers
        Number of threads. They read samples, too.
    report
        Called with the number of shards that are done, the number of all (0: not known) and a name.

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
    sizes = {
        "shards": shards,
        "samples_per_shard": samples_per_shard,
        "bytes_per_shard": bytes_per_shard,
    }
    given = {name: whole(name, value, 1) for name, value in sizes.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"pass only one of {', '.join(given)}")
    options = storage_options or {}
    encode = encode or _as_it_is
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        workers = whole("workers", workers, 1)
        return _pack_dataset(source, url, format, given, encode, schema, workers, options, report)
    if shards is not None:
        raise ValueError(
            "shards= needs a source with len(); for an iterable, pass samples_per_shard= or "
            "bytes_per_shard="
        )
    return _pack_iterable(source, url, format, given, encode, schema, options, report)


def _as_it_is(sample: Any) -> Any:
    return sample


def _pack_dataset(
    source: Sequence[Any],
    url: str,
    form: str,
    given: Mapping[str, int],
    encode: Callable[[Any], Any],
    schema: Any,
    workers: int,
    options: Mapping[str, Any],
    report: Report,
) -> list[int]:
    count = len(source)
    if not count:
        raise ValueError("the source has no samples")

    def sample(number: int) -> Any:
        try:
            return encode(source[number])
        except Exception as error:
            add_note(error, f"packing sample {number}")
            raise

    tried = (
        [number * count // _TRIED for number in range(_TRIED)] if count > _TRIED else range(count)
    )
    samples = [sample(number) for number in tried]
    plan = {"samples": count, "first": _digest(samples[0]), **given}
    parts = _Pack(url, form, schema, plan, options)
    if form == "parquet" and schema is None:
        parts.schema_of([row_of(one, at) for at, one in enumerate(samples)])
    total = given.get("shards", 0)
    if "samples_per_shard" in given:
        total = -(-count // given["samples_per_shard"])
    elif not total:
        trial = parts.file(io.BytesIO())
        for at, one in enumerate(samples):
            trial.add(one, at)
        trial.finish()
        total = math.ceil(trial.size / len(samples) * count / given.get("bytes_per_shard", BYTES))
    total = min(max(total, 1), count)
    del samples
    ends = [count * number // total for number in range(total + 1)]
    counts = [stop - start for start, stop in pairwise(ends)]
    parts.begin(resume=True)
    if parts.counts not in ([], counts):
        raise FileExistsError(
            f"{url} has an unfinished pack of {len(parts.counts)} shards, and this one would have "
            f"{total}; pass shards={len(parts.counts)}, or name another folder"
        )
    parts.counts = counts
    parts.save()
    left = [number for number in range(total) if not parts.is_there(number)]

    def write(number: int) -> None:
        with parts.shard(number) as shard:
            for at in range(ends[number], ends[number + 1]):
                shard.add(sample(at), at)

    report(total - len(left), total, "")
    with ThreadPoolExecutor(workers, "hybridloader-write") as threads:
        asked = {threads.submit(write, number): number for number in left}
        try:
            for done, future in enumerate(as_completed(asked), total - len(left) + 1):
                future.result()
                report(done, total, parts.name(asked[future]))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    parts.save(done=True)
    return counts


def _pack_iterable(
    source: Any,
    url: str,
    form: str,
    given: Mapping[str, int],
    encode: Callable[[Any], Any],
    schema: Any,
    options: Mapping[str, Any],
    report: Report,
) -> list[int]:
    items = map(encode, source)
    first = [*islice(items, 1)]
    if not first:
        raise ValueError("the source has no samples")
    writer = _PackWriter(_digest(first[0]), url, form, schema, options, given)
    with writer:
        for sample in islice(chain(first, items), writer.written, None):
            before = writer.shards
            writer.write(sample)
            if writer.shards != before:
                report(writer.shards, 0, "")
    report(writer.shards, writer.shards, "")
    return writer.counts


class _PackWriter(ShardWriter):
    """Writer for a source whose first sample is known, so another one is noticed."""

    def __init__(
        self,
        first: int,
        url: str,
        form: str,
        schema: Any,
        options: Mapping[str, Any],
        sizes: Mapping[str, int],
    ) -> None:
        self._first = first
        super().__init__(
            url, format=form, schema=schema, resume=True, storage_options=options, **sizes
        )

    @property
    def counts(self) -> list[int]:
        return self._pack.counts


def _digest(sample: Any) -> int:
    """Return a checksum of a sample, by which another source is noticed."""
    if not isinstance(sample, Mapping):
        return 0
    digest = 0
    for name, value in sample.items():
        data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "replace")
        digest = zlib.crc32(data, zlib.crc32(name.encode(), digest))
    return digest
