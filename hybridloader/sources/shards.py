"""`Shards`: samples in shards, of which each knows how many it has. The contract of all sources.

A source is a map-style dataset, so order, ranks, workers, state and resuming are those of the samplers
and of the loader: nothing here counts samples. The blocks of a remote source are fetched by a
`BlockReader`, each once and ahead of its samples, and may be kept in a `BlockCache`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hybridloader._support import system
from hybridloader._support.store_use import count, counting
from hybridloader._support.text import warn_once, whole
from hybridloader.errors import StoreError
from hybridloader.sources.store import Store, ahead

T_co = TypeVar("T_co", covariant=True)
Ints = npt.NDArray[np.int64]

AHEAD = 512 << 20  # bytes of blocks that a process holds, fetched or being fetched

CACHE = 100 << 30  # bytes of blocks in a cache with a folder


class Fetched(NamedTuple):
    """Bytes of several samples of one shard, as `Shards.fetch` returned them."""

    data: Any  # buffer of bytes
    first: int  # number in the shard of the first of these samples
    last: int  # number after that of the last sample


class Shards(ABC, Generic[T_co]):
    """A dataset whose samples lie in shards, one after the other; a base class.

    A subclass calls ``super().__init__`` and defines `read`, which workers call: a handle that `read`
    needs is a `PerWorker`.

    Parameters
    ----------
    shard_names
        Name of each shard, for errors: a path or URL.
    shard_sizes
        Number of samples of each shard; 0 is allowed.

    Examples
    --------
    >>> class Lines(Shards[str]):
    ...     def __init__(self, texts):
    ...         self.lines = [text.splitlines() for text in texts]
    ...         names = [f"text {i}" for i in range(len(texts))]
    ...         super().__init__(names, [len(lines) for lines in self.lines])
    ...
    ...     def read(self, shard, number):
    ...         return self.lines[shard][number]
    >>> lines = Lines(["a b", "c\\nd\\ne"])
    >>> len(lines), lines[-1], lines.locate(2)
    (4, 'e', (1, 1))
    >>> lines.block_sizes.tolist()
    [1, 3]
    """

    def __init__(self, shard_names: Sequence[str], shard_sizes: Sequence[int] | Ints) -> None:
        self.shard_names = shard_names
        self.shard_sizes: Ints = np.asarray(shard_sizes, np.int64)
        if self.shard_sizes.shape != (len(shard_names),):
            raise ValueError(
                f"there are {len(shard_names)} shards, and shard_sizes of the shape "
                f"{self.shard_sizes.shape}; pass one size for each shard"
            )
        if (self.shard_sizes < 0).any():
            at = int(self.shard_sizes.argmin())
            raise ValueError(
                f"{shard_names[at]} has {self.shard_sizes[at]} samples; pass 0 or more"
            )
        # First sample of each shard, and the number of all. Not a list: of a million shards, forked
        # workers would copy the pages of all its ints.
        firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.shard_sizes)])
        self._firsts: array[int] = array("q", firsts.tobytes())
        self._shard_stores: Sequence[Store] = ()  # closed with this source
        self._reader: BlockReader | None = None
        if type(self).fetch is not Shards.fetch:
            self._read_blocks(AHEAD)

    @property
    def _is_remote(self) -> bool:
        return any(not store.is_local for store in self._shard_stores)

    def _read_blocks(
        self,
        ahead_bytes: int,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
        *,
        remote: bool = True,
        warns: bool = True,
    ) -> None:
        """Hold up to so many bytes of blocks. 0, or not `remote`: read each sample alone."""
        self._reader = None
        if whole("ahead_bytes", ahead_bytes, 0) and remote:
            cache = None
            if cache_dir is not None:
                cache = BlockCache(os.path.abspath(cache_dir), whole("cache_bytes", cache_bytes, 1))
            self._reader = BlockReader(self._firsts, ahead_bytes, cache, warns=warns)

    @abstractmethod
    def read(self, shard: int, number: int) -> T_co:
        """Return a sample.

        Parameters
        ----------
        shard
            Number of the shard, from 0.
        number
            Number of the sample in the shard, from 0.

        Raises
        ------
        SourceError
            The data are bad, so a retry can't help.
        StoreError, OSError
            The store did not serve.
        """

    def fetch(self, shard: int, first: int, last: int) -> Any:
        """Return the bytes of the samples from `first` to before `last` of a shard.

        Your source, if it lies in a remote store, may define it. Under a `BlockShuffleSampler` it is
        then called once for each block, ahead of the samples, from several threads, and `read` finds the
        bytes by `fetched`. Without it each sample is read by itself.

        Parameters
        ----------
        shard
            Number of the shard, from 0.
        first, last
            Numbers of samples in the shard.

        Returns
        -------
        bytes or memoryview
            Whatever `read` needs to find each of these samples in it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no fetch(); define it, or read samples one by one"
        )

    def fetch_size(self, shard: int, first: int, last: int) -> int:
        """Return the number of bytes that `fetch` returns for these arguments; -1 if it is unknown."""
        return -1

    def fetch_key(self, shard: int, first: int, last: int) -> str:
        """Return a name of the bytes that `fetch` returns for these arguments, for a cache.

        It must be another one where the bytes are others: in another file, or if the file has changed.
        """
        return f"{type(self).__qualname__} {self.shard_names[shard]} {first} {last}"

    def fetched(self, shard: int, number: int) -> Fetched | None:
        """Return the block that has a sample, for `read`, which calls this once for each sample.

        Parameters
        ----------
        shard, number
            Those of `read`.

        Returns
        -------
        Fetched or None
            The `data` that `fetch` returned for the samples from `first` to before `last` of this
            shard. None: read the sample alone.

        Raises
        ------
        FileNotFoundError
            `fetch` did not find the shard.
        """
        if self._reader is None:
            return None
        found = self._reader.find(self, self._firsts[shard] + number)
        if found is None and counting():
            count(self.shard_names[shard], alone=1)
        return found

    def read_ahead(
        self, sizes: Ints, order: Iterator[Ints] | None, blocks: int
    ) -> Callable[[int], None] | None:
        """Fetch blocks ahead of their samples from now on; `BlockShuffleSampler` calls it.

        Parameters
        ----------
        sizes
            Number of samples of each block.
        order
            Arrays of indices of the samples that come, in their order. None: nothing comes yet, and
            workers may be about to start.
        blocks
            Number of blocks from which samples come in turn.

        Returns
        -------
        callable or None
            To be called with the number of samples that were given out, each time. None: nothing is
            read ahead.
        """
        reader = self._reader
        if reader is None:
            return None
        if order is None:
            reader.divide(sizes, blocks)
        else:
            reader.begin(self, sizes, order, blocks)
        return partial(reader.advance, self)

    @property
    def block_sizes(self) -> Ints:
        """Number of samples of each block of consecutive samples that are read best together.

        `BlockShuffleSampler` asks for it. Here each shard is a block.
        """
        return self.shard_sizes

    def close(self) -> None:
        """Close the handles of this process. They are opened again when they are needed."""
        if self._reader is not None:
            self._reader.close()
        for store in self._shard_stores:
            store.close()

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the shard that has the sample `index`, and its number there."""
        count = len(self)
        at = whole("an index", index)
        at += count if at < 0 else 0
        if not 0 <= at < count:
            raise IndexError(f"no sample {index} in a {type(self).__name__} of {count}")
        shard = bisect_right(self._firsts, at) - 1
        return shard, at - self._firsts[shard]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> T_co:
        return self.read(*self.locate(index))

    def __iter__(self) -> Any:  # otherwise Python requests indices until one is out of range
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} samples in {len(self.shard_names):,} shards)"


# -- `BlockCache`: blocks of remote sources in a local folder, which all processes of a machine share.
#
# Each block is a file, written under a lock and renamed when it is whole; its last bytes are a checksum
# of the others. Who uses a block holds a shared lock on its file, so that another process which makes
# room leaves it. Locks are the kernel's: those of a process that was killed are gone with it.


fcntl = system.module("fcntl")  # None on Windows, which can't remove an open file either

_SHARED, _ALONE, _IF_FREE = (
    (0, 0, 0) if fcntl is None else (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB)
)
"""Locks: with others, alone, and alone or not at all."""

_LOCKS = 256  # lock files for blocks that are being fetched; blocks whose names end alike share one

_TRAILER = 12  # bytes after the data: the length, and a checksum of the data and the length

_SPARE = 0.05
"""Share of the limit that is freed at a time. The folder is listed again after as many bytes."""

_PRIVATE = "hybridloader-blocks-"
"""Prefix of the names of folders that are removed when their process ends."""

_OWNER = "owner"  # file in such a folder that its process has locked


class BlockCache:
    """Blocks in a folder, which several sources and several jobs may share.

    The files used longest ago are removed first; a file that a process uses stays. If there is no room
    for a block, it is not kept.
    """

    def __init__(
        self,
        folder: str,  # it is made if it is not there
        limit: int,  # bytes of all files in it, those of other jobs included
    ) -> None:
        self.folder, self.limit = folder, limit
        self.private = False  # True: it lasts only as long as the process that made it
        self._lock = threading.Lock()
        # All the mutable state:
        self._room = 0.0  # bytes that may be written until the folder is listed again

    def __reduce__(self) -> Any:
        return BlockCache, (self.folder, self.limit)

    def get(
        self, key: str, fetch: Callable[[], Any], fetched: Callable[[Any], object] | None = None
    ) -> Any:
        """Return the bytes of a block, by `fetch` if no process has put it here yet.

        Of several that ask for it at a time one fetches it, and the others wait. `fetched` is called
        with the result of `fetch` before it is written: a disk may be slow.
        """
        name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        path = os.path.join(self.folder, f"{name}.block")
        found = self._open(path)
        if found is not None:
            return found
        with ExitStack() as locks:
            try:
                os.makedirs(self.folder, exist_ok=True)
                lock = f"{int(name[:8], 16) % _LOCKS:03d}.lock"
                locks.enter_context(_locked(os.path.join(self.folder, lock)))
            except OSError as error:
                self._warn(error)
                return fetch()
            found = self._open(path)
            if found is not None:
                return found
            data = fetch()
            if fetched is not None:
                fetched(data)
                self._write(path, data)
                return data
            # Map the written file, so that the block takes no private memory.
            found = self._open(path, check=False) if self._write(path, data) else None
            return data if found is None else found

    def _open(self, path: str, *, check: bool = True) -> Any:
        """Return the data of a file if it is whole. It is in use as long as these are."""
        try:
            with _locked(path, _SHARED, os.O_RDONLY) as fd:
                # The map keeps a duplicate of the descriptor, and with it the lock.
                held = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
                data = memoryview(held)[:-_TRAILER]
                if check and held[-_TRAILER:] != _trailer(data):
                    data.release()
                    held.close()
                    return None
                with suppress(OSError):
                    os.utime(path)
                return data
        except (OSError, ValueError):  # ValueError: the file is empty
            return None

    def _write(self, path: str, data: Any) -> bool:
        part = f"{path[: -len('.block')]}.part"  # one left by a killed process is overwritten
        try:
            if not self._make_room(len(data) + _TRAILER):
                return False
            with open(part, "wb") as file:
                file.write(data)
                file.write(_trailer(data))
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            self._warn(error)
            return False
        return True

    def _make_room(self, size: int) -> bool:
        """Make room by removing the files used longest ago. Return False if there is none."""
        with self._lock:
            if size <= self._room:
                self._room -= size
                return True
        with _locked(os.path.join(self.folder, "room.lock")):
            files = []
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.name.endswith((".block", ".part")):
                            stat = entry.stat()
                            files.append((stat.st_mtime_ns, stat.st_size, entry.path))
            total = sum(size for _, size, _ in files) + size
            target = self.limit if total <= self.limit else self.limit * (1 - _SPARE)
            for _, bytes_of, path in sorted(files):
                if total <= target:
                    break
                if path.endswith(".block") and _removed(path):
                    total -= bytes_of
        with self._lock:
            self._room = max(0.0, min(self.limit * _SPARE, self.limit - total))
        return total <= self.limit

    def _warn(self, error: OSError) -> None:
        warn_once(
            f"blocks are not kept in {self.folder}: {type(error).__name__}: {error.strerror}; set "
            "cache_dir= to a folder that is writable and has room for cache_bytes=",
            "blocks-not-kept",
        )


def private_cache(limit: int) -> BlockCache:
    """Return a cache that is removed with this object, or by the next process if this one is killed."""
    base = os.path.join(system.ROOT, "dev/shm")
    if not os.access(base, os.W_OK) or shutil.disk_usage(base).free < 2 * limit:
        base = tempfile.gettempdir()
    for name in os.listdir(base):
        if name.startswith(_PRIVATE) and fcntl is not None:
            folder = os.path.join(base, name)
            # The lock is free if its owner does not live.
            with suppress(OSError), _locked(os.path.join(folder, _OWNER), _IF_FREE, os.O_RDWR):
                shutil.rmtree(folder, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_PRIVATE, dir=base)
    owner = ExitStack()
    owner.enter_context(_locked(os.path.join(folder, _OWNER)))
    cache = BlockCache(folder, limit)
    cache.private = True
    weakref.finalize(cache, _remove, folder, owner, os.getpid())
    return cache


def _remove(folder: str, owner: ExitStack, process: int) -> None:
    if os.getpid() == process:  # not in a fork of the process
        shutil.rmtree(folder, ignore_errors=True)
    owner.close()


def _trailer(data: Any) -> bytes:
    length = len(data).to_bytes(8, "little")
    return length + zlib.crc32(length, zlib.crc32(data)).to_bytes(4, "little")


def _removed(path: str) -> bool:
    """Remove a file unless some process uses it."""
    try:
        with _locked(path, _IF_FREE, os.O_RDONLY):
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def _locked(path: str, how: int = _ALONE, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    """Lock a file against threads and processes. The lock is gone with the process."""
    fd = os.open(path, flags, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(fd, how)
        yield fd
    finally:
        os.close(fd)


# -- `BlockReader`: blocks of a remote source, each fetched once, ahead of its samples.
#
# A `BlockShuffleSampler` announces the order of an epoch when its iteration begins. From the first
# sample on, threads fetch the blocks in the order in which their first samples come, as long as there
# is room, and each block is dropped after its last sample was read. A thread lives only while it
# fetches.
#
# Nothing depends on the reader but speed: a sample whose block is not held is read alone. So a retry, a
# second iteration of the same source or a copy of it is slower, and never wrong.


AT_ONCE = 16  # blocks that are fetched at a time

_MANY = 512  # samples read one by one from a remote source before a warning names the sampler

_QUEUED = 64
"""Largest number of blocks looked up ahead of time while there is no room for another one."""

_JOIN = 5.0  # seconds that closing waits for fetches in flight


_Place = tuple[int, int, int]
"""Shard of a block, its first sample there, and the one after its last."""


def _place_of(starts: array[int], shard_starts: array[int], number: int) -> _Place:
    """Return the place of a block; `starts` are the first samples of all, and the number of all."""
    start, stop = starts[number : number + 2]
    shard = bisect_right(shard_starts, start) - 1
    first = shard_starts[shard]
    return shard, start - first, stop - first


class _Block:
    """A block of a plan. Its fields change under the lock of the reader; `found` is set once."""

    __slots__ = ("fetched", "found", "left", "number", "place", "size", "stop", "uses", "writing")

    def __init__(self, number: int, place: _Place, size: int) -> None:
        self.number, self.place = number, place
        self.left = place[2] - place[1]  # samples not read yet
        self.size = size  # bytes, fetched or reserved; -1: unknown
        self.uses = 0  # samples planned and not read
        self.stop = 0  # samples of the order up to the end of the last part that has one of these
        self.fetched = threading.Event()
        self.found: Any = None  # then its data, or a `_Failure`; None: in the cache, for others
        self.writing = False  # fetched, and its thread still writes it into the cache


class _Failure:
    """Error of a block that could not be fetched: each of its samples raises it once.

    So a shard that stays missing is waited for once, not for each of its samples. A sample that is asked
    for again, after a retry or in the next epoch, is asked of the store again.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error
        # All the mutable state:
        self._raised: set[int] = set()

    def raise_once(self, index: int) -> bool:
        """Raise the error of a store. Return False if the sample is to be read alone.

        Of bad data other samples may be whole; an own error is raised for those that are not.
        """
        error = self._error
        if not isinstance(error, (FileNotFoundError, StoreError)) or index in self._raised:
            return False
        self._raised.add(index)
        kind = StoreError if isinstance(error, StoreError) else FileNotFoundError
        raise kind(*error.args) from error


