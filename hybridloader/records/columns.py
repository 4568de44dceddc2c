"""Many Python objects as bytes that lie one after another, and each of them back.

A column holds elements of one kind: ints, floats, texts, bytes, or, where they are of several or of
any other, a pickle each. The kind is found while the elements pass by, a few at a time. Type and
value of an element come back exactly. Knows nothing of processes.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from hybridloader.records.shared_buffer import TOKEN, Data, SharedBuffer, Staging

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


class ColumnLayout(NamedTuple):
    """How a column lies in its buffer: its elements, then offsets where they are not of eight bytes."""

    kind: str
    length: int


class Column:
    """A column that is being written to a buffer of its own, for a `what`."""

    def __init__(self, what: str) -> None:
        # All the mutable state:
        self._stage = Staging(what)
        self._layout = ColumnLayout("", 0)
        self._offsets = array("q", [TOKEN])

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._stage.size

    def extend(self, elements: Iterable[Any]) -> None:
        """Append `elements`, however many they are and wherever they come from."""
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
        """Go on with elements of `kind`, into which those that were written are made."""
        layout, stage, offsets = self._layout, self._stage, self._offsets
        self._layout = ColumnLayout(kind, 0)
        if layout.length:
            self._stage, self._offsets = Staging(stage.what), array("q", [TOKEN])
            data = stage.read()
            self.extend(elements(layout.kind, data, *bounds(layout, data, memoryview(offsets))))
            stage.close()

    def share(self) -> tuple[SharedBuffer, ColumnLayout]:
        """Make the buffer."""
        kind, length = self._layout
        if kind not in _CODES:
            self._stage.write(bytes(-self.size % 8))
            self._stage.write(self._offsets)
        return self._stage.share(), ColumnLayout(kind or "pickle", length)

    def close(self) -> None:
        """Let go of what was not shared. Idempotent."""
        self._stage.close()


def chunks(elements: Iterable[Any], written: Callable[[], int]) -> Iterator[list[Any]]:
    """The elements, a few at a time; `written` tells how many bytes were written of them so far."""
    iterator, most = iter(elements), 1  # they may be large
    before = written()
    while chunk := list(islice(iterator, most)):
        yield chunk
        size, before = written() - before, written()
        most = max(1, min(_MOST, 4 * len(chunk), _PIECE * len(chunk) // max(size, 1)))


def bounds(
    layout: ColumnLayout, data: Data, offsets: memoryview | None = None
) -> tuple[memoryview, memoryview]:
    """Where each element begins and where it ends; of a kind of eight bytes twice the elements."""
    view = memoryview(data)
    code = _CODES.get(layout.kind)
    if code is not None:
        values: Any = view[TOKEN : TOKEN + 8 * layout.length].cast(code)  # type: ignore[call-overload]
        return values, values
    if offsets is None:
        offsets = view[len(view) - 8 * (layout.length + 1) :].cast("q")
    return offsets[:-1], offsets[1:]


def elements(kind: str, data: Data, starts: memoryview, ends: memoryview) -> Iterator[Any]:
    """The elements at `starts`, which may be any slice of a column's."""
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
    """The str of which `raw` is the UTF-8 form."""
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
"""From the bytes of an element to the element; None when they are eight and need none."""


def _encode(kind: str, chunk: Sequence[Any]) -> tuple[Any, Iterable[int] | None]:
    """The bytes of all, and how long each is."""
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
