"""`SharedList` and `SharedDict`: millions of elements or keys, once for all worker processes.

A Python list of a million paths is copied by every worker: after a fork because counting references
writes to its pages, in a fresh process because it is pickled. A `SharedList` keeps its elements as
bytes in a buffer that all processes map, and makes the object of an element when it is read. It can't
be changed, and its pickle is a reference to the buffer. Neither torch nor numpy is imported here.

A `SharedDict` consists of three of them: the keys, the values, and a hash table that finds a key. So no
process builds a dict. The table has open addressing with linear probing. A word is 0 for no entry;
otherwise its upper bits are the hash of a key, and its lower bits the number of the entry plus one. The
table is filled once; nothing is removed or rehashed.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, SupportsIndex, TypeVar, overload
from zlib import crc32

from hybridloader._support.text import cell
from hybridloader._support.user_objects import has
from hybridloader.records.shared_buffer import (
    DECODERS,
    Column,
    ColumnLayout,
    SharedBuffer,
    bounds,
    chunks,
    elements,
)

T = TypeVar("T")

SHOWN = 3  # elements in a repr


class Unchanging:
    """Base of containers that can't be changed. A copy is the container itself."""

    __slots__ = ()

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def _over(cls, *parts: Any) -> Any:
        """A container of parts that exist."""
        self = cls.__new__(cls)
        self._attach(*parts)
        return self

    def _attach(self, *parts: Any) -> None:
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # an element is a new object at every access anyway


class SharedList(Unchanging, Sequence[T]):
    """A read-only list whose elements are in shared memory once, for any number of processes.

    It is made once, in the process that has the data; workers of every kind get a reference. If all
    elements are int (of 64 bits), float, str or bytes, they are kept as such, otherwise as a pickle
    each. Each access makes a new object of the same type and value. Classes and functions that pickle
    finds by name must be importable in the workers; others are sent by cloudpickle.

    Parameters
    ----------
    iterable
        Taken a few elements at a time, so a generator never becomes a Python list.

    Raises
    ------
    MemoryError
        There is not enough shared memory.

    Notes
    -----
    A slice is a `SharedList` over the same memory, which each process unmaps with its last container
    over it. A pickle can be read on this machine only, while a process that made or pickled the list
    keeps it; to save a list to disk, save ``list(shared)``. A `SharedList` equals lists, tuples and
    others with equal elements; like a list, it has no hash. Any thread may read it.

    Examples
    --------
    >>> paths = SharedList(f"/data/{i}.jpg" for i in range(1000))
    >>> paths[-1], len(paths)
    ('/data/999.jpg', 1000)
    >>> paths[::500]
    SharedList(['/data/0.jpg', '/data/500.jpg'])
    >>> paths
    SharedList(['/data/0.jpg', '/data/1.jpg', '/data/2.jpg', ... 1,000 in all])
    """

    __slots__ = ("__weakref__", "_buffer", "_data", "_decode", "_ends", "_layout",
                 "_span", "_starts")  # fmt: skip

    def __init__(self, iterable: Iterable[T] = ()) -> None:
        with closing(Column("SharedList")) as column:
            column.extend(iterable)
            self._attach(*column.share())

    def _attach(
        self, buffer: SharedBuffer, layout: ColumnLayout, span: range | None = None
    ) -> None:
        span = range(layout.length) if span is None else span
        stop = span.stop if span.stop >= 0 else None  # below 0: down to the first
        where = slice(span.start, stop, span.step) if span else slice(0)
        starts, ends = bounds(layout, buffer.data)
        self._buffer, self._layout, self._span = buffer, layout, span
        self._data, self._decode = buffer.data, DECODERS[layout.kind]
        self._starts, self._ends = starts[where], ends[where]

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> SharedList[T]: ...

    def __getitem__(self, index: Any) -> Any:
        if index.__class__ is not int:
            if isinstance(index, slice):
                return self._over(self._buffer, self._layout, self._span[index])
            try:
                index = operator.index(index)
            except TypeError:
                raise TypeError(
                    f"SharedList indices are integers or slices, not {type(index).__name__}"
                ) from None
        try:
            start = self._starts[index]
            decode = self._decode
            if decode is None:
                return start  # the element itself
            raw = self._data[start : self._ends[index]]
        except IndexError:
            raise IndexError(
                f"index {index} is out of range: the SharedList has {len(self):,} elements"
            ) from None
        return decode(raw)

    def __iter__(self) -> Iterator[T]:
        return elements(self._layout.kind, self._data, self._starts, self._ends)

    def __reversed__(self) -> Iterator[T]:
        return iter(self[::-1])

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The index of the first element that equals `value`. Raises `ValueError` if there is none."""
        first = range(len(self))[start:stop].start
        try:
            return first + operator.indexOf(iter(self[start:stop]), value)
        except ValueError:
            raise ValueError(f"{value!r} is not in the SharedList") from None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SharedList):
            if self.__reduce__() == other.__reduce__():  # the same elements of the same buffer
                return True
        elif not isinstance(other, (list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        shown = ", ".join(map(cell, self[:SHOWN]))
        more = f", ... {len(self):,} in all" if len(self) > SHOWN else ""
        return f"SharedList([{shown}{more}])"

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory of all elements; for a slice, those of the whole list."""
        return len(self._data)

    def __reduce__(self) -> Any:
        return SharedList._over, (self._buffer, self._layout, self._span)


