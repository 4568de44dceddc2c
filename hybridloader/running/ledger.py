"""Logs of a node: which of its inputs made which of its outputs, and which reader gave which item.

A node that gives one output for each input needs no `Ledger`. The thread that pulls a node, or the
readers, writes the log before it gives an output; any thread may read it.
"""

from __future__ import annotations

import math
import pickle
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from hybridloader._support.states import Frozen
from hybridloader._support.user_objects import described, no_answer
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.errors import StateError
from hybridloader.fetching.shards import Place, ShardDivision
from hybridloader.running.operator import Mark

T = TypeVar("T")

Numbers = Sequence[float]
"""Outputs of each input."""

ONE_EACH: Numbers = ()
"""Stands for at most one output of each input, of any number of inputs."""

SEVERAL: Numbers = (math.inf,)
"""Stands for any number of outputs of one input."""


class Point(NamedTuple):
    """Place in a node where no input is half used: outputs from `given` on are made of inputs from
    `taken` on alone."""

    given: int
    taken: int


_Entry = tuple[int, int, Numbers]
"""Position from which the inputs have these numbers of outputs."""

_MOST_ENTRIES = 256
"""Least number of entries before a search for those that no state can need."""


def _nothing() -> None:
    return None


class Log(ABC):
    """Base of the logs from which a position makes marks: entries in the order of their places."""

    __slots__ = ("_entries", "_limit", "epoch", "forgets", "number")

    def __init__(self, epoch: int, *first: Any) -> None:
        self.epoch = epoch
        # Set by the position that keeps it:
        self.number = 0  # order among its logs
        self.forgets: Callable[[], Any] = _nothing  # drops the entries that no state can need
        # All the mutable state:
        self._entries = [*first]
        self._limit = _MOST_ENTRIES

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Any) -> None:
        """Add an entry."""
        self._entries.append(entry)
        if len(self._entries) > self._limit:
            self._forget_some(_MOST_ENTRIES)

    def _forget_some(self, least: int) -> None:
        forget = self.forgets()
        if forget is not None:
            forget()
        self._limit = max(least, 2 * len(self))

    @staticmethod
    def place_of(entry: Any) -> int:
        """Return the number of items before an entry."""
        return entry[0]  # type: ignore[no-any-return]

    def _last(self, n: int) -> Any:
        """Return the last entry that is not after item `n`; None if there is none."""
        entries = self._entries.copy()  # another thread may forget some
        place = bisect_right(entries, n, key=self.place_of)
        return entries[place - 1] if place else None

    @abstractmethod
    def last_before(self, n: int) -> Mark | None:
        """Return the mark of the last place that is not after item `n`."""

    def forget(self, n: int) -> None:
        """Forget the entries that only a place before item `n` needs."""
        del self._entries[: max(0, bisect_right(self._entries, n, key=self.place_of) - 1)]

    def forget_later(self) -> None:
        """Forget the places between the first and those to come, which no state can use now."""
        del self._entries[1:]


class Marks(Log):
    """Marks that an operator makes where it can resume."""

    __slots__ = ()

    _entries: list[Mark]

    # From the end: a later pass of this epoch, as in a repetition, marks from its beginning on again.
    def last_before(self, n: int) -> Mark | None:
        return next((mark for mark in reversed(self._entries) if mark.at <= n), None)

    def forget(self, n: int) -> None:
        while len(self._entries) > 1 and self._entries[1].at <= n:
            del self._entries[0]


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
    """Marks that can be computed after any number of items, from `start` on: it has no entries."""

    __slots__ = ("_start", "_value_of")

    def __init__(self, epoch: int, start: int, value_of: Callable[[int], Any]) -> None:
        super().__init__(epoch)
        self._start, self._value_of = start, value_of

    def last_before(self, n: int) -> Mark | None:
        return None if n < self._start else Mark(self.epoch, n, self._value_of(n))


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

    def several(self, counts: Numbers) -> None:
        """Note inputs that have these numbers of outputs."""
        if not counts:
            return
        self.add((self.given, self.taken, counts))
        self.given += int(sum(counts))
        self.taken += len(counts)

    def pulled(self, counts: Numbers) -> None:
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
        found = self._last(n)
        if found is None:
            return None
        given, taken, counts = found
        if not counts:
            more = max(0, min(n, self.given) - given)
            return Mark(self.epoch, given + more, taken + more)
        for count in counts:
            if given + count > n:
                break
            given += int(count)
            taken += 1
        return Mark(self.epoch, given, taken)

    def forget_later(self) -> None:
        given, taken, _ = self._entries[0]
        # Up to the next entry, only this place is known.
        self._entries[:] = [(given, taken, SEVERAL)]


