"""`Tar`: a dataset of samples in tar archives, found by an index of their members.

An index is read where it is kept, else made by one of the processes that share a folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from hybridloader._support import system
from hybridloader._support.text import function, warn_once
from hybridloader._support.user_objects import add_note
from hybridloader.errors import SourceError
from hybridloader.memory.limits import local_rank, ranks_here
from hybridloader.sources.files import Texts, Urls, list_files
from hybridloader.sources.shards import AHEAD, CACHE, Shards
from hybridloader.sources.store import (
    MANIFEST,
    RETRY,
    Ranges,
    RemoteFile,
    Stamp,
    Store,
    each,
    write_whole,
)

# -- Index of one tar archive: samples by key, and the place of each of their members.
#
# It is made in one pass over the headers, and may be kept in a file. Nothing here reads members.


VERSION = 2  # version of a kept index

BLOCK = 512
"""Bytes of a header. Members are padded to a multiple of it."""

_FIRST = 256 << 10  # bytes of the first read of a remote archive, which shows the sizes of members

_LEAP = 512 << 10
"""Mean distance of headers, in bytes, above which each header is read separately: a request takes about
as long as half a MiB takes to arrive."""

_SMALL, _LARGE = 16 << 10, 8 << 20
"""Bytes of a read of one header, with the small members after it (a class, a text); and of a read if
headers are close to each other."""

_NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
"""Key and extension, as in webdataset: the name is cut at the first dot after the last slash. Names that
begin with a dot don't match, also within a folder."""

_META = re.compile(r"__[^/]*__($|/)")  # names of members that webdataset ignores too

_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"\x04\x22\x4d\x18": "lz4",
}

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TarIndex:
    """Samples of one archive, in the order of their first members."""

    stamp: Stamp  # of the archive that was indexed
    keys: list[str]  # of the samples
    starts: Ints  # first member of each sample, and, last, the number of members
    extensions: list[str]  # all of the archive
    extension: Ints  # number of the extension of each member
    offset: Ints  # bytes before the data of each member; its header is the block in front of them
    size: Ints  # bytes of each member
    header: Ints  # checksum of the header of each member
    ignored: int  # number of files that are no sample's: without an extension, or hidden


class Headers(RemoteFile):
    """A remote archive that is read from its beginning on by leaps: only the parts that are read."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        super().__init__(store, path, size)
        # All the mutable state, beside that of the base:
        self._reads = 0
        self._start, self._data = 0, b""  # the part that was fetched last

    def fetch(self, start: int, stop: int) -> bytes:
        self._reads += 1
        if not self._start <= start <= stop <= self._start + len(self._data):
            members = self._reads / 3  # tarfile and the index read three times for each member
            ahead = _SMALL if start > members * _LEAP else _LARGE
            end = min(max(stop, start + (ahead if self._data else _FIRST)), self.size)
            self._data = self.store.remote_range(self.path, start, end)
            self._start = start
        return self._data[start - self._start : stop - self._start]


def name_parts(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member, in lower case; None if it is of no sample."""
    found = _NAME.fullmatch(name)
    if found is None or _META.match(name):
        return None
    return found[1], found[2].lower()


def make_index(name: str, file: Any, stamp: Stamp) -> TarIndex:
    """Index the archive `name`, which is open for reading from its beginning.

    Raises `SourceError` if it is no tar archive, is compressed or cut short, or has members that can't
    be found by an offset, names that lead outside, or two members of one name.
    """
    start = file.read(6)
    for magic, method in _PACKED.items():
        if start.startswith(magic):
            raise SourceError(
                f"{name} is compressed by {method}, so its members can't be found by an offset: write "
                "it uncompressed (images, sound and video hardly get smaller). To read it from "
                "beginning to end, give a generator over it to Pipeline.from_iterable"
            )
    file.seek(0)
    members: dict[str, dict[str, tuple[int, int, int]]] = {}
    ignored = 0
    for member in _members(name, file):
        found = name_parts(member.name)
        if found is None:
            ignored += 1
            continue
        key, extension = found
        parts = members.setdefault(key, {})
        if extension in parts:
            raise SourceError(
                f"{name} has two members {key}.{extension}, so one would be lost; rename one"
            )
        file.seek(member.offset_data - BLOCK)
        header = crc32(file.read(BLOCK))
        parts[extension] = member.offset_data, member.size, header
    extensions = sorted({extension for parts in members.values() for extension in parts})
    number = {extension: at for at, extension in enumerate(extensions)}
    rows = [
        (number[extension], *place)
        for parts in members.values()
        for extension, place in parts.items()
    ]
    columns = np.array(rows, np.int64).reshape(len(rows), 4).T.copy()
    starts = np.cumsum([0, *map(len, members.values())], dtype=np.int64)
    codes, offsets, sizes, headers = columns
    return TarIndex(stamp, [*members], starts, extensions, codes, offsets, sizes, headers, ignored)


