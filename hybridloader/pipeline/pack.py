"""`Pack`: token sequences of different lengths into rows of one length.

Both methods note the same for a state: the document with which the open rows begin, the tokens or rows
from there on that were given, and the number of documents that came. Resuming reads the documents since
that one again, so no state holds tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridloader._support import text
from hybridloader._support.text import is_number, short
from hybridloader._support.user_objects import counts_as_item
from hybridloader.running.operator import (
    INFINITE,
    Context,
    Length,
    NotingIterator,
    Operator,
    check_flags,
    settle_whole,
)

TOKENS, SEGMENTS, POSITIONS = "tokens", "segment_ids", "positions"


@dataclass(frozen=True)
class Pack(Operator):
    """Token sequences, packed into rows of one length, with the boundaries of documents.

    A document is a sequence of numbers: an array or tensor of one dimension, or a list. Or it is a dict
    of such sequences of one length, such as tokens and the weights of their loss. Empty ones are left
    out.

    A row is a dict of arrays of the shape (row_length,): ``"tokens"``, or the fields of the documents,
    in their dtype; ``"segment_ids"`` (int32), the number of the document within the row, from 1, and 0
    for padding; ``"positions"`` (int32), the place of a token in its segment, from 0. A document that
    is split begins a new segment in the next row. `default_collate` makes batches of rows.

    Parameters
    ----------
    row_length
        Number of tokens of a row.
    method
        ``"split"`` concatenates documents and splits them where a row is full: only the last row has
        padding. ``"first_fit"`` keeps documents whole: each goes to the first of `rows` open rows that
        has room for it. If no row has room, all open rows are returned, in order.
    rows
        Number of open rows, with ``"first_fit"``. More of them have less padding. A document that is
        longer than a row is then a `ValueError` that names it: a `map` before can truncate such
        documents, and a `filter` leave them out.
    padding_value
        Value of the padding, in all fields.
    drop_last
        True drops the rows that are not full at the end: with ``"split"`` the last row, with
        ``"first_fit"`` those that are open.
    """

    row_length: int
    method: str = "split"
    rows: int = 64
    padding_value: float = 0
    drop_last: bool = False

    marks_inputs = counts_errors = True

    def __post_init__(self) -> None:
        settle_whole(self, "row_length", 1, "give the number of tokens of a row")
        text.one_of(f"{self.name}: method", self.method, ("split", "first_fit"))
        settle_whole(self, "rows", 1, "give the number of rows that are open at a time")
        if not is_number(self.padding_value):
            raise TypeError(
                f"{self.name}: padding_value must be a number, not {short(self.padding_value)}"
            )
        check_flags(self, "drop_last")
        if self.drop_last and self.method == "first_fit":
            raise ValueError(
                f"{self.name}: drop_last is for method='split'; with 'first_fit' nearly every row has "
                "padding, not only the last one"
            )

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        kind = SplitIterator if self.method == "split" else FirstFitIterator
        return kind(items, self, context)

    def length(self, upstream: Length) -> Length:
        return upstream if upstream in (0, INFINITE) else None


class _Document(NamedTuple):
    """Document, and its number among the items before."""

    number: int
    fields: tuple[npt.NDArray[Any], ...]
    size: int  # tokens


_Piece = tuple[_Document, int, int]
"""Document, and which of its tokens: the first one, and the one after the last."""


class _PackIterator(NotingIterator):
    """Base of the iterators of `Pack`: reads documents, makes rows, and notes for states."""

    def __init__(self, items: Iterator[Any], rules: Pack, context: Context) -> None:
        super().__init__(items)
        self._rules, self._length = rules, rules.row_length
        self._count = np.arange(max(rules.row_length, 1) + 1, dtype=np.int32)
        saved = context.saved if context.start else None
        # All the mutable state:
        self._taken = context.first  # number of the next document
        self._given = 0  # tokens or rows, of those from the first open document on
        self._again = 0  # number of the first document that did not come before the state was taken
        if saved is not None:
            _, self._given, self._again = saved.value
        self._names: tuple[str, ...] = ()
        self._made = context.start  # rows and errors
        self._log = context.log(self._entry(), lambda *values: [*values])

    def _note(self) -> None:
        self._made += 1
        self._log(self._entry())

    def _entry(self) -> tuple[int, int, int, int]:
        return self._made, self._origin(), self._given, max(self._taken, self._again)

    @abstractmethod
    def _origin(self) -> int:
        """Return the number of the first document that rows which were not given need."""

    def _document(self) -> _Document | None:
        """Return the next document that has tokens; None at the end.

        Errors that were raised before the state was taken are not raised again.
        """
        while True:
            number = self._taken
            try:
                item = self._pull()
            except StopIteration:
                self._end()
                return None
            except Exception as error:
                counts = counts_as_item(error)
                self._taken += counts
                if counts and number < self._again:
                    continue
                raise
            self._taken += 1
            try:
                document = self._checked(number, item)
            except (TypeError, ValueError):
                if number < self._again:
                    continue
                raise
            if document is not None and document.size:
                return document

    def _checked(self, number: int, item: Any) -> _Document | None:
        """Return the document that an item is; None if it is left out."""
        named = isinstance(item, Mapping)
        names = tuple(item) if named else (TOKENS,)
        fields = tuple(map(np.asarray, item.values())) if named else (np.asarray(item),)
        sizes = {len(field) if field.ndim == 1 else -1 for field in fields}
        if len(sizes) != 1 or -1 in sizes:
            raise ValueError(
                f"pack: document {number} must be a sequence of numbers, or a dict of such sequences of "
                f"one length, not {short(item)}"
            )
        (size,) = sizes
        if not size:
            return None
        if any(field.dtype.kind not in "iufb" for field in fields):
            raise TypeError(f"pack: document {number} has other than numbers: {short(item)}")
        if names != self._names:
            if self._names or {SEGMENTS, POSITIONS} & {*names}:
                raise ValueError(
                    f"pack: document {number} has the fields {', '.join(map(str, names))}; give all "
                    f"documents the fields of the first one, none of them {SEGMENTS} or {POSITIONS}"
                )
            self._names = names
        return _Document(number, fields, size)

    def _row(self, pieces: Sequence[_Piece]) -> dict[str, Any]:
        sizes = [stop - start for _, start, stop in pieces]
        total, length = sum(sizes), self._length
        row: dict[str, Any] = {}
        for at, name in enumerate(self._names):
            parts = [document.fields[at][start:stop] for document, start, stop in pieces]
            if total < length:
                kind = np.result_type(*parts)
                parts.append(np.full(length - total, self._rules.padding_value, kind))
            row[name] = np.concatenate(parts)
        segments, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
        segments[:total] = np.repeat(self._count[1 : len(sizes) + 1], sizes)
        starts = np.cumsum(sizes, dtype=np.int32) - sizes
        positions[:total] = self._count[:total] - np.repeat(starts, sizes)
        row[SEGMENTS], row[POSITIONS] = segments, positions
        return row


class SplitIterator(_PackIterator):
    """Iterator of `Pack` that splits documents; `_given` are the tokens of the first one."""

    def __init__(self, items: Iterator[Any], rules: Pack, context: Context) -> None:
        self._documents: deque[_Document] = deque()
        super().__init__(items, rules, context)
        self._tokens = -self._given  # that are there for the next row

    def _origin(self) -> int:
        return self._documents[0].number if self._documents else self._taken

    def _make(self) -> dict[str, Any]:
        documents, length = self._documents, self._length
        while self._tokens < length:
            document = self._document()
            if document is None:
                break
            documents.append(document)
            self._tokens += document.size
        missing = length - self._tokens
        if self._tokens <= 0 or (missing > 0 and self._rules.drop_last):
            documents.clear()
            self._tokens = self._given = 0
            raise StopIteration
        pieces: list[_Piece] = []
        room = min(length, self._tokens)
        self._tokens -= room
        while room:
            document, start = documents[0], self._given
            stop = min(document.size, start + room)
            pieces.append((document, start, stop))
            room -= stop - start
            self._given = stop
            if stop == document.size:
                documents.popleft()
                self._given = 0
        return self._row(pieces)


class FirstFitIterator(_PackIterator):
    """Iterator of `Pack` that keeps documents whole; `_given` are the rows of those that were open."""

    def __init__(self, items: Iterator[Any], rules: Pack, context: Context) -> None:
        self._first = context.first  # number of the first document of the open rows
        super().__init__(items, rules, context)
        self._skip = self._given  # rows that are made again, and not given
        self._open: list[list[_Piece]] = []
        self._room: list[int] = []  # of each of these
        self._next: _Document | None = None  # the one that had no room
        self._full: deque[list[_Piece]] = deque()

    def _origin(self) -> int:
        return self._first

    def _make(self) -> dict[str, Any]:
        if not self._full:
            self._fill()
        pieces = self._full.popleft()
        self._given += 1
        if not self._full:
            self._begin()
        return self._row(pieces)

    def _begin(self) -> None:
        """Begin with new rows."""
        self._first = self._taken if self._next is None else self._next.number
        self._given = 0

    def _fill(self) -> None:
        """Fill rows until a document has no room, or there are no more. Raises `StopIteration`."""
        rows, rooms, most = self._open, self._room, self._rules.rows
        while True:
            document, self._next = self._next, None
            if document is None:
                document = self._document()
            if document is None:
                break
            size = document.size
            at = next((at for at, room in enumerate(rooms) if size <= room), len(rows))
            if at == most:
                self._next = document
                break
            if at == len(rows):
                rows.append([])
                rooms.append(self._length)
            rows[at].append((document, 0, size))
            rooms[at] -= size
        skip, self._skip = self._skip, 0
        self._full.extend(rows[skip:])
        self._open, self._room = [], []
        if not self._full:
            raise StopIteration

    def _checked(self, number: int, item: Any) -> _Document | None:
        document = super()._checked(number, item)
        if document is not None and document.size > self._length:
            raise ValueError(
                f"pack: document {number}: it has {document.size} tokens, more than row_length="
                f"{self._length}; truncate it by a map() before, leave it out by a filter(), or pass "
                "method='split'"
            )
        return document