class Turn(NamedTuple):
    """Position in the items of several readers."""

    given: tuple[int, ...]
    """Items and errors of each reader until there."""
    turn: int = 0
    """Reader whose turn it is."""
    ended: frozenset[int] = frozenset()
    """Readers that had ended at their turn."""

    @property
    def active(self) -> list[int]:
        """Readers that have not ended, in the order of their turns."""
        readers = len(self.given)
        order = [(self.turn + k) % readers for k in range(readers)]
        return [reader for reader in order if reader not in self.ended]

    def after(self, count: int) -> Turn:
        """Return the position after `count` more items, if no other reader has ended until there."""
        active = self.active
        if not active or not count:
            return self
        rounds, rest = divmod(count, len(active))
        given = list(self.given)
        for number, reader in enumerate(active):
            given[reader] += rounds + (number < rest)
        return Turn(tuple(given), active[rest], self.ended)


class ReaderStarts(NamedTuple):
    """Readers of one epoch, from its beginning or from where they resume."""

    begins: Turn
    starts: tuple[ShardStart, ...] = ()
    """Start of each reader; empty: all begin at the beginning."""
    division: ShardDivision | None = None
    """Division of the shards that their source names, if it does."""
    exact: bool = True
    """False if the shards are divided again, so that the items come in another order."""
    follows: bool = False
    """True if there is a next item: it had come when the state was taken."""


class _Reads:
    """Samples that one reader has read, beside the items that the loop has received.

    Both numbers differ where an `on_error` left samples out, or tried them again.
    """

    def __init__(self, given: int, start: ShardStart, place: Place | None) -> None:
        self._begins, self.given, self._read = (given, start.skip), given, start.skip
        # Items before a task, samples read after each of its items, and after the task:
        self._uneven: list[tuple[int, Sequence[int], int]] = []
        # Samples read before each of these:
        self.states = [(start.position, start)] if start.stateful and place is None else []
        self._shards = [] if place is None else [(start.skip, place)]

    def __len__(self) -> int:
        return len(self._uneven) + len(self.states) + len(self._shards)

    def add(self, units: int, ends: Sequence[int], gone: Collection[int]) -> None:
        """Note the items of a task.

        Parameters
        ----------
        units
            Number of its values and errors.
        ends
            Number of samples read after each of these; empty: one for each.
        gone
            Numbers of those that were left out.
        """
        if ends:
            kept = [end for unit, end in enumerate(ends) if unit not in gone]
            self._uneven.append((self.given, kept, ends[-1]))
            self.given, self._read = self.given + len(kept), ends[-1]
        else:
            self.given, self._read = self.given + units, self._read + units

    def add_state(self, state: ShardStart) -> None:
        """Note the state after the samples that were read."""
        self.states.append((self._read, state))

    def add_shards(self, shards: Sequence[tuple[int, Place]]) -> None:
        """Note the shards that were entered: samples read before each, and its position.

        A worker that was restarted reports those from the beginning.
        """
        known = self._shards[-1][0] if self._shards else -1
        self._shards += (entered for entered in shards if entered[0] >= known)

    def read(self, given: int) -> int:
        """Return the number of samples read for the first `given` items."""
        before, since = self._begins
        for first, ends, last in reversed(self._uneven.copy()):
            if first < given:
                if given - first <= len(ends):
                    return ends[given - first - 1]
                before, since = first + len(ends), last
                break
        return since + given - before

    def state(self, read: int) -> tuple[int, ShardStart | None]:
        """Return the latest state until so many samples, and the number of samples before it."""
        return _last(self.states, read) or (0, None)

    def place(self, read: int) -> Place | None:
        """Return the position in the shards after so many samples; None if none was entered."""
        found = _last(self._shards, read)
        return found and found[1]._replace(at=found[1].at + read - found[0])

    def forget(self, given: int) -> None:
        """Forget the entries that only a position before item `given` needs."""
        read = self.read(given)
        del self._uneven[: max(0, sum(first < given for first, _, _ in self._uneven) - 1)]
        for found in (self.states, self._shards):
            del found[: max(0, sum(at <= read for at, _ in found) - 1)]


def _last(found: Sequence[tuple[int, T]], read: int) -> tuple[int, T] | None:
    """Return the last entry that is not after so many samples."""
    return next((entry for entry in reversed([*found]) if entry[0] <= read), None)