def _members(name: str, file: Any) -> Iterator[tarfile.TarInfo]:
    """Yield the members that are regular files. Raises `SourceError` for members that would be lost."""
    last = "its beginning"
    try:
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  # the file is the caller's
        for member in archive:
            archive.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps all members
            last = f"member {member.name!r}"
            if member.issparse():
                raise SourceError(f"{name}, {last} is sparse; write the archive without --sparse")
            if member.islnk() or member.issym():
                raise SourceError(
                    f"{name}, {last} is a link to {member.linkname!r} and has no data; write the "
                    "archive with --dereference --hard-dereference"
                )
            if member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
                raise SourceError(
                    f"{name}, {last}: its name leads out of the archive; write it without "
                    "'..' and a leading slash"
                )
            if member.isreg():
                yield member
        end = archive.offset
    except (tarfile.TarError, EOFError) as error:
        raise SourceError(
            f"{name} is not a tar archive, or it is damaged or truncated after {last}: {error}"
        ) from error
    file.seek(end)
    # tarfile reads a damaged header, and the end of the file, as the end of the archive.
    if file.read(BLOCK) != bytes(BLOCK):
        raise SourceError(
            f"{name} is damaged or truncated after {last}: there is neither a header nor the end of an "
            f"archive at byte {end}"
        )
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            raise SourceError(
                f"{name} has more data after the end of the archive, at byte {end}: cat joined "
                "archives; use tar --concatenate, or several files"
            )


def packed_index(index: TarIndex) -> memoryview:
    """Return the contents of the file of an index."""
    about = {
        "version": VERSION,
        "stamp": index.stamp,
        "extensions": index.extensions,
        "ignored": index.ignored,
    }
    keys = "\0".join(index.keys).encode("utf-8", "surrogateescape")
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    packed = io.BytesIO()
    np.savez(
        packed,
        about=np.frombuffer(json.dumps(about).encode(), np.uint8),
        keys=np.frombuffer(keys, np.uint8),
        **arrays,
    )
    return packed.getbuffer()


_ARRAYS = ("starts", "extension", "offset", "size", "header")


def load_index(path: str | io.BytesIO, stamp: Stamp) -> TarIndex | None:
    """Read a kept index from its file or its contents; None if there is none with this stamp.

    The file is a zip archive, whose checksums detect damage.
    """
    try:
        with np.load(path, allow_pickle=False) as held:
            about = json.loads(held["about"].tobytes())
            if about["version"] != VERSION or Stamp(*about["stamp"]) != stamp:
                return None
            arrays = {name: held[name] for name in _ARRAYS}
            text = held["keys"].tobytes().decode("utf-8", "surrogateescape")
            keys = text.split("\0") if len(arrays["starts"]) > 1 else []
            return TarIndex(
                stamp, keys, extensions=about["extensions"], ignored=about["ignored"], **arrays
            )
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None


# -- Indices of several archives, in a folder or beside them.


fcntl = system.module("fcntl")  # None on Windows: each process makes the indices that are missing

BESIDE = "beside"  # value of `index` that keeps indices next to their archives

SUFFIX = ".index"  # suffix of the name of an index

_LOCK = ".lock"  # file in a folder of indices that is locked while they are made

_NAMED = 100
"""Characters of an archive's name in the name of its index; most file systems allow 255 bytes."""

Place = tuple[Store, str]  # store of an archive, and its path there


