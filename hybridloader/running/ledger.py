"""Ledger of a node: which of its inputs made which of its outputs, in one pass.

A node that gives one output for each input needs none. The thread that pulls the node writes the ledger
before it gives an output; any thread may read it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from hybridloader.running.operator import Mark

Counts = Sequence[float]
"""Outputs of each input."""

ONE_EACH: Counts = ()
"""Stands for at most one output of each input, of any number of inputs."""

SEVERAL: Counts = (math.inf,)
"""Stands for any number of outputs of one input."""


class Point(NamedTuple):
    """Place in a node where no input is half used: outputs from `given` on are made of inputs from
    `taken` on alone."""

    given: int
    taken: int


_Entry = tuple[int, int, Counts]
"""Position from which the inputs have these numbers of outputs."""

_given = itemgetter(0)

_MOST = 256
"""Least number of entries before a search for those that no state can need."""


def _nothing() -> None:
    return None


class Log(ABC):
    """Base of the logs from which a position makes marks."""

    __slots__ = ("_entries", "_limit", "epoch", "forgets", "number")

    def __init__(self, epoch: int, first: Any) -> None:
        self.epoch = epoch
        # Set by the position that keeps it:
        self.number = 0  # order among its marks and logs
        self.forgets: Callable[[], Any] = _nothing  # drops the entries that no state can need
        # All the mutable state:
        self._entries = [first]
        self._limit = _MOST

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Any) -> None:
        """Add an entry."""
        self._entries.append(entry)
        if len(self._entries) > self._limit:
            forget = self.forgets()
            if forget is not None:
                forget()
            self._limit = max(_MOST, 2 * len(self._entries))

    @abstractmethod
    def last_before(self, n: int) -> Mark | None:
        """Return the mark of the last place that is not after item `n`."""

    @abstractmethod
    def forget(self, n: int) -> None:
        """Forget the entries that only a place before item `n` needs."""

    @abstractmethod
    def forget_later(self) -> None:
        """Forget the places between the first and those to come, which no state can use now."""


class MarkLog(Log):
    """Entries of an operator, one after each of its items, from which a state makes marks.

    `value_of` makes the value of the mark after `at` items from the entry there.
    """

    __slots__ = ("_at", "_value_of")

    def __init__(
        self, epoch: int, at: int, first: Any, value_of: Callable[[int, Any], Any]
    ) -> None:
        super().__init__(epoch, first)
        self._at = at  # number of items before the first entry
        self._value_of = value_of

    def last_before(self, n: int) -> Mark | None:
        place = min(n - self._at, len(self._entries) - 1)
        if place < 0:
            return None
        at = self._at + place
        return Mark(self.epoch, at, self._value_of(at, self._entries[place]))

    def forget(self, n: int) -> None:
        more = max(0, min(n - self._at, len(self._entries) - 1))
        del self._entries[:more]
        self._at += more

    def forget_later(self) -> None:
        self.forget(self._at + len(self._entries) - 1)  # entries are found by their number


class Computed(Log):
    """Marks that can be computed after any number of items, from `start` on."""

    __slots__ = ("_start", "_value_of")

    def __init__(self, epoch: int, start: int, value_of: Callable[[int], Any]) -> None:
        super().__init__(epoch, None)
        self._start, self._value_of = start, value_of

    def last_before(self, n: int) -> Mark | None:
        return None if n < self._start else Mark(self.epoch, n, self._value_of(n))

    def forget(self, n: int) -> None:
        """Do nothing: it holds nothing for a place."""

    def forget_later(self) -> None:
        """Do nothing, for the same reason."""


class Ledger(Log):
    """Ledger of one node in pass `epoch`, which begins at a point. An error counts as an output."""

    __slots__ = ("given", "taken")

    _entries: list[_Entry]

    def __init__(self, epoch: int, begins: Point) -> None:
        super().__init__(epoch, (*begins, ONE_EACH))
        self.given, self.taken = begins

    def one_each(self, inputs: int) -> None:
        """Note inputs that have one output each, from here on."""
        if self._entries[-1][2]:
            self.add((self.given, self.taken, ONE_EACH))
        self.given += inputs
        self.taken += inputs

    def several(self, counts: Counts) -> None:
        """Note inputs that have these numbers of outputs."""
        if not counts:
            return
        self.add((self.given, self.taken, counts))
        self.given += int(sum(counts))
        self.taken += len(counts)

    def pulled(self, counts: Counts) -> None:
        """Note that all outputs before come of the inputs before the one that was pulled now.

        It will have `ONE_EACH`, or `SEVERAL` outputs; its caller counts them in `given`.
        """
        given, taken, before = self._entries[-1]
        if counts or before or self.given - given != self.taken - taken:
            here = self.given, self.taken, counts
            if given == self.given:
                self._entries[-1] = here
            else:
                self.add(here)
        self.taken += 1

    def last_before(self, n: int) -> Mark | None:
        entries = self._entries.copy()
        place = bisect_right(entries, n, key=_given) - 1
        if place < 0:
            return None
        given, taken, counts = entries[place]
        if not counts:
            more = max(0, min(n, self.given) - given)
            return Mark(self.epoch, given + more, taken + more)
        for count in counts:
            if given + count > n:
                break
            given += int(count)
            taken += 1
        return Mark(self.epoch, given, taken)

    def forget(self, n: int) -> None:
        del self._entries[: max(0, bisect_right(self._entries, n, key=_given) - 1)]

    def forget_later(self) -> None:
        given, taken, _ = self._entries[0]
        self._entries[:] = [
            (given, taken, SEVERAL)
        ]  # up to the next entry, only this place is known
