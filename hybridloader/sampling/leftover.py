"""Indices that several ranks have left of a shared order, as an order for other ranks.

Each rank has a different position, so the rest is ragged at its beginning. An index of the rest is
computed from the positions of the ranks; nothing is stored per index. A rest may have a rest in turn.
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridloader._support.user_objects import described, no_answer
from hybridloader.errors import StateError

Ints = npt.NDArray[np.int64]

LONGEST = 7_000
"""Most characters of the texts in one state, which must stay below 10 KB."""

Saved = list[list[Any]]
"""A `Leftover` in a state: for each time that ranks were merged the number of ranks, the position of
each, and positions that come first, both as texts."""


class Leftover:
    """Order of the positions that `ranks` have left of an order of `size` positions.

    Parameters
    ----------
    size
        Number of positions of the shared order; that of `before`, if given.
    turns
        Position at which the next turn of each rank begins. Rank ``r`` has left the position
        ``turns[r] + r`` and every `ranks`-th one from there. All turns are equal modulo the number of
        ranks.
    first
        Further positions that are left. They come first.
    before
        The shared order, if it was itself the rest of an order.
    """

    def __init__(
        self, size: int, turns: Sequence[int], first: Sequence[int], before: Leftover | None = None
    ) -> None:
        ranks = len(turns)
        self._before, self._ranks = before, ranks
        self._turns, self._first = np.asarray(turns, np.int64), np.asarray(first, np.int64)
        self._base = int(self._turns.min())
        self._tail: Ints | None
        begins = (self._turns - self._base) // ranks  # in turns from the base on
        self._order = np.argsort(begins, kind="stable")  # ranks, by their first turn
        full, rest = divmod(max(0, size - self._base), ranks)  # turns of all ranks, and one of some
        joins = np.minimum(begins[self._order], full)
        # From turn `_joins[k]` on, k + 1 ranks take turns, until all do.
        self._joins = joins
        lengths = np.diff(joins) * np.arange(1, ranks)
        self._ends = np.cumsum(np.concatenate([[len(self._first)], lengths]))
        # Where all ranks take turns, positions are consecutive. That may begin after the end.
        self._tail_at, self._tail = self._base + int(begins.max()) * ranks, None
        tail = max(0, size - self._tail_at)
        if begins.max() > full:
            late = np.flatnonzero(begins <= full)
            self._tail = self._base + full * ranks + late[late < rest]
            tail = len(self._tail)
        self.size = int(self._ends[-1]) + tail

    def take(self, places: Ints) -> Ints:
        """Return the positions at `places` of this order, in the first order that was shared."""
        found = np.empty(len(places), np.int64)
        early = places < len(self._first)
        late = places >= self._ends[-1]
        found[early] = self._first[places[early]]
        beyond = places[late] - self._ends[-1]
        found[late] = beyond + self._tail_at if self._tail is None else self._tail[beyond]
        ragged = ~(early | late)
        if ragged.any():
            at = places[ragged]
            part = np.searchsorted(self._ends, at, "right") - 1
            turn, rank = np.divmod(at - self._ends[part], part + 1)
            turn += self._joins[part]
            found[ragged] = self._base + turn * self._ranks + self._order[rank]
        return found if self._before is None else self._before.take(found)

    def saved(self) -> Saved:
        """Return it as JSON values. Raises `StateError` if they are too long for a state."""
        own = [self._ranks, _packed(self._turns), _packed(self._first)]
        return [*([] if self._before is None else self._before.saved()), own]


def leftover_of(size: int, saved: Any) -> Leftover | None:
    """Return the parts of the state of a sampler of `size` indices. Raises `StateError`."""
    if not saved:
        return None
    try:
        return _read(size, tuple((int(ranks), str(t), str(f)) for ranks, t, f in saved))
    except (TypeError, ValueError, zlib.error) as error:
        raise no_answer(
            StateError(f"left: the positions that ranks had left are damaged: {described(error)}")
        ) from error


@functools.lru_cache(maxsize=8)
def _read(size: int, saved: tuple[tuple[int, str, str], ...]) -> Leftover:
    found: Leftover | None = None
    for ranks, turns, first in saved:
        begins, early = _unpacked(turns), _unpacked(first)
        if (
            len(begins) != ranks
            or ranks < 1
            or (begins < 0).any()
            or ((begins - begins[0]) % ranks).any()
        ):
            raise ValueError(f"{len(begins)} positions of {ranks} ranks")
        if len(early) and not 0 <= early.min() <= early.max() < size:
            raise ValueError("a position beyond the last one")
        found = Leftover(size, begins, early, found)  # type: ignore[arg-type]
        size = found.size
    assert found is not None
    return found


def _packed(numbers: Ints) -> str:
    if not len(numbers):
        return ""
    steps = np.diff(numbers, prepend=np.int64(0)).astype("<i8")
    # Bytes of the same weight side by side: most of those above are 0.
    planes = steps.view(np.uint8).reshape(-1, 8).T.tobytes()
    return base64.b64encode(zlib.compress(planes, 9)).decode()


def _unpacked(text: str) -> Ints:
    if not text:
        return np.empty(0, np.int64)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), np.uint8)
    steps = np.ascontiguousarray(planes.reshape(8, -1).T).view("<i8").reshape(-1)
    return np.cumsum(steps, dtype=np.int64)