def archives(urls: Urls, options: Mapping[str, Any], retry: float = RETRY) -> list[Place]:
    """List the archives that `urls` name; `retry` is that of `list_files`.

    Raises `FileNotFoundError` if there are none.
    """
    places = [
        (root.store, path)
        for root in list_files(urls, options, retry=retry)
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
    wanted = each(lambda place: Archive(*place, place[0].stamp(place[1]), kept), places, stores)
    found = dict(zip(wanted, each(Archive.load, wanted, stores), strict=True))
    missing = [archive for archive, index in found.items() if index is None]
    if missing:
        with _alone(kept):
            made = each(Archive.index, missing, [archive.store for archive in missing])
        found.update(zip(missing, made, strict=True))
    return [index for archive in wanted if (index := found[archive]) is not None]


@dataclass(frozen=True)
class Archive:
    """An archive to be indexed."""

    store: Store
    path: str
    stamp: Stamp
    kept: str | None
    """The option `index` of `Tar`."""

    @property
    def name(self) -> str:
        return self.store.name(self.path)

    @property
    def file(self) -> str:
        """Path of the file of its index: on this machine, or in the store of the archive."""
        if self.kept is None or self.kept == BESIDE:
            return f"{self.path}{SUFFIX}"
        name = self.name
        if name.startswith(("http://", "https://")):
            name = name.partition("?")[0]  # a query may be a signature, which differs each time
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return os.path.join(self.kept, f"{os.path.basename(name)[:_NAMED]}.{digest}{SUFFIX}")

    def load(self) -> TarIndex | None:
        """Return the kept index, if there is one with the stamp of the archive."""
        if self.kept is None:
            return None
        if self.kept != BESIDE or self.store.is_local:
            return load_index(self.file, self.stamp)
        try:
            return load_index(io.BytesIO(self.store.read(self.file)), self.stamp)
        except FileNotFoundError:
            return None

    def index(self) -> TarIndex:
        """Return the index, which is kept if it can be.

        Raises `ValueError` if several ranks would index a remote archive, as they keep nothing.
        """
        noticed = bool(self.stamp.mark)  # else a change would not be, so no index is kept
        keeps = self.store.is_local or self.kept not in (None, BESIDE)
        ranks = 1 if self.store.is_local else max(ranks_here(), local_rank() + 1)
        if ranks > 1 and not noticed:
            warn_once(
                f"each of the {ranks} ranks of this machine reads the headers of all archives: the "
                "store reports neither a time nor a checksum, so a change would not be noticed, and no "
                "index is kept; copy the archives to a store that reports one of them",
                "read-by-each-rank",
            )
        elif ranks > 1 and not keeps:
            raise ValueError(
                f"{self.name} has no kept index, so each of the {ranks} ranks of this machine would "
                "read the archive; set index= to a folder that all ranks share, where one rank makes "
                "each index"
            )
        if self.kept is None or not (noticed and keeps):
            return self._make()
        index = load_index(self.file, self.stamp)  # another process may have made it
        if index is None:
            index = self._make()
            try:
                write_whole(self.file, packed_index(index))
            except OSError as error:  # this index works; the next process indexes the archive again
                warn_once(
                    f"indices of archives are not kept in {os.path.dirname(self.file)}: "
                    f"{type(error).__name__}: {error.strerror}; set index= to a writable folder",
                    "index-not-kept",
                )
        return index

    def _make(self) -> TarIndex:
        store, path, size = self.store, self.path, self.stamp.size
        file: Any
        try:
            if store.is_local:
                file = open(path, "rb")  # noqa: SIM115  # closed below
            elif size < 0:  # can't be read by leaps
                file = store.fs.open(path, "rb", block_size=_LARGE, cache_type="readahead")
            else:
                file = Headers(store, path, size)
            with file:
                return make_index(self.name, file, self.stamp)
        except Exception as error:
            store.raise_named(error, path)


@contextmanager
def _alone(kept: str | None) -> Iterator[None]:
    """Hold the lock of a folder of indices; a process that ends, also by a signal, gives it back."""
    with ExitStack() as locked:
        if kept is not None and kept != BESIDE:
            os.makedirs(kept, exist_ok=True)
            # OSError: the folder isn't writable, of which saving an index warns; or the file system has
            # no locks, and each process makes what is missing.
            with suppress(OSError):
                lock = locked.enter_context(open(os.path.join(kept, _LOCK), "ab"))
                if fcntl is not None:
                    fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


_PARTS = 1024  # blocks whose parts are kept: about 300 bytes each


class _Member(NamedTuple):
    """Place of a member in its archive."""

    offset: int
    size: int
    header: int
    extension: int


class Tar(Shards[Any]):
    """A dataset of samples in tar archives, with the names of webdataset.

    Members with the same name up to the first dot are one sample: ``0001.jpg`` and ``0001.cls``. The
    archives are indexed once, when this object is made: their headers are read from beginning to end.
    Samples are then read in any order, without a search; remote members are read by ranges of bytes.

    Parameters
    ----------
    urls
        Paths or URLs of uncompressed archives, folders or globs of them, as for `Files`; also
        ``{000..123}``.
    fields
        Extensions of the members of a sample, such as ``("jpg;png", "cls")``: a sample is then a tuple
        of their contents. A semicolon stands between alternatives. Others are not read. Default: all,
        as a dict.
    decode
        Function of that tuple or dict that makes the sample.
    index
        Local folder in which the indices are kept for the next time. One of the ranks that share it
        makes them; to fill it ahead of time, make this object once. ``"beside"``: each is beside its
        archive, as ``NAME.index``, where `write_shards` writes it; one of a remote archive is only read
        there. One of an archive that has changed is made again. Default: they are not kept.
    ahead_bytes
        Bytes of blocks of remote archives that a process holds under a `BlockShuffleSampler`, which
        are fetched ahead of their samples. The sampler's window must have room. 0: none, each sample
        is read alone.
    cache_dir
        Local folder in which the blocks of remote archives are kept for the next epoch: one copy for
        all workers and ranks of this machine, and for other jobs that name it. Without a
        `BlockShuffleSampler` these are whole archives.
    cache_bytes
        Bytes of all files in `cache_dir`; a window must have room. The file that was used longest ago
        goes first, and none in use.
    retry_seconds
        Seconds from the first failure of a request within which it is made again, with pauses that
        grow: answers such as 503, timeouts, broken connections. 0: never.
    storage_options
        Options of fsspec for the places of `urls`.

    Attributes
    ----------
    keys : Texts
        Key of each sample.
    extensions : list of str
        Extensions of all members, in lower case.
    ignored : int
        Number of files that belong to no sample: without an extension, hidden, or ``__like_this__``.

    Raises
    ------
    SourceError
        An archive is compressed, damaged or cut short; a member is sparse or a link, leads outside, or
        comes twice. The message names archive and member.
    FileNotFoundError, StoreError
        An archive is not there, or was not served.
    ValueError
        Several ranks of a machine would each index a remote archive, because `index` is None.

    Notes
    -----
    A sample without `fields` is a dict of bytes by extension, with ``__key__`` and ``__url__``.

    A member is read with its header, which is compared with the index. So an archive that was written
    again after it was indexed raises `SourceError`, also over HTTP, unless it has the same names, sizes
    and times at the same positions. For a local archive, size and time of the file are compared, too.

    Examples
    --------
    >>> import io, tarfile, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = f"{folder.name}/shard.tar"
    >>> with tarfile.open(path, "w") as archive:
    ...     for name in ("0.txt", "0.cls", "1.txt", "1.cls"):
    ...         member = tarfile.TarInfo(name)
    ...         member.size = len(name)
    ...         archive.addfile(member, io.BytesIO(name.encode()))
    >>> tar = Tar(path, fields=("txt", "cls"))
    >>> len(tar), tar[1], tar.keys[1]
    (2, (b'1.txt', b'1.cls'), '1')
    >>> tar.close()
    >>> folder.cleanup()
    """

    def __init__(
        self,
        urls: Urls,
        *,
        fields: Sequence[str] | None = None,
        decode: Callable[[Any], Any] | None = None,
        index: str | None = None,
        ahead_bytes: int = AHEAD,
        cache_dir: str | None = None,
        cache_bytes: int = CACHE,
        retry_seconds: float = RETRY,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(fields, str):
            raise TypeError(f"fields must be a sequence of extensions, such as ({fields!r},)")
        if decode is not None:
            function("decode", decode, "a function that takes a sample")
        self._decode = decode
        places = archives(urls, storage_options or {}, retry_seconds)
        indices = indexed(places, index)
        super().__init__(
            [store.name(path) for store, path in places], [len(one.keys) for one in indices]
        )
        self._places = places
        self._shard_stores = list(dict.fromkeys(store for store, _ in places))
        self._stamps = [one.stamp for one in indices]
        self.keys: Texts = Texts(chain.from_iterable(one.keys for one in indices))
        self.extensions = sorted({name for one in indices for name in one.extensions})
        self.ignored = sum(one.ignored for one in indices)
        self._gather(indices)
        self._parts: dict[tuple[int, int, int], Ranges] = {}
        self._read_blocks(ahead_bytes, cache_dir, cache_bytes, remote=self._is_remote)
        self.fields = None if fields is None else tuple(fields)
        self._wanted = None
        if fields is not None:
            self._wanted = [[name.strip().lower() for name in one.split(";")] for one in fields]
            for one, names in zip(fields, self._wanted, strict=True):
                if len(self) and not set(names) & set(self.extensions):
                    raise ValueError(
                        f"fields: no member has the extension {one!r}; the archives have "
                        f"{', '.join(self.extensions)}"
                    )

    def _gather(self, indices: Sequence[TarIndex]) -> None:
        """Put the indices into arrays over all archives."""
        number = {name: at for at, name in enumerate(self.extensions)}
        firsts = np.cumsum([0, *(len(one.offset) for one in indices)])
        rows = [one.starts[:-1] + first for one, first in zip(indices, firsts, strict=False)]
        self._starts = np.concatenate([*rows, firsts[-1:]])
        members = []
        for one in indices:
            codes = np.array([number[name] for name in one.extensions], np.int64)[one.extension]
            members.append(np.stack([one.offset, one.size, one.header, codes], axis=1))
        self._members = np.concatenate(members)

    def read(self, shard: int, number: int) -> Any:
        index = self._firsts[shard] + number
        members = self._members_of(index)
        block = None if self._reader is None else self.fetched(shard, number)
        if block is None:
            parts = Ranges.joining([(one.offset - BLOCK, one.offset + one.size) for one in members])
            what = partial(self._named, shard)
            store, path = self._places[shard]
            data: Any = store.read_ranges(path, parts, self._stamps[shard], what)
        else:
            parts, data = self._parts_of(shard, block.first, block.last), memoryview(block.data)
        contents = {}
        for member in members:
            start, stop = member.offset - BLOCK, member.offset + member.size
            at: Any = parts.find(start, stop)
            if crc32(data[at : at + BLOCK]) != member.header:
                raise SourceError(
                    f"{self.shard_names[shard]}, {self._named(shard, start)}: another header is at "
                    f"byte {start}: the archive has changed since it was indexed; make the Tar source "
                    "again"
                )
            contents[member.extension] = bytes(data[at + BLOCK : at + stop - start])
        sample: Any
        if self._wanted is not None:
            sample = tuple([contents[member.extension] for member in members])
        else:
            sample = {"__key__": self.keys[index], "__url__": self.shard_names[shard]}
            for extension, content in contents.items():
                sample[self.extensions[extension]] = content
        if self._decode is None:
            return sample
        try:
            return self._decode(sample)
        except Exception as error:
            add_note(error, f"loading sample {self.keys[index]!r} of {self.shard_names[shard]}")
            raise

    def fetch(self, shard: int, first: int, last: int) -> bytes:
        what, parts = f"samples {first} to {last - 1}", self._parts_of(shard, first, last)
        store, path = self._places[shard]
        return store.read_ranges(path, parts, self._stamps[shard], lambda _: what)

    def fetch_size(self, shard: int, first: int, last: int) -> int:
        return self._parts_of(shard, first, last).places[-1]

    def fetch_key(self, shard: int, first: int, last: int) -> str:
        parts = self._parts_of(shard, first, last)
        return f"tar {self.shard_names[shard]} {tuple(self._stamps[shard])} {parts.starts} {parts.stops}"

    def _parts_of(self, shard: int, first: int, last: int) -> Ranges:
        """Return the parts of an archive that have the members of these samples."""
        key = shard, first, last
        found = self._parts.get(key)
        if found is not None:
            return found
        while len(self._parts) >= _PARTS:
            self._parts.pop(next(iter(self._parts)), None)
        before = self._firsts[shard]
        begin, end = self._starts[[before + first, before + last]].tolist()
        members = self._members[begin:end]
        if self._wanted is not None:
            wanted = {name for names in self._wanted for name in names}
            codes = [code for code, name in enumerate(self.extensions) if name in wanted]
            members = members[np.isin(members[:, 3], codes)]
        offsets, sizes = members[:, 0], members[:, 1]
        spans = zip((offsets - BLOCK).tolist(), (offsets + sizes).tolist(), strict=True)
        found = self._parts[key] = Ranges.joining(spans)
        return found

    def _members_of(self, index: int) -> list[_Member]:
        """Return the members of a sample that are to be read. Raises `SourceError` if one lacks."""
        first, last = self._starts[index : index + 2].tolist()
        members = [*map(_Member._make, self._members[first:last].tolist())]
        if self._wanted is None:
            return members
        by_name = {self.extensions[member.extension]: member for member in members}
        chosen = []
        for names in self._wanted:
            member = next((by_name[name] for name in names if name in by_name), None)
            if member is None:
                shard, _ = self.locate(index)
                raise SourceError(
                    f"{self.shard_names[shard]}, sample {self.keys[index]!r} has no member "
                    f"{' or '.join(names)}; it has {', '.join(by_name)}"
                )
            chosen.append(member)
        return chosen

    def _named(self, shard: int, start: int) -> str:
        """Return the name, for errors, of the member whose header begins at this byte."""
        first, last = self._firsts[shard : shard + 2]
        rows = self._starts[first:last]
        begin, end = self._starts[[first, last]].tolist()
        row = begin + int((self._members[begin:end, 0] == start + BLOCK).argmax())
        index = first + int(np.searchsorted(rows, row, "right")) - 1
        return f"member {self.keys[index]}.{self.extensions[self._members[row, 3]]}"
