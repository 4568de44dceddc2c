"""Many Python objects as bytes that lie one after another, and each of them back.

A column holds elements of one kind: ints, floats, texts, bytes, or, where they are of several or of
any other, a pickle each. The kind is found while the elements pass by, a few at a time. Type and
value of an element come back exactly. Knows nothing of processes, and never changes an element that
was written.
"""

from __future__ import annotations

import mmap
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from hybridloader.records.shared_buffer import Stage

Data = bytes | mmap.mmap

_KINDS = {int: "int", float: "float", str: "str", bytes: "bytes"}
"""By exact type: a bool or a user's kind of str must not come back as an int or a str."""

_CODES = {"int": "q", "float": "d"}
"""Kinds whose elements take eight bytes each and need no offsets; as `array` calls them."""

_PIECE = 1 << 20
"""Bytes that are encoded or decoded at a time, about: more than caches hold makes nothing faster."""

_MOST = 8192
"""Elements that are encoded at a time, at most."""

_READ = 256
"""Elements that an iterator makes at a time. In a forked child each new object may lie in a hole of a
page that it had shared until then: 8192 at a time made 4 MB private, 256 make 0.6 MB as fast."""


class Layout(NamedTuple):
    """Where a column lies in its buffer."""

    kind: str
    length: int
    at: int  # byte where its elements, or else the length + 1 offsets of them, begin


class Column:
    """A column that is being written to a stage of its own."""

    def __init__(self, stage: Callable[[], Stage]) -> None:
        self._new_stage = stage
        # All the mutable state:
        self.stage = stage()
        self.kind: str | None = None
        self.count = 0
        self._first = self.stage.size
        self._offsets = array("q", [self._first])

    def extend(self, elements: Iterable[Any]) -> None:
        """Append `elements`, however many they are and wherever they come from."""
        iterator = iter(elements)
        most = 1  # they may be large
        while chunk := list(islice(iterator, most)):
            before = self.stage.size
            self.add(chunk)
            most = next_size(len(chunk), self.stage.size - before)

    def add(self, chunk: list[Any]) -> None:
        """Append the elements of `chunk`, which is not empty."""
        types = set(map(type, chunk))
        kind = _KINDS.get(types.pop(), "pickle") if len(types) == 1 else "pickle"
        if self.kind is None:
            self.kind = kind
        elif kind != self.kind and self.kind != "pickle":
            self._start_over()
        try:
            data, lengths = _encode(self.kind, chunk)
        except OverflowError:  # an int beyond 64 bits
            self._start_over()
            data, lengths = _encode("pickle", chunk)
        self.stage.write(data)
        self.count += len(chunk)
        if lengths is not None:
            offsets = self._offsets
            offsets.extend(islice(accumulate(lengths, initial=offsets[-1]), 1, None))

    def _start_over(self) -> None:
        """What had been of one kind is to be pickled."""
        old, written = self.stage, self.elements()
        self.stage, self.kind, self.count = self._new_stage(), "pickle", 0
        self._offsets = array("q", [self._first])
        self.extend(written)
        old.close()

    def elements(self) -> Iterator[Any]:
        """What was written so far."""
        return elements(self.kind or "pickle", *self._opened())

    def getter(self) -> Callable[[int], Any]:
        """For what was written so far: gives the element at a place."""
        data, starts, ends = self._opened()
        decode = decoder(self.kind or "pickle")
        if decode is None:
            return starts.__getitem__
        return lambda place: decode(data[starts[place] : ends[place]])

    def _opened(self) -> tuple[Data, memoryview, memoryview]:
        data = self.stage.read()
        if self.kind in _CODES:
            return data, *opened(Layout(self.kind, self.count, self._first), data)
        offsets = memoryview(self._offsets[:])  # a copy: an array that is looked at can't grow
        return data, offsets[:-1], offsets[1:]

    def seal(self, stage: Stage) -> Layout:
        """Make it complete on its own stage, or move it to another one."""
        base = self._first
        if stage is not self.stage:
            base = stage.align()
            stage.write(self.stage.read()[self._first :])
            self.stage.close()
        kind = self.kind or "pickle"
        if kind in _CODES:
            return Layout(kind, self.count, base)
        offsets, shift = self._offsets, base - self._first
        at = stage.align()
        stage.write(array("q", map(shift.__add__, offsets)) if shift else offsets)
        return Layout(kind, self.count, at)


def next_size(count: int, size: int) -> int:
    """How many elements to take next, after `count` of them took `size` bytes."""
    return max(1, min(_MOST, 4 * count, _PIECE * count // max(size, 1)))


def opened(layout: Layout, data: Data) -> tuple[memoryview, memoryview]:
    """Where each element begins and where it ends; of a kind of eight bytes twice the elements."""
    view = memoryview(data)
    if layout.kind in _CODES:
        whole = view[layout.at : layout.at + 8 * layout.length]
        values: Any = whole.cast("q") if layout.kind == "int" else whole.cast("d")
        return values, values
    offsets = view[layout.at : layout.at + 8 * (layout.length + 1)].cast("q")
    return offsets[:-1], offsets[1:]


def decoder(kind: str) -> Callable[[bytes], Any] | None:
    """From the bytes of an element to the element; None when they are eight and need none."""
    return _DECODERS[kind]


def elements(kind: str, data: Data, starts: memoryview, ends: memoryview) -> Iterator[Any]:
    """The elements at `starts`, which may be any slice of a column's."""
    return chain.from_iterable(_pieces(kind, data, starts, ends))


def _pieces(kind: str, data: Data, starts: memoryview, ends: memoryview) -> Iterator[Iterable[Any]]:
    decode = _DECODERS[kind]
    for i in range(0, len(starts), _READ):
        begins = starts[i : i + _READ].tolist()
        if decode is None:
            yield begins
            continue
        stops = ends[i : i + _READ].tolist()
        first, last = begins[0], stops[-1]
        if kind == "str" and 0 <= last - first <= _PIECE and begins[1:] == stops[:-1]:
            raw = data[first:last]
            if raw.isascii():  # decoded together: a third of the time
                text = raw.decode("ascii")
                yield [text[b - first : e - first] for b, e in zip(begins, stops, strict=True)]
                continue
        yield map(decode, map(data.__getitem__, map(slice, begins, stops)))


def as_text(raw: bytes) -> str:
    """The str of which `raw` is the UTF-8 form."""
    try:
        return raw.decode()  # 40 ns less than with arguments
    except UnicodeDecodeError:  # lone surrogates, as in the names of files that are not UTF-8
        return raw.decode("utf-8", "surrogatepass")


_DECODERS: dict[str, Callable[[bytes], Any] | None] = {
    "int": None,
    "float": None,
    "str": as_text,
    "bytes": bytes,
    "pickle": pickle.loads,
}


def _encode(kind: str, chunk: list[Any]) -> tuple[Any, Iterable[int] | None]:
    """The bytes of all, and how long each is."""
    if kind in _CODES:
        return array(_CODES[kind], chunk), None
    if kind == "str":
        together = "".join(chunk)
        if together.isascii():
            return together.encode("ascii"), map(len, chunk)
        parts = [text.encode("utf-8", "surrogatepass") for text in chunk]
    elif kind == "bytes":
        parts = chunk
    else:
        parts = [_dumps(element) for element in chunk]
    return b"".join(parts), map(len, parts)


def _dumps(element: Any) -> bytes:
    try:
        return pickle.dumps(element, 5)
    except Exception:  # pickle's own errors are of many types
        import cloudpickle

        return cloudpickle.dumps(element, 5)  # type: ignore[no-any-return]
