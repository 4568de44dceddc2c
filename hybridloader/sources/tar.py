"""`Tar`: a dataset of samples in tar archives, found by an index of their members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from hybridloader._support.text import function
from hybridloader._support.user_objects import add_note
from hybridloader.errors import SourceError
from hybridloader.sources.block_reader import AHEAD, CACHE
from hybridloader.sources.files import Texts, Urls
from hybridloader.sources.indexing import BLOCK, TarIndex, archives, indexed
from hybridloader.sources.shards import Shards
from hybridloader.sources.store import RETRY, Ranges

_PARTS = 1024
"""Blocks whose parts are kept: about 300 bytes each."""


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
        makes them, and ``hybridloader index`` fills it ahead of time. ``"beside"``: each is beside its
        archive, as ``NAME.index``, where `ShardWriter` writes it; one of a remote archive is only read
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

    @property
    def waits(self) -> bool:
        """True for remote archives without a sampler that reads blocks."""
        return self._is_remote and (self._reader is None or not self._reader.divided)

    def read(self, shard: int, number: int) -> Any:
        index = number + (self._ends[shard - 1] if shard else 0)
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
        if found is None:
            while len(self._parts) >= _PARTS:
                self._parts.pop(next(iter(self._parts)), None)
            found = self._parts[key] = self._make_parts(*key)
        return found

    def _make_parts(self, shard: int, first: int, last: int) -> Ranges:
        before = self._ends[shard - 1] if shard else 0
        begin, end = self._starts[[before + first, before + last]].tolist()
        members = self._members[begin:end]
        if self._wanted is not None:
            wanted = {name for names in self._wanted for name in names}
            codes = [code for code, name in enumerate(self.extensions) if name in wanted]
            members = members[np.isin(members[:, 3], codes)]
        offsets, sizes = members[:, 0], members[:, 1]
        spans = zip((offsets - BLOCK).tolist(), (offsets + sizes).tolist(), strict=True)
        return Ranges.joining(spans)

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
        first = self._ends[shard - 1] if shard else 0
        rows = self._starts[first : self._ends[shard]]
        begin, end = int(self._starts[first]), int(self._starts[self._ends[shard]])
        row = begin + int((self._members[begin:end, 0] == start + BLOCK).argmax())
        index = first + int(np.searchsorted(rows, row, "right")) - 1
        return f"member {self.keys[index]}.{self.extensions[self._members[row, 3]]}"