class _Plan:
    """Blocks that one iteration of a sampler reads, in its order, and those that are held."""

    def __init__(
        self,
        starts: array[int],
        shard_starts: array[int],
        order: Iterator[Ints],
        size_of: Callable[..., int],
    ) -> None:
        self.starts, self.process = starts, os.getpid()
        self._shard_starts, self._size_of = shard_starts, size_of
        # All the mutable state:
        self.order: Iterator[Ints] | None = order  # samples that were not looked at yet
        self.blocks: dict[int, _Block] = {}  # in the order of their first samples
        self.queue: deque[_Block] = deque()  # blocks that no thread has begun to fetch
        self.held = 0  # bytes
        self.begun = False  # a sample was read
        self._seen: set[int] = set()  # all blocks so far
        self._looked = 0  # samples of the order so far
        self._drawn = 0  # samples that the sampler returned

    def look_ahead(self, blocks: int) -> None:
        """Have `blocks` blocks in the queue, if as many are left."""
        while self.order is not None and len(self.queue) < blocks:
            samples = next(self.order, None)
            if samples is None:
                self.order = None
                return
            self._looked += len(samples)
            found = np.searchsorted(self.starts, samples, "right") - 1
            numbers, firsts, counts = np.unique(found, return_index=True, return_counts=True)
            by_first = firsts.argsort()
            uses = zip(numbers[by_first].tolist(), counts[by_first].tolist(), strict=True)
            for number, more in uses:
                if number not in self._seen:
                    self._seen.add(number)
                    place = _place_of(self.starts, self._shard_starts, number)
                    made = self.blocks[number] = _Block(number, place, self._size_of(*place))
                    self.queue.append(made)
                block = self.blocks.get(number)
                if block is not None:
                    block.uses += more
                    block.stop = self._looked

    def advance(self, samples: int) -> bool:
        """Let go of the blocks that other processes have read, as so many more samples were drawn."""
        self._drawn += samples
        over = [
            block
            for block in self.blocks.values()
            if block.fetched.is_set() and block.stop <= self._drawn
        ]
        for block in over:
            self.drop(block)
        return bool(over)

    def start(self, block: _Block, size: int) -> None:
        self.queue.remove(block)  # mostly the first one
        block.size = size
        self.held += size

    def drop(self, block: _Block) -> None:
        """Let go of a block, unless it is being written: its bytes count until then."""
        if not block.writing and self.blocks.pop(block.number, None) is not None:
            self.held -= block.size

    def make_room(self, size: int, limit: int) -> bool:
        """Drop blocks of which some samples never come: a run was resumed, or ranks share a block."""
        if len(self.queue) < _QUEUED:
            self.look_ahead(len(self.queue) + 1)
        for block in [*self.blocks.values()]:
            over = block.stop < self._looked or self.order is None
            if over and block.uses <= 0 and block.fetched.is_set():
                self.drop(block)
                if self.held + size <= limit:
                    return True
        return False


