"""Cache of the items of one whole pass, in memory or in a file, for later passes.

An epoch counts as whole when its end was reached and no item of it raised; any other is thrown away.
Once there is a whole one, the steps before the cache are not even opened.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import reprlib
import stat
import struct
import sys
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hybridloader._support import system
from hybridloader._support.text import short, warn
from hybridloader._support.user_objects import add_note, no_answer, text_of
from hybridloader.errors import CacheError, ResultPicklingError, StateError
from hybridloader.memory.packing import pack, unpack
from hybridloader.running.operator import (
    Chain,
    Context,
    Length,
    Mark,
    Operator,
    OperatorIterator,
    Upstream,
    UpstreamPart,
    settle,
    steps_in,
)

_Kept = tuple[list[Any], list[int]]  # the items of a whole pass, and its seed and epoch


@dataclass(frozen=True)
class Cache(Operator):
    """Keeps the items of the first whole epoch, and gives them in every later one.

    The steps before are frozen with it: random choices made there are made once.

    Parameters
    ----------
    path
        Path of a file, which only this user can read. It is used again by later runs, and must be
        deleted when the data or the steps before it have changed. None keeps the items in memory, with
        this very object: every pass gives the same objects, so change none of them in place. A copy of
        the object, and one that was pickled, begins with nothing.
    fingerprint
        Description of the steps before. A file that was written with another one is refused.

    Raises
    ------
    CacheError
        When an epoch begins, or at an item: the file is damaged, or was written by another pipeline.
    """

    path: str | os.PathLike[str] | None = None
    fingerprint: str = field(default="", repr=False)
    ranks: Callable[[], str] | None = field(default=None, repr=False, compare=False)
    """Function that returns the ranks of the steps before, which may be unknown before an epoch."""
    # Not a part of the description: empty until a whole pass is kept in memory. The first one counts.
    _kept: list[_Kept] = field(default_factory=list, init=False, repr=False, compare=False)

    cheap = True
    counts_errors = True  # what is kept has none

    def __post_init__(self) -> None:
        if self.path is not None:
            path = os.fspath(self.path) if isinstance(self.path, os.PathLike) else self.path
            if not isinstance(path, str):
                raise TypeError(f"{self.name}: path must be that of a file, not {short(self.path)}")
            if not os.path.basename(path) or "\0" in path:
                raise ValueError(f"{self.name}: path={path!r} names no file")
            settle(self, path=path)
        if not isinstance(self.fingerprint, str):
            raise TypeError(
                f"{self.name}: fingerprint must be a text, not {short(self.fingerprint)}"
            )

    def __reduce__(self) -> Any:
        return Cache, (self.path, self.fingerprint, self.ranks)

    def ready(self) -> bool:
        """Return True if a whole epoch is kept, so that the steps before are not needed."""
        return bool(self._kept) if self.path is None else os.path.exists(self.path)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return self.begin(lambda: items, context)

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        if self.ready() or (mark is not None and mark.value is not None):
            return []
        # A pass that is to be kept must be whole, so it is made again from its beginning.
        return None if n else [UpstreamPart(None, 0, epoch)]

    def begin(self, upstream: Upstream, context: Context) -> Iterator[Any]:
        if self.path is None:
            return self._begin_in_memory(upstream, context)
        path = str(self.path)
        fingerprint = self.fingerprint + ("" if self.ranks is None else self.ranks())
        try:
            reader = Reader(path, fingerprint)
        except FileNotFoundError:
            if context.saved is not None and context.saved.value is not None:
                raise no_answer(
                    StateError(
                        f"{self.name}: when the state was taken, items came from the cache file "
                        f"{path!r}, which does not exist any more; restore it, or begin the epoch again"
                    )
                ) from None
        else:
            context.mark(0, "file")
            reader.next = min(context.start, len(reader))
            return context.drop(reader, reader.next)
        context.mark(0, None)
        folder = os.path.dirname(path) or os.curdir
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{self.name}: there is no folder {folder!r} for the file {path!r}; make it first"
            )
        before = upstream()
        writer = None
        try:
            writer = Writer(path, fingerprint)
        except OSError as error:
            _warn_of(path, error)
        return KeepingIterator(before, writer, path)

    def _begin_in_memory(self, upstream: Upstream, context: Context) -> Iterator[Any]:
        origin = [context.run_seed, context.epoch]
        kept = None if context.saved is None else context.saved.value  # else it was being filled
        meant = kept or origin
        if self._kept:
            items, of = self._kept[0]
            if context.saved is not None and of != meant:
                raise no_answer(
                    StateError(
                        f"{self.name}: {self._of_state(meant)}, and this cache holds that of seed "
                        f"{of[0]}, epoch {of[1]}; make the pipeline again"
                    )
                )
            context.mark(0, of)
            start = min(context.start, len(items))
            rest = map(items.__getitem__, range(start, len(items)))
            return context.drop(OperatorIterator(rest), start)
        if kept is None:
            context.mark(0, None)
            return KeepingIterator(upstream(), _Shelf(self._kept, origin))
        if meant[0] != context.run_seed:
            raise no_answer(
                StateError(
                    f"{self.name}: {self._of_state(meant)}, which another run had made: the seed of "
                    f"this one is {context.run_seed}. Cache in a file to resume from such states"
                )
            )
        context.mark(0, meant)
        again = KeepingIterator(upstream(epoch=meant[1]), _Shelf(self._kept, meant))
        return context.drop(again, 0)

    @staticmethod
    def _of_state(meant: list[int]) -> str:
        return f"when the state was taken, it held the pass of seed {meant[0]}, epoch {meant[1]}"

    def length(self, upstream: Length) -> Length:
        return len(self._kept[0][0]) if self._kept else upstream


class _Shelf:
    """Items of an epoch that become `kept` at its end."""

    def __init__(self, kept: list[_Kept], origin: list[int]) -> None:
        self._kept, self._origin = kept, origin
        self._items: list[Any] = []
        self.add, self.discard = self._items.append, self._items.clear

    def commit(self) -> None:
        if not self._kept:  # of two passes at a time, the first stays the first
            self._kept.append((self._items, self._origin))


class KeepingIterator(OperatorIterator):
    """An epoch that is kept, in memory or in the file `path`, if it comes to its end."""

    def __init__(
        self, items: Iterator[Any], writer: Writer | _Shelf | None, path: str | None = None
    ) -> None:
        super().__init__(items)
        self._path = path
        # All the mutable state:
        self._writer = writer  # None: not kept
        self._raised = 0  # items

    def __next__(self) -> Any:
        try:
            item = self._pull()
        except StopIteration:
            self._end()
            self._finish()
            raise
        except Exception:
            self._raised += 1
            self._discard()
            raise
        if self._writer is not None:
            self._add(self._writer, item)
        return item

    def _add(self, writer: Writer | _Shelf, item: Any) -> None:
        try:
            writer.add(item)
        except BaseException as error:  # half a record may have been written
            self._discard()
            if isinstance(error, OSError):
                _warn_of(self._path, error)
                return
            if not isinstance(error, ResultPicklingError):
                raise
            self._raised += 1
            raise ResultPicklingError(
                f"an item can't be written to the cache file {self._path!r}: {short(item)}: "
                f"{text_of(error.__cause__ or error)}. Cache in memory, without a path, or before the "
                "step that makes it"
            ) from error

    def _finish(self) -> None:
        writer, self._writer = self._writer, None
        raised, self._raised = self._raised, 0
        if raised:
            warn(
                f"a pass in which items raised errors ({raised} here) is not whole, so the cache does "
                "not keep it; skip such items in a step before the cache",
                "cache-not-kept",
            )
        if writer is not None:
            try:
                writer.commit()
            except BaseException as error:
                writer.discard()
                if not isinstance(error, OSError):
                    raise
                _warn_of(self._path, error)

    def _discard(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.discard()

    def close(self) -> None:
        self._discard()
        self._raised = 0
        super().close()


def _warn_of(path: str | None, error: BaseException) -> None:
    warn(
        f"the cache file {path!r} can't be written ({error}); its written part is removed, and "
        "this epoch continues without a cache",
        "cache-not-written",
    )


# -- the description of the steps before a cache

_LONGEST = 10_000  # most characters of a repr that are described

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


class _StableRepr(reprlib.Repr):
    """Reprs that are the same in every run: without addresses, with sets in order.

    The first 64 items and the length stand for a container, and its ends for any other long repr.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 64
        self.maxstring = self.maxother = _LONGEST

    def repr1(self, value: Any, level: int) -> str:
        if isinstance(value, (set, frozenset)):  # of items that may have no order
            value = type(value).__name__, sorted(self.repr1(item, level - 1) for item in value)
        length = f" of {len(value)}" if isinstance(value, (list, tuple, dict)) else ""
        return super().repr1(value, level) + length

    def repr_partial(self, value: Any, level: int) -> str:
        return self.repr1((value.func, value.args, value.keywords), level)

    def repr_instance(self, value: Any, level: int) -> str:
        if is_dataclass(value) and not isinstance(value, type):
            named = {
                field.name: getattr(value, field.name) for field in fields(value) if field.repr
            }
            return f"{type(value).__qualname__}({self.repr1(named, level)})"
        return _ADDRESS.sub("", super().repr_instance(value, level))