class ReaderLog(Log):
    """Log of a node of readers in epoch `epoch`."""

    __slots__ = ("_division", "_follows", "_reads")

    _entries: list[Turn]

    def __init__(self, epoch: int, readers: ReaderStarts) -> None:
        super().__init__(epoch, readers.begins)
        self._division = division = readers.division
        self._follows = sum(readers.begins.given) if readers.follows else None
        starts = readers.starts or (ShardStart(),) * len(readers.begins.given)
        self._reads = [
            _Reads(given, start, None if division is None else division.place(reader, start))
            for reader, (given, start) in enumerate(zip(readers.begins.given, starts, strict=True))
        ]

    def __len__(self) -> int:
        return len(self._entries) + sum(map(len, self._reads))

    def of(self, reader: int) -> _Reads:
        """Return the record of `reader`, to add to."""
        reads = self._reads[reader]
        if len(reads) > self._limit:
            self._forget_some(self._limit)
        return reads

    @staticmethod
    def place_of(entry: Turn) -> int:
        return sum(entry.given)

    def _at(self, n: int) -> Turn | None:
        entry: Turn | None = self._last(n)
        return entry and entry.after(n - sum(entry.given))

    def last_before(self, n: int) -> Mark | None:
        turn = self._at(n)
        if turn is None:
            return None
        readers, places, most, division = [], list[Place](), 0, self._division
        try:
            for reader, (given, reads) in enumerate(zip(turn.given, self._reads, strict=True)):
                read = reads.read(given)
                most, ended = max(most, read), reader in turn.ended
                state: list[Any] | None = None
                if division is not None:
                    place = division.end(reader) if ended else reads.place(read)
                    places.append(place or division.beginning(reader))
                    state = [*places[-1]]
                else:
                    at, start = reads.state(read)
                    # A source may begin again from the state that it had at its end.
                    ended = ended or (start is not None and start.ended and at == read)
                    if start is not None and not ended:
                        state = [at, _given_by(start.dataset), _given_by(start.iterator)]
                readers.append([given, ended, read, state])
        except StateError as error:
            return Mark(self.epoch, n, error)
        value: dict[str, Any] = {"turn": turn.turn, "readers": readers}
        if division is not None:
            value["shards"] = division.state(places, most)
            value["next"] = self._next(turn, places, n)
        return Mark(self.epoch, n, value)

    def _next(self, turn: Turn, places: Sequence[Place], n: int) -> list[int] | None:
        """Return where the next sample is, the shard and its number; None if it has not come."""
        if self._division is None or not turn.active:
            return None
        reader = turn.active[0]
        if n == self._follows or self._reads[reader].given > turn.given[reader]:
            return self._division.sample_at(reader, places[reader])
        return None

    def forget(self, n: int) -> None:
        turn = self._at(n)
        if turn is None:
            return
        super().forget(n)
        for given, reads in zip(turn.given, self._reads, strict=True):
            reads.forget(given)

    def forget_later(self) -> None:
        for reads in self._reads:
            del reads.states[:-1]


def _given_by(state: Any) -> Any:
    return None if state is None else state.given()


def resumed_readers(
    mark: Mark, name: str, whole: ShardDivision | None, workers: int
) -> ReaderStarts:
    """Return the readers that resume from a mark.

    Parameters
    ----------
    mark
        Mark of the node in a state.
    name
        Name of the node in errors.
    whole
        Division of an epoch, if the source names its shards.
    workers
        Number of readers.

    Raises
    ------
    StateError
        The state is damaged, or of other shards or ranks.
    """
    try:
        shards, saved = mark.value.get("shards"), mark.value["readers"]
        if (shards is None) != (whole is None):
            raise StateError(
                f"{name}: the source of the state {'names' if shards else 'does not name'} its shards"
            )
        if whole is not None:
            return _divided(mark, whole, workers)
        given, ended, starts = [], set(), []
        for reader, (count, over, read, state) in enumerate(saved):
            given.append(int(count))
            if over:
                ended.add(reader)
            start = ShardStart(read if over else 0, read, ended=bool(over))
            if state is not None:
                at, *kept = state
                dataset, iterator = (
                    None if one is None else Frozen(pickle.dumps(one)) for one in kept
                )
                start = ShardStart(at, read, dataset, iterator, since=int(read > at))
            starts.append(start)
        turn = Turn(tuple(given), int(mark.value["turn"]), frozenset(ended))
        return ReaderStarts(turn, tuple(starts))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        raise no_answer(
            StateError(f"{name}: the positions of the readers are damaged: {described(error)}")
        ) from error


def _divided(mark: Mark, whole: ShardDivision, workers: int) -> ReaderStarts:
    shards, saved = mark.value["shards"], mark.value["readers"]
    same = len(saved) == workers
    division = whole.resumed(shards, same_workers=same)
    exact = same and whole.agrees(shards)
    if exact:
        places = [Place(int(passed), int(at)) for _, _, _, (passed, at) in saved]
        reads = [int(read) for _, _, read, _ in saved]
        ended = frozenset(reader for reader, one in enumerate(saved) if one[1])
        turn = Turn(tuple(int(one[0]) for one in saved), int(mark.value["turn"]), ended)
    else:  # numbered on, so that no seed of a sample is used twice
        places = [division.beginning(reader) for reader in range(workers)]
        reads = [int(shards["read"])] * workers
        turn = Turn((mark.at, *[0] * (workers - 1)))
    starts = (
        ShardStart(read, read, None, division.iterator_state(reader, place))
        for reader, (read, place) in enumerate(zip(reads, places, strict=True))
    )
    follows = exact and mark.value["next"] is not None
    return ReaderStarts(turn, tuple(starts), division, exact, follows)