class BlockReader:
    """Blocks of one source. Threads share them; processes do by way of a folder.

    A source that was sent to another process has a cache from then on, a private one if it has no other.
    The process of the sampler fetches into it, and the others read from there.
    """

    def __init__(
        self,
        shard_starts: array[int],  # first sample of each shard, and the number of all
        # Bytes of blocks that are held or being fetched. A block that a sample waits for is fetched even
        # if there is no room.
        limit: int = AHEAD,
        cache: BlockCache | None = None,  # keeps blocks from one epoch to the next
        warns: bool = True,  # if many samples are read without a plan
        starts: array[int] | None = None,  # those that a sampler in another process announces
        window: int = 1,
    ) -> None:
        self._shard_starts, self._limit, self._warns = shard_starts, limit, warns
        self._lock = threading.Lock()
        # All the mutable state:
        self._cache = cache
        self._sent = False  # True: other processes have a copy of this reader
        self._begins = starts is None  # False: another process announces blocks and counts them
        self._starts = starts  # first samples of the sampler's blocks
        self._window = window  # blocks in use at a time
        self._open: OrderedDict[int, Any] = OrderedDict()  # data and `_Failure`s without a plan
        self._plan: _Plan | None = None
        self._largest = 0  # bytes of the largest block
        self._threads: set[threading.Thread] = set()
        self._alone = 0  # samples read without a plan

    def __reduce__(self) -> Any:
        if self._starts is not None:
            self._cache = self._cache or private_cache(2 * self._limit)
            self._sent = True
        # In the other process no sampler announces anything, so none is missed.
        described = self._shard_starts, self._limit, self._cache, False, self._starts, self._window
        return BlockReader, described

    def divide(self, sizes: Ints, window: int) -> bool:
        """Have blocks of so many samples, of which `window` are in use at the same time.

        Returns False if some block has samples of two shards, so samples are read alone.
        """
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        if not np.isin(np.asarray(self._shard_starts, np.int64), starts).all():
            return False
        self._starts, self._window = array("q", starts.tobytes()), window
        return True

    def begin(
        self,
        source: Shards[Any],
        sizes: Ints,  # number of samples of each block; none lies in two shards
        order: Iterator[Ints],  # of the samples that come; read from several threads, one at a time
        blocks: int,  # number of blocks that are in use at the same time
    ) -> None:
        """Read ahead in `order` from the next sample on. The blocks of an earlier plan are dropped."""
        if not self.divide(sizes, blocks) or self._starts is None:
            return
        plan = _Plan(self._starts, self._shard_starts, order, source.fetch_size)
        plan.look_ahead(blocks)
        first = [*islice(plan.queue, blocks)]
        window = sum(block.size for block in first)
        if self._cache is not None and window > self._cache.limit:
            raise ValueError(
                f"cache_bytes={self._cache.limit} has no room for the {len(first)} blocks of a window "
                f"({window} bytes); raise it, or pass a smaller block_size= or window_blocks= to "
                "BlockShuffleSampler"
            )
        if window > self._limit:
            warn_once(
                f"the {len(first)} blocks of a window have {window} bytes, more than ahead_bytes="
                f"{self._limit}, so samples are read one by one, with a request each; pass a smaller "
                "block_size= or window_blocks= to BlockShuffleSampler, or raise ahead_bytes=",
                "large-window",
            )
            plan = _Plan(self._starts, self._shard_starts, iter(()), source.fetch_size)
        self._plan = plan
        if self._sent:  # other processes read the samples
            plan.begun = True
            self._fill(source)

    def find(self, source: Shards[Any], index: int, samples: int = 1) -> Fetched | None:
        """Return the block of a sample; None if the sample is to be read alone.

        It is asked for once for each of its samples, or for so many `samples` at once.

        Raises `FileNotFoundError` or `StoreError` if its shard is not there, or was not served.
        """
        plan = self._plan
        if plan is None:
            return self._unplanned(source, index)
        if plan.process != os.getpid():  # a fork has the parent's locks without its threads
            return None
        number = bisect_right(plan.starts, index) - 1
        block = plan.blocks.get(number)
        if block is None:
            return None if self._cache is None else self._unplanned(source, index)
        if not block.fetched.is_set():
            if not plan.begun:  # not in `begin`: a program may ask for an order only
                self._fill(source)
                plan.begun = True  # not sooner: no thread shall find its block not started
            with self._lock:
                mine = block in plan.queue
                if mine:
                    plan.start(block, self._size(block))
            if mine:
                self._fetch(source, plan, block)
            began = perf_counter()
            block.fetched.wait()
            if counting():
                count(source.shard_names[block.place[0]], waited=perf_counter() - began)
        data = block.found
        if data is None:  # for other processes
            return self._unplanned(source, index)
        if type(data) is _Failure:
            data.raise_once(index)
            return None
        with self._lock:
            block.left -= samples
            block.uses -= samples
            done = block.left <= 0
            if done:
                plan.drop(block)
        if done:
            self._fill(source)
        return Fetched(data, *block.place[1:])

    def advance(self, source: Shards[Any], samples: int) -> None:
        """Note that the sampler gave out so many more samples."""
        plan = self._plan
        if self._sent and plan is not None and plan.process == os.getpid():
            with self._lock:
                over = plan.advance(samples)
            if over:
                self._fill(source)

    def _unplanned(self, source: Shards[Any], index: int) -> Fetched | None:
        """Return the block of a sample from the cache, if there is one."""
        if self._cache is None:
            self._alone += 1
            if self._alone == _MANY and self._warns:
                warn_once(
                    "samples of a remote source are read one by one, with a request each; pass the "
                    "loader sampler=BlockShuffleSampler(source, seed), which reads whole blocks",
                    "read-one-by-one",
                )
            return None
        starts = self._starts or self._shard_starts  # each shard is a block, if no sampler has any
        number = bisect_right(starts, index) - 1
        place = _place_of(starts, self._shard_starts, number)
        found = self._open.get(number)
        if found is None or (type(found) is _Failure and not found.raise_once(index)):
            try:
                found = self._bytes_of(source, place)
            except Exception as error:
                found = _Failure(error)
            with self._lock:
                self._open[number] = found
                while len(self._open) > 2 * self._window:
                    self._open.popitem(last=False)
        if type(found) is _Failure:
            found.raise_once(index)
            return None
        return Fetched(found, *place[1:])

    def _bytes_of(
        self,
        source: Shards[Any],
        place: _Place,
        early: Callable[[Any], object] | None = None,
    ) -> Any:
        if self._cache is None:
            return source.fetch(*place)
        name, counts = source.shard_names[place[0]], self._begins and not self._cache.private
        fetched = False

        def fetch() -> Any:
            nonlocal fetched
            data = source.fetch(*place)
            fetched = True
            if counts and counting():  # before a sample has it: the last one may end the epoch
                count(name, misses=1)
            return data

        began = perf_counter()
        found = self._cache.get(source.fetch_key(*place), fetch, early)
        if counting() and not fetched:
            if not self._begins:  # this process waited until another one fetched it
                count(name, waited=perf_counter() - began)
            elif counts:
                count(name, hits=1)
        return found

    def close(self) -> None:
        """Drop all blocks, and wait a few seconds for fetches that have begun."""
        plan, self._plan = self._plan, None
        self._open.clear()
        if plan is None or plan.process != os.getpid():
            return
        with self._lock:
            threads = [*self._threads]
        for thread in threads:
            thread.join(_JOIN)

    def _size(self, block: _Block) -> int:
        return block.size if block.size >= 0 else self._largest

    def _next(self) -> tuple[_Plan, _Block] | None:
        """Take the block that is to be fetched next, if there is room for it."""
        with self._lock:
            plan = self._plan
            if plan is None or plan.process != os.getpid():
                return None
            plan.look_ahead(1)
            if not plan.queue:
                return None
            block = plan.queue[0]
            size = self._size(block)
            if plan.held + size > self._limit and not plan.make_room(size, self._limit):
                return None
            plan.start(block, size)
            return plan, block

    def _fill(self, source: Shards[Any]) -> None:
        """Start threads while there are blocks to fetch, and room for them."""
        while len(self._threads) < AT_ONCE and (found := self._next()) is not None:
            thread = threading.Thread(
                target=self._run, args=(source, *found), name="hybridloader-blocks", daemon=True
            )
            with self._lock:
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: its samples are read one by one
                self._threads.discard(thread)
                self._have(*found, _Failure(error))
                return

    def _run(self, source: Shards[Any], plan: _Plan, block: _Block) -> None:
        found: tuple[_Plan, _Block] | None = (plan, block)
        ahead.reads = True
        try:
            while found is not None:
                self._fetch(source, *found)
                found = self._next()
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _fetch(self, source: Shards[Any], plan: _Plan, block: _Block) -> None:
        """Fetch a block that this thread has started. An error is kept for those who read it.

        Its samples can be read before it is in the cache, unless other processes read them there.
        """
        early = None if self._sent else partial(self._have, plan, block, writes=True)
        found: Any = _Failure(InterruptedError())  # Ctrl-C: its samples are read one by one
        try:
            found = self._bytes_of(source, block.place, early)
        except Exception as error:
            found = _Failure(error)
        finally:
            if not block.fetched.is_set():
                self._have(plan, block, found)
            else:  # it is written, or can't be
                with self._lock:
                    block.writing = False
                    if block.left <= 0:
                        plan.drop(block)

    def _have(self, plan: _Plan, block: _Block, found: Any, *, writes: bool = False) -> None:
        failed = type(found) is _Failure
        size = 0 if failed else len(found)
        with self._lock:
            plan.held += size - block.size
            block.size, block.writing = size, writes
            self._largest = max(self._largest, size)
        block.found = None if self._sent and not failed else found
        block.fetched.set()