K = TypeVar("K")
V = TypeVar("V")

_PLAIN = frozenset([str, bytes, int, float, bool, type(None)])

_LOW, _WORD = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: products of neighbors with it are far apart (Knuth, The Art of
Computer Programming 3, 6.4). A CRC is linear: the names of numbered files would form clusters."""


class SharedDict(Unchanging, Mapping[K, V]):
    """A read-only dict with one copy of its keys and values, in shared memory.

    It iterates in the order of insertion. `SharedList` documents the types of values, and how long a
    pickle can be read.

    Parameters
    ----------
    mapping_or_pairs
        A mapping, or an iterable of pairs, which is read a few at a time. If a key comes twice, the
        later value counts, as in a dict. Keys are str, bytes, int, float, bool, None and tuples of
        these. Keys compare as in Python: ``shared[1]``, ``shared[1.0]``, ``shared[True]`` and
        ``shared[numpy.int64(1)]`` are the same.

    Raises
    ------
    TypeError
        A key has another type, which may be a subclass of str or int.
    MemoryError
        There is not enough shared memory.

    Notes
    -----
    A key that is or contains a NaN is never found, since it is not equal to itself. (A dict finds the
    identical object, but here each access makes a new one.)

    Examples
    --------
    >>> labels = SharedDict({"cat": 3, "dog": 5})
    >>> labels["dog"], labels.get("cow"), "cat" in labels
    (5, None, True)
    >>> labels
    SharedDict({'cat': 3, 'dog': 5})
    """

    __slots__ = ("__weakref__", "_keys", "_table", "_values")

    def __init__(self, mapping_or_pairs: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        keys, values, hashes = _write(_pairs_of(mapping_or_pairs))
        table, again = _fill(hashes, keys)
        if not again:
            with closing(Column("SharedDict")) as column:
                column.add(table)
                self._attach(keys, values, SharedList._over(*column.share()))
            return
        # Repeated keys are rare, so this may take twice the time: first position, last value.
        last = {first: entry for entry, first in again.items()}
        entries = (entry for entry in range(len(keys)) if entry not in again)
        SharedDict.__init__(self, ((keys[n], values[last.get(n, n)]) for n in entries))

    def _attach(self, keys: SharedList[K], values: SharedList[V], table: SharedList[int]) -> None:
        self._keys, self._values, self._table = keys, values, table

    def _find(self, key: Any) -> int:
        """The number of the entry; -1 if there is none."""
        value, keys, table = stable_hash(key), self._keys, self._table._starts
        slot = value & (mask := len(table) - 1)
        while word := table[slot]:
            if word >> 32 == value and keys[(word & _LOW) - 1] == key:
                return (word & _LOW) - 1
            slot = (slot + 1) & mask
        return -1

    def __contains__(self, key: object) -> bool:
        return self._find(key) >= 0

    def __getitem__(self, key: Any) -> V:
        entry = self._find(key)
        if entry < 0:
            raise KeyError(key)
        return self._values[entry]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._keys)

    def values(self) -> SharedList[V]:  # type: ignore[override]
        """The values, in order."""
        return self._values

    def items(self) -> ItemsView[K, V]:
        """A view of the pairs, in order."""
        return _Items(self)

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{cell(key)}: {cell(value)}" for key, value in islice(self.items(), SHOWN)
        )
        more = f", ... {len(self):,} in all" if len(self) > SHOWN else ""
        return f"SharedDict({{{shown}{more}}})"

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory of keys, values and table together."""
        return self._keys.nbytes + self._values.nbytes + self._table.nbytes

    def __reduce__(self) -> Any:
        return SharedDict._over, (self._keys, self._values, self._table)


