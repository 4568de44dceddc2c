"""Log of several readers: which of their items came in which order, and the states of what they read.

They are read in turn, so where a run was follows from the number of items, and from where each reader
ended. The thread that pulls the readers writes the log; any thread may read it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridloader._support.errors import StateError, described, no_answer
from hybridloader._support.state_copies import Frozen
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.running.ledger import Log
from hybridloader.running.operator import Mark


class Turn(NamedTuple):
    """Place in the items of several readers."""

    given: tuple[int, ...]
    """Items and errors of each reader until there."""
    turn: int = 0
    """Reader whose turn it is."""
    ended: frozenset[int] = frozenset()
    """Readers that were passed over, as they had ended."""

    def after(self, count: int) -> Turn:
        """Return the place after `count` more items, if no other reader has ended until there."""
        readers = len(self.given)
        order = [(self.turn + k) % readers for k in range(readers)]
        active = [reader for reader in order if reader not in self.ended]
        if not active or not count:
            return self
        rounds, rest = divmod(count, len(active))
        given = list(self.given)
        for number, reader in enumerate(active):
            given[reader] += rounds + (number < rest)
        return Turn(tuple(given), active[rest], self.ended)


class ReaderLog(Log):
    """Log of a node of readers in pass `epoch`, which begins with `starts`."""

    __slots__ = ("_states",)

    _entries: list[Turn]

    def __init__(self, epoch: int, begins: Turn, starts: Sequence[ShardStart] = ()) -> None:
        super().__init__(epoch, begins)
        # Numbers of items with the states after them, of each reader:
        self._states: list[list[tuple[int, ShardStart]]] = [[] for _ in begins.given]
        for found, start in zip(self._states, starts, strict=False):
            if start.stateful:
                found.append((start.position, start))

    def __len__(self) -> int:
        return len(self._entries) + sum(map(len, self._states))

    def add_state(self, reader: int, given: int, state: ShardStart) -> None:
        """Note the state of the source of a reader, after its first `given` items."""
        self._states[reader].append((given, state))
        if len(self._states[reader]) > self._limit:
            forget = self.forgets()
            if forget is not None:
                forget()
            self._limit = max(self._limit, 2 * len(self._states[reader]))

    def _at(self, n: int) -> Turn | None:
        for entry in reversed(self._entries.copy()):
            first = sum(entry.given)
            if first <= n:
                return entry.after(n - first)
        return None

    def last_before(self, n: int) -> Mark | None:
        place = self._at(n)
        if place is None:
            return None
        readers = []
        try:
            for reader, given in enumerate(place.given):
                at, start = self._state_of(reader, given)
                # A source may begin anew from the state that it had at its end.
                at_end = start is not None and start.ended and at == given
                ended, state = at_end or reader in place.ended, None
                if start is not None and not ended:
                    state = [at, _told(start.dataset), _told(start.iterator)]
                readers.append([given, ended, state])
        except StateError as error:
            return Mark(self.epoch, n, error)
        return Mark(self.epoch, n, {"turn": place.turn, "readers": readers})

    def _state_of(self, reader: int, given: int) -> tuple[int, ShardStart | None]:
        for at, start in reversed(self._states[reader].copy()):
            if at <= given:
                return at, start
        return 0, None

    def forget(self, n: int) -> None:
        place = self._at(n)
        if place is None:
            return
        before = sum(sum(entry.given) <= n for entry in self._entries)
        del self._entries[: before - 1]
        for reader, given in enumerate(place.given):
            states = self._states[reader]
            del states[: max(0, sum(at <= given for at, _ in states) - 1)]

    def forget_later(self) -> None:
        for states in self._states:
            del states[:-1]


def _told(state: Any) -> Any:
    return None if state is None else state.given()


def starts_of(mark: Mark, name: str) -> tuple[Turn, tuple[ShardStart, ...]]:
    """Return where readers begin that resume from a mark of theirs. Raises `StateError`."""
    try:
        given, ended, starts = [], set(), []
        for reader, (count, over, state) in enumerate(mark.value["readers"]):
            given.append(int(count))
            if over:
                ended.add(reader)
            start = ShardStart(count if over else 0, count, ended=bool(over))
            if state is not None:
                at, *kept = state
                dataset, iterator = (
                    None if one is None else Frozen(pickle.dumps(one)) for one in kept
                )
                start = ShardStart(at, count, dataset, iterator, since=int(count > at))
            starts.append(start)
        return Turn(tuple(given), int(mark.value["turn"]), frozenset(ended)), tuple(starts)
    except (KeyError, TypeError, ValueError) as error:
        raise no_answer(
            StateError(f"{name}: the places of the readers are damaged: {described(error)}")
        ) from error