def fingerprint_of_steps(chain: Chain) -> str:
    """Describe the steps of a pipeline, with a digest of the values that each was given."""
    steps = []
    for operator in chain.operators:
        branches = "".join(f"[{fingerprint_of_steps(branch)}]" for branch in operator.branches())
        values = _StableRepr().repr(_values(operator)).encode(errors="surrogatepass")
        digest = hashlib.blake2b(values, digest_size=5).hexdigest()
        steps.append(f"{operator.describe(None)} #{digest}{branches}")
    return " -> ".join(steps)


def ranks_of_steps(chain: Chain) -> str:
    """Describe which rank of how many this process is now, for each step that selects by rank.

    Empty where it is the only one.
    """
    shares = (step.share or (1, 0) for step in steps_in(chain))
    return "".join(f" rank {rank} of {ranks}" for ranks, rank in shares if ranks > 1)


def _values(operator: Operator) -> dict[str, Any]:
    """Return the values that decide which items come out of `operator`, not where or how fast."""
    own: Any = operator
    if not (is_dataclass(own) and fields(own)):
        return dict(getattr(operator, "__dict__", {}))
    apart = ("placement", *operator.not_fingerprinted)
    names = (field.name for field in fields(own) if field.compare and field.name not in apart)
    found = {name: getattr(operator, name) for name in names}
    if operator.placement is not None:
        found["on_error"] = operator.placement.on_error
        found["seeding"] = operator.placement.seeding
    return found


