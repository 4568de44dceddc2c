"""Columns: many Python objects as consecutive bytes, of which each can be read back.

A column holds elements of one kind: ints, floats, texts or bytes. Elements of mixed or other types are
a pickle each. The kind is found while the elements are written, a few at a time. Type and value of an
element are kept exactly. Nothing here knows of processes.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from hybridloader.records.shared_buffer import TOKEN, Data, SharedBuffer, Staging

_KINDS = {int: "int", float: "float", str: "str", bytes: "bytes"}
"""Kinds by exact type: a bool or a subclass of str must not be read back as an int or a str."""

_CODES = {"int": "q", "float": "d"}
"""Type codes of `array`, for the kinds whose elements take eight bytes each and need no offsets."""

_PIECE = 1 << 20
"""Bytes that are encoded or decoded at a time, about: more than a cache holds is no faster."""

_MOST = 8192  # the most elements that are encoded at a time

_READ = 256
"""Elements that an iterator makes at a time. In a forked child a new object may fill a hole in a page
that was shared: 8192 at a time made 4 MB private, 256 make 0.6 MB and are as fast."""


class ColumnLayout(NamedTuple):
    """Layout of a buffer: the elements, then, unless they take eight bytes each, their offsets."""

    kind: str
    length: int


class Column:
    """A column that is being written to its own buffer, for a container of the class `what`."""

    def __init__(self, what: str) -> None:
        # All the mutable state:
        self._stage = Staging(what)
        self._layout = ColumnLayout("", 0)
        self._offsets = array("q", [TOKEN])

    @property
    def size(self) -> int:
        return self._stage.size

    def extend(self, elements: Iterable[Any]) -> None:
        for chunk in chunks(elements, lambda: self.size):
            self.add(chunk)

    def add(self, chunk: Sequence[Any]) -> None:
        """Append the elements of `chunk`, which is not empty."""
        types = set(map(type, chunk))
        found = _KINDS.get(types.pop(), "pickle") if len(types) == 1 else "pickle"
        if found != self._layout.kind != "pickle":
            self._begin_as(found if not self._layout.kind else "pickle")
        try:
            data, lengths = _encode(self._layout.kind, chunk)
        except OverflowError:  # an int beyond 64 bits
            self._begin_as("pickle")
            data, lengths = _encode("pickle", chunk)
        self._stage.write(data)
        kind, length = self._layout
        self._layout = ColumnLayout(kind, length + len(chunk))
        if lengths is not None:
            self._offsets.extend(islice(accumulate(lengths, initial=self._offsets[-1]), 1, None))

    def _begin_as(self, kind: str) -> None:
        """Continue with elements of `kind`, and convert those that were written."""
        layout, stage, offsets = self._layout, self._stage, self._offsets
        self._layout = ColumnLayout(kind, 0)
        if layout.length:
            self._stage, self._offsets = Staging(stage.what), array("q", [TOKEN])
            data = stage.read()
            self.extend(elements(layout.kind, data, *bounds(layout, data, memoryview(offsets))))
            stage.close()

    def share(self) -> tuple[SharedBuffer, ColumnLayout]:
        kind, length = self._layout
        if kind not in _CODES:
            self._stage.write(bytes(-self.size % 8))
            self._stage.write(self._offsets)
        return self._stage.share(), ColumnLayout(kind or "pickle", length)

    def close(self) -> None:
        """Discard the elements unless they were shared. Idempotent."""
        self._stage.close()


def chunks(elements: Iterable[Any], written: Callable[[], int]) -> Iterator[list[Any]]:
    """The elements in lists of about `_PIECE` bytes; `written` returns the bytes written so far."""
    iterator, most = iter(elements), 1  # they may be large
    before = written()
    while chunk := list(islice(iterator, most)):
        yield chunk
        size, before = written() - before, written()
        most = max(1, min(_MOST, 4 * len(chunk), _PIECE * len(chunk) // max(size, 1)))


def bounds(
    layout: ColumnLayout, data: Data, offsets: memoryview | None = None
) -> tuple[memoryview, memoryview]:
    """Start and end of each element; for kinds of eight bytes, twice the elements themselves."""
    view = memoryview(data)
    code = _CODES.get(layout.kind)
    if code is not None:
        values: Any = view[TOKEN : TOKEN + 8 * layout.length].cast(code)  # type: ignore[call-overload]
        return values, values
    if offsets is None:
        offsets = view[len(view) - 8 * (layout.length + 1) :].cast("q")
    return offsets[:-1], offsets[1:]


def elements(kind: str, data: Data, starts: memoryview, ends: memoryview) -> Iterator[Any]:
    """The elements from `starts` to `ends`, which are the same slice of a column's bounds."""
    return chain.from_iterable(_pieces(kind, data, starts, ends))


def _pieces(kind: str, data: Data, starts: memoryview, ends: memoryview) -> Iterator[Iterable[Any]]:
    decode = DECODERS[kind]
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
    try:
        return raw.decode()  # 40 ns less than with arguments
    except UnicodeDecodeError:  # lone surrogates, as in the names of files that are not UTF-8
        return raw.decode("utf-8", "surrogatepass")


DECODERS: dict[str, Callable[[bytes], Any] | None] = {
    "int": None,
    "float": None,
    "str": as_text,
    "bytes": bytes,
    "pickle": pickle.loads,
}
"""Functions from the bytes of an element to the element; None for kinds of eight bytes."""


def _encode(kind: str, chunk: Sequence[Any]) -> tuple[Any, Iterable[int] | None]:
    if kind in _CODES:
        return array(_CODES[kind], chunk), None
    if kind == "str":
        together = "".join(chunk)
        if together.isascii():
            return together.encode("ascii"), map(len, chunk)
        parts = [text.encode("utf-8", "surrogatepass") for text in chunk]
    elif kind == "bytes":
        parts = list(chunk)
    else:
        parts = [_dumps(element) for element in chunk]
    return b"".join(parts), map(len, parts)


def _dumps(element: Any) -> bytes:
    try:
        return pickle.dumps(element, 5)
    except Exception:  # pickle's own errors are of many types
        import cloudpickle

        return cloudpickle.dumps(element, 5)  # type: ignore[no-any-return]
