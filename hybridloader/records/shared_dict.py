"""`SharedDict`: a mapping of millions of keys, once for all worker processes.

Keys and values are two columns in one buffer that all processes map, and the hash table that finds a
key lies there too: no process builds a dict of its own. It is read-only, and a pickle of it is a
reference to its buffer, never its contents. Neither torch nor numpy is imported here.
"""

from __future__ import annotations

from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from hybridloader.foreign import has
from hybridloader.records.columns import Column, Layout, next_size
from hybridloader.records.key_table import (
    KEYS,
    LOW,
    PLAIN,
    SPREAD,
    as_plain,
    fill,
    hash_text,
    is_plain,
    stable_hash,
    table_bits,
)
from hybridloader.records.shared_buffer import SharedBuffer, Stage, Ticket, open_ticket
from hybridloader.records.shared_list import (
    SHOWN,
    ReadOnly,
    SharedList,
    read_only,
    share,
    short,
    staged,
)

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class SharedDict(Mapping[K, V]):
    """A read-only dict whose keys and values lie once in shared memory.

    Looked up in a hash table that lies there too, so no process builds a dict of its own. Iterates
    in the order of insertion. See `SharedList` for what becomes of values, and for how long a pickle
    is good.

    Parameters
    ----------
    mapping_or_pairs
        A mapping, or an iterable of pairs (taken a few at a time). A key that comes again takes the
        later value, as in a dict. Keys are str, bytes, int, float, bool, None and tuples of these,
        and are equal when Python says so: ``shared[1]``, ``shared[1.0]``, ``shared[True]`` and
        ``shared[numpy.int64(1)]`` are the same.

    Raises
    ------
    TypeError
        A key of another type, a kind of str or int of its own among them.
    MemoryError
        There is no shared memory for so many bytes.

    Notes
    -----
    A key that is, or holds, a NaN is never found, since it is not equal to itself. (A dict finds it
    with the very same object, and here there is none.)

    Examples
    --------
    >>> labels = SharedDict({"cat": 3, "dog": 5})
    >>> labels["dog"], labels.get("cow"), "cat" in labels
    (5, None, True)
    >>> labels
    SharedDict({'cat': 3, 'dog': 5})
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_keys",
        "_mask",
        "_shift",
        "_table",
        "_texts",
        "_values",
    )

    def __init__(self, mapping_or_pairs: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        self._attach(*_write(_pairs_of(mapping_or_pairs)))

    def _attach(self, buffer: SharedBuffer, keys: Layout, values: Layout, at: int) -> None:
        self._buffer = buffer
        self._keys: SharedList[K] = SharedList._over(buffer, keys)
        self._values: SharedList[V] = SharedList._over(buffer, values)
        bits = table_bits(keys.length)
        self._shift, self._mask = 32 - bits, (1 << bits) - 1
        self._table = memoryview(buffer.data)[at : at + (8 << bits)].cast("Q")
        self._texts = keys.kind == "str"

    def _find(self, key: Any) -> int:
        """The number of the entry; -1 if there is none."""
        raw = None
        kind = key.__class__
        if kind is str:
            raw = key.encode("utf-8", "surrogatepass")
            value = hash_text(raw)
        else:
            if kind is not int:
                try:
                    key = as_plain(key)
                except LookupError:
                    return -1
            value = stable_hash(key)
        table, keys = self._table, self._keys
        slot = (value * SPREAD & LOW) >> self._shift
        while word := table[slot]:
            if word >> 32 == value:
                entry = (word & LOW) - 1
                if raw is not None and self._texts:
                    if keys._data[keys._starts[entry] : keys._ends[entry]] == raw:
                        return entry
                elif keys[entry] == key:
                    return entry
            slot = (slot + 1) & self._mask
        return -1

    def __getitem__(self, key: Any) -> V:
        entry = self._find(key)
        if entry < 0:
            raise KeyError(key)
        return self._values[entry]

    @overload
    def get(self, key: Any, /) -> V | None: ...

    @overload
    def get(self, key: Any, /, default: T) -> V | T: ...

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        entry = self._find(key)
        return default if entry < 0 else self._values[entry]

    def __contains__(self, key: object) -> bool:
        return self._find(key) >= 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._keys)

    def values(self) -> ValuesView[V]:
        """A view of the values, in order."""
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        """A view of the pairs, in order."""
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        if len(self) != len(other):
            return False
        missing = object()
        return all(other.get(key, missing) == value for key, value in self.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{short.repr(key)}: {short.repr(value)}" for key, value in islice(self.items(), SHOWN)
        )
        more = f", ... {len(self):,} in all" if len(self) > SHOWN else ""
        return f"SharedDict({{{shown}{more}}})"

    @property
    def nbytes(self) -> int:
        """Bytes of the shared memory, all that keys, values and the table take."""
        return len(self._buffer.data)

    def __copy__(self) -> SharedDict[K, V]:
        return self

    def __deepcopy__(self, memo: Any) -> SharedDict[K, V]:
        return self  # a value is a new object at every access anyway

    def __reduce__(self) -> Any:
        layouts = tuple(self._keys._layout), tuple(self._values._layout)
        at = len(self._buffer.data) - self._table.nbytes
        return _open_dict, (tuple(self._buffer.ticket()), *layouts, at)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(read_only("SharedDict", "dict"))

    def __delitem__(self, key: Any) -> NoReturn:
        raise TypeError(read_only("SharedDict", "dict"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _CHANGE_A_DICT:
                raise ReadOnly(read_only("SharedDict", "dict"))
            raise AttributeError(f"a SharedDict has no attribute {name!r}")


_CHANGE_A_DICT = frozenset(["clear", "pop", "popitem", "setdefault", "update"])


class _Values(ValuesView[V]):
    _mapping: SharedDict[Any, V]

    def __iter__(self) -> Iterator[V]:
        return iter(self._mapping._values)

    def __contains__(self, value: object) -> bool:
        return value in self._mapping._values

    def __reversed__(self) -> Iterator[V]:
        return reversed(self._mapping._values)


class _Items(ItemsView[K, V]):
    _mapping: SharedDict[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return zip(self._mapping._keys, self._mapping._values, strict=True)

    def __reversed__(self) -> Iterator[tuple[K, V]]:
        both = reversed(self._mapping._keys), reversed(self._mapping._values)
        return zip(*both, strict=True)


def _write(pairs: Iterator[Any]) -> tuple[SharedBuffer, Layout, Layout, int]:
    """Bring `pairs` into a buffer: it, where keys and values lie in it, and where the table begins."""
    keys, values = Column(staged("SharedDict", Stage)), Column(staged("SharedDict"))
    try:
        hashes = _take(pairs, keys, values)
        key_at = keys.getter()
        table, again = fill(hashes, keys.count, lambda a, b: bool(key_at(a) == key_at(b)))
        if again:  # rare, so it may take twice the time
            return _write(_once_each(keys, values, again))
        stage = values.stage
        value_layout = values.seal(stage)
        key_layout = keys.seal(stage)
        at = stage.align()
        stage.write(table)
        return share(stage), key_layout, value_layout, at
    finally:
        values.stage.close()


def _pairs_of(source: Any) -> Iterator[Any]:
    if isinstance(source, Mapping):
        _check(source)
        return iter(source.items())
    if has(source, "keys"):  # what dict() takes for a mapping
        return ((key, source[key]) for key in source.keys())  # noqa: SIM118
    return iter(source)


def _check(keys: Iterable[Any]) -> set[type]:
    """The types of `keys`, if these may be keys."""
    kinds = set(map(type, keys))
    if not kinds <= PLAIN:
        for key in keys:
            if not is_plain(key):
                raise TypeError(
                    f"the key {key!r} is a {type(key).__qualname__}, and keys of a SharedDict are "
                    f"{KEYS}"
                )
    return kinds


def _take(pairs: Iterator[Any], keys: Column, values: Column) -> array[int]:
    """Write all pairs into the columns; the hash of each key."""
    hashes = array("I")
    most = 1
    while chunk := list(islice(pairs, most)):
        some, others = zip(*map(_pair, chunk), strict=True)
        kinds = _check(some)
        before = keys.stage.size + values.stage.size
        keys.add(list(some))
        values.add(list(others))
        if kinds == {str}:  # a quarter of the time
            hashes.extend(hash_text(key.encode("utf-8", "surrogatepass")) for key in some)
        else:
            hashes.extend(map(stable_hash, some))
        most = next_size(len(chunk), keys.stage.size + values.stage.size - before)
    return hashes


def _pair(pair: Any) -> tuple[Any, Any]:
    try:
        key, value = pair
    except (TypeError, ValueError):
        raise TypeError(f"{pair!r} is not a pair of a key and a value") from None
    return key, value


def _once_each(keys: Column, values: Column, again: dict[int, int]) -> Iterator[tuple[Any, Any]]:
    """Each key where it came first, with the value that came last."""
    last = {first: entry for entry, first in again.items()}
    value_at, key_at = values.getter(), keys.getter()
    return (
        (key_at(entry), value_at(last.get(entry, entry)))
        for entry in range(keys.count)
        if entry not in again
    )


def _open_dict(ticket: Any, keys: Any, values: Any, at: int) -> SharedDict[Any, Any]:
    found: SharedDict[Any, Any] = SharedDict.__new__(SharedDict)
    found._attach(open_ticket(Ticket(*ticket)), Layout(*keys), Layout(*values), at)
    return found