# -- file of a cache: the items of one epoch are written, and read back
#
#     head      magic, version
#     records   digest of the rest | size of the pickle, number of buffers, their sizes | pickle, buffers
#     index     the fingerprint (utf-8), and where each record begins
#     tail      where the index begins, size of the fingerprint | digest of these and the index | magic
#
# Numbers are in the machine's own order. Buffers begin at multiples of 64, so that arrays over them are
# aligned. As the index has the beginnings of records, damage to one spoils no other. A file is written
# under a temporary name beside its own and renamed when it is whole, so a reader never sees half of
# one; it is not synced, because the digests find data that a power failure has cut off.
#
# Digests find damage, not malice: unpickling runs code. So a file is written for this user alone, and
# one that is somebody else's, or that others can write to, is not read.

_MAGIC = b"HLcache\n"
_END = b"HLwhole\n"
_VERSION = 3
_HEAD = struct.Struct("=8sI")
_SIZES = struct.Struct("=QQ")
_TAIL = struct.Struct("=QQ16s8s")
_DIGEST = 16
_ALIGNED = 64

_DIGESTS = re.compile(" #[0-9a-f]{10}")
"""Digest, in a fingerprint, of the values that a step was given."""

_BLOCK = 64 * 1024  # bytes of a record from which on its pieces are written one by one, uncopied

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_HOW = os.O_RDONLY | system.BINARY | system.NO_WAITING


def _digest(first: Any, *pieces: Any) -> bytes:
    made = hashlib.blake2b(first, digest_size=_DIGEST)
    for piece in pieces:
        made.update(piece)
    return made.digest()


def _who_else(found: os.stat_result) -> str | None:
    """Name who besides this user and root may have written a file; None if no one, or if it is not
    known."""
    if not system.OWNERS:  # what a user's folder lets others do is inherited
        return None
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, and this process is of user {os.geteuid()}"
    if found.st_mode & _OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


class Writer:
    """A file that is being written. If it is let go without `commit`, nothing was written.

    Any method may raise `OSError`: for example, there is no room, or the file system gives files to
    others. Call `discard` then.
    """

    def __init__(self, path: str, fingerprint: str) -> None:
        folder, name = os.path.split(path)
        # 0600, as mkstemp has it: a pickle that others can write to is theirs to run.
        fd, temporary = tempfile.mkstemp(".partial", f".{name}.", folder or os.curdir)
        self._path, self._fingerprint = path, fingerprint
        self._temporary, self._fd = temporary, fd
        self._finalizer = weakref.finalize(self, _remove, fd, temporary, os.getpid())
        # All the mutable state, besides the file:
        self._position = 0
        self._starts = array("Q")
        try:
            somebody = _who_else(os.fstat(fd))  # NFS with root_squash, vfat
            if somebody is not None:
                raise OSError(f"here it could not be read again: {somebody}")
            self._put(_HEAD.pack(_MAGIC, _VERSION))
        except BaseException:
            self.discard()
            raise

    def add(self, item: Any) -> None:
        """Write one more record; writes nothing if the item raises `ResultPicklingError`."""
        header, buffers = pack(item)
        sizes = _SIZES.pack(len(header), len(buffers))
        if buffers:
            sizes += array("Q", [buffer.nbytes for buffer in buffers]).tobytes()
        pieces: list[Any] = [sizes, header]
        place = self._position + _DIGEST + len(sizes) + len(header)
        for buffer in buffers:
            gap = -place % _ALIGNED
            pieces += bytes(gap), buffer
            place += gap + buffer.nbytes
        self._starts.append(self._position)
        self._put(_digest(*pieces), *pieces)

    def commit(self) -> None:
        """Give the whole file its name."""
        description = self._fingerprint.encode()
        numbers = struct.pack("=QQ", self._position, len(description))
        digest = _digest(description, self._starts, numbers)
        self._put(description, self._starts.tobytes(), numbers, digest, _END)
        self._finalizer.detach()
        try:
            os.close(self._fd)
            os.replace(self._temporary, self._path)
        except BaseException:
            os.unlink(self._temporary)
            raise

    def discard(self) -> None:
        """Remove the file. Idempotent."""
        self._finalizer()

    def _put(self, *pieces: Any) -> None:
        size = sum(map(len, pieces))
        self._position += size
        for piece in pieces if size >= _BLOCK else (b"".join(pieces),):
            _write(self._fd, piece)


