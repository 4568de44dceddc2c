"""`SharedList`: a list of millions of elements, once for all worker processes.

A Python list of a million paths is copied by every worker: after a fork because counting references
writes to its pages, in a fresh process because it is pickled. A `SharedList` keeps its elements as
bytes in a buffer that all processes map, and makes the object of an element when it is read. It can't
be changed, and its pickle is a reference to the buffer. Neither torch nor numpy is imported here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, SupportsIndex, TypeVar, overload

from hybridloader._support.text import cell
from hybridloader.records.shared_buffer import (
    DECODERS,
    Column,
    ColumnLayout,
    SharedBuffer,
    bounds,
    elements,
)

T = TypeVar("T")

SHOWN = 3  # elements in a repr


class ReadOnly(AttributeError, TypeError):
    """A method of list or dict that would change the container was used; `hasattr` returns False."""


_CHANGES = ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse",
            "setdefault", "sort", "update")  # fmt: skip


class Unchanging:
    """Base of containers that can't be changed. A copy is the container itself."""

    __slots__ = ()

    _plain: ClassVar[type]  # the Python type that it replaces

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

    def _refusal(self) -> str:
        plain = self._plain.__name__
        return (
            f"a {type(self).__name__} can't be changed: it is memory that all processes share. "
            f"{plain}(shared) makes a {plain} that can, in this process"
        )

    def __setitem__(self, *_: Any) -> NoReturn:
        raise TypeError(self._refusal())

    __delitem__ = __setitem__

    if not TYPE_CHECKING:  # a type checker finds no methods that change it

        def __getattr__(self, name: str) -> Any:
            if name in _CHANGES and hasattr(self._plain, name):
                raise ReadOnly(self._refusal())
            raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")


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
    _plain = list

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