class _Items(ItemsView[K, V]):
    _mapping: SharedDict[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return zip(self._mapping._keys, self._mapping._values, strict=True)

    def __reversed__(self) -> Iterator[tuple[K, V]]:
        both = reversed(self._mapping._keys), reversed(self._mapping._values)
        return zip(*both, strict=True)


def stable_hash(key: Any) -> int:
    """Hash of 31 bits that is the same in every process, and the same for equal keys.

    Python randomises its hashes of texts and bytes. Its hashes of numbers, numpy's included, and of
    tuples of numbers are the same everywhere. CRC-32 takes 0.1 microseconds for a path of 60 bytes,
    blake2b 0.5. Keys with the same hash are distinguished by comparing them. Raises `TypeError` if the
    key can't be hashed.
    """
    if isinstance(key, (str, bytes)):
        value = crc32(str.encode(key, "utf-8", "surrogatepass") if isinstance(key, str) else key)
    elif isinstance(key, tuple):
        value = hash(tuple(map(stable_hash, key)))
    else:
        value = 0 if key is None else hash(key)  # None's is its address, before Python 3.12
    return ((value ^ value >> 32) * _GOLDEN & _WORD) >> 33


def _fill(hashes: array[int], keys: SharedList[Any]) -> tuple[array[int], dict[int, int]]:
    """Return the table, and for each entry with a repeated key the first entry with that key."""
    mask = (1 << max(3, (len(hashes) * 3 // 2).bit_length())) - 1  # two thirds fill it
    table = array("q", bytes(8 * (mask + 1)))
    again: dict[int, int] = {}
    for entry, value in enumerate(hashes):
        slot = value & mask
        while word := table[slot]:
            if word >> 32 == value and keys[(word & _LOW) - 1] == keys[entry]:
                again[entry] = (word & _LOW) - 1
                break
            slot = (slot + 1) & mask
        else:
            table[slot] = value << 32 | (entry + 1)
    return table, again


def _pairs_of(source: Any) -> Iterator[Any]:
    if isinstance(source, Mapping):
        return iter(source.items())
    if has(source, "keys"):  # what dict() takes for a mapping
        return ((key, source[key]) for key in source.keys())  # noqa: SIM118
    return iter(source)


def _write(pairs: Iterator[Any]) -> tuple[SharedList[Any], SharedList[Any], array[int]]:
    """Write all keys and all values. Return both, and the hash of each key."""
    hashes = array("I")
    with closing(Column("SharedDict")) as keys, closing(Column("SharedDict")) as values:
        for chunk in chunks(pairs, lambda: keys.size + values.size):
            some, others = zip(*map(_pair, chunk), strict=True)
            keys.add(some)
            values.add(others)
            hashes.extend(map(stable_hash, some))
        return SharedList._over(*keys.share()), SharedList._over(*values.share()), hashes


def _pair(pair: Any) -> tuple[Any, Any]:
    """Return `pair` as a key and a value. Raises `TypeError` if it is no pair or its key is invalid."""
    try:
        key, value = pair
    except (TypeError, ValueError):
        raise TypeError(f"{pair!r} is not a pair of a key and a value") from None
    if type(key) not in _PLAIN and not _is_plain(key):
        raise TypeError(
            f"the key {key!r} is a {type(key).__qualname__}, and keys of a SharedDict are str, bytes, "
            "int, float, bool, None and tuples of these"
        )
    return key, value


def _is_plain(key: Any) -> bool:
    return type(key) in _PLAIN or (type(key) is tuple and all(map(_is_plain, key)))