def _write(fd: int, piece: Any) -> None:
    with memoryview(piece) as view:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done:])


def _remove(fd: int, path: str, owner: int) -> None:
    if os.getpid() != owner:  # in a fork of the owner the file is somebody else's
        return
    try:
        os.close(fd)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


class Reader(Iterator[Any]):
    """A whole file, record by record. A damaged record raises; the one after it comes next.

    It is mapped copy-on-write: arrays lie over the mapping, can be written to, and keep it for as long
    as they live; changes of them never reach the file. `CacheError` is raised if it is damaged, was
    written by another pipeline, or may have been by somebody else.
    """

    def __init__(self, path: str, fingerprint: str) -> None:
        self.path = path
        self.next = 0  # number of the next record
        with open(path, "rb", opener=lambda name, _: os.open(name, _HOW)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise CacheError(f"{path!r} is no file; give another path")
            somebody = _who_else(found)
            if somebody is not None:
                raise CacheError(
                    f"the cache file {path!r} is not read, because {somebody}, and reading a cache runs "
                    "code from it; delete it to have it written again, or, if you trust it, make it "
                    "yours alone (chown, chmod 600)"
                )
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CacheError(
                    f"{path!r} is not a cache file; pass another path, or delete it if it is not needed"
                )
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._view = memoryview(self._map)
        try:
            self._starts = self._read_index(fingerprint)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __next__(self) -> Any:
        number = self.next
        if number >= len(self):
            self.close()
            raise StopIteration
        self.next = number + 1
        start, end = self._starts[number], self._starts[number + 1]
        view, place = self._view, start + _DIGEST
        if _digest(view[place:end]) != self._map[start:place]:
            raise self._damaged(f"record {number} of {len(self)} is not as it was written")
        header, count = _SIZES.unpack_from(view, place)
        place += _SIZES.size
        sizes = struct.unpack_from(f"={count}Q", view, place) if count else ()
        place += 8 * count
        pickled, buffers = view[place : place + header], []
        place += header
        for size in sizes:
            place += -place % _ALIGNED
            buffers.append(view[place : place + size])
            place += size
        try:
            return unpack(pickled, buffers)
        except Exception as error:
            add_note(error, f"while record {number} of the cache file {self.path!r} was loaded")
            raise

    def close(self) -> None:
        """Let go of the file; arrays that are still in use keep the mapping. Idempotent."""
        self.next = sys.maxsize
        self._view = memoryview(b"")
        try:
            self._map.close()
        except BufferError:
            pass

    def _read_index(self, fingerprint: str) -> array[int]:
        """Return the beginnings of the records, and the end of the last one."""
        view, size = self._view, len(self._view)
        if size < _HEAD.size + _TAIL.size:
            raise self._damaged(f"it is cut off, at {size} bytes")
        _, version = _HEAD.unpack_from(view)
        if version != _VERSION:
            raise CacheError(
                f"the cache file {self.path!r} is of format {version}, and this release reads format "
                f"{_VERSION}; delete it to have it written again"
            )
        place, length, digest, magic = _TAIL.unpack_from(view, size - _TAIL.size)
        if magic != _END:
            raise self._damaged(f"it is cut off, at {size} bytes, or its end was changed")
        if _digest(view[place : size - _DIGEST - len(_END)]) != digest:
            raise self._damaged("its index is not as it was written")
        before = bytes(view[place : place + length]).decode()
        if before != fingerprint:
            alike = _DIGESTS.sub("", before) == _DIGESTS.sub("", fingerprint)
            why = "Digests after # stand for the reprs of arguments and data. " * alike
            raise CacheError(
                f"the cache file {self.path!r} was written by another pipeline, {before!r}, and this "
                f"one is {fingerprint!r}. {why}Delete it, or give another path"
            )
        starts = array("Q", bytes(view[place + length : size - _TAIL.size]))
        starts.append(place)
        return starts

    def _damaged(self, what: str) -> CacheError:
        return CacheError(
            f"the cache file {self.path!r} is damaged: {what}; delete it to have it written again"
        )
