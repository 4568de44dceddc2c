"""`Texts`: many names as two arrays, which workers of other processes map instead of copying them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

_AT_ONCE = 4096
"""Texts that an iterator decodes at a time."""


class Texts(Sequence[str]):
    """Texts that do not change.

    A list of a million names takes some 100 MB, and in a forked process each name that is looked at is
    copied with its page. Two arrays are sent to fresh processes as they are.

    Parameters
    ----------
    texts
        Any texts; names of files that are not UTF-8 too.

    Examples
    --------
    >>> names = Texts(["a.jpg", "b.jpg"])
    >>> names[-1], names[:1], len(names), "b.jpg" in names
    ('b.jpg', ['a.jpg'], 2, True)
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self._data = np.frombuffer(b"".join(parts), np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        at = operator.index(index)
        at += len(self) if at < 0 else 0
        if not 0 <= at < len(self):
            raise IndexError(f"no text {index} of {len(self)}")
        start, stop = self._ends[at : at + 2].tolist()
        return self._data[start:stop].tobytes().decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _AT_ONCE):
            ends = self._ends[first : first + _AT_ONCE + 1].tolist()
            data = self._data[ends[0] : ends[-1]].tobytes()
            for start, stop in itertools.pairwise(ends):
                yield data[start - ends[0] : stop - ends[0]].decode("utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Texts, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        more = ", ..." if len(self) > 3 else ""
        return f"Texts([{', '.join(map(repr, self[:3]))}{more}])"
