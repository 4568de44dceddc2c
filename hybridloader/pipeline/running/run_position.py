"""Position of a run in its stream of items: items given, and marks that operators made on the way.

A position is found backwards from the last item that was given: each operator says how many of the items
before it made those, until one can't, or a source is reached. Items in queues and on workers never
matter. Whoever pulls makes marks; any thread may read them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hybridloader._support.errors import StateError, repr_of
from hybridloader._support.state_copies import copied
from hybridloader.fetching.readers import MapFetch
from hybridloader.pipeline.operators.base import Mark, UpstreamPart
from hybridloader.pipeline.running.plan import (
    ChainPlan,
    InlineNode,
    OperatorNode,
    Path,
    RelayNode,
    WorkerNode,
)
from hybridloader.pipeline.running.state import Position
from hybridloader.seeding.sample_seeds import SampleSeeding

if TYPE_CHECKING:
    from hybridloader.pipeline.running.dropping import Dropping

_MOST = 256
"""Marks that are kept at least before those are looked for that nobody will want any more."""

Place = tuple[Path, int]
"""Path of a chain, and the number of an operator in it."""


class Counts(NamedTuple):
    """Numbers of items that your loop was given."""

    given: int = 0
    """Items, and errors in the places of items."""
    raised: int = 0
    """Those of them that were errors."""


class _Marks:
    """Marks of one operator in one pass, in order."""

    __slots__ = ("epoch", "marks", "number")

    def __init__(self, epoch: int, number: int) -> None:
        self.epoch, self.number = epoch, number  # the number tells which came first
        self.marks: deque[Mark] = deque()

    def last_before(self, n: int) -> Mark | None:
        return next((mark for mark in reversed(self.marks) if mark.at <= n), None)


class _Stop(NamedTuple):
    """An operator on the way back from the last item."""

    path: Path
    number: int
    marks: _Marks | None
    mark: Mark
    replayed: bool  # what is behind it can't say what it has had


class RunPosition:
    """Position of one run, which may go on from a position that another run had come to."""

    def __init__(self, plan: ChainPlan, epoch: int, resumed: Position | None = None) -> None:
        self._plan, self.epoch = plan, epoch
        self._saved = {} if resumed is None else resumed.marks
        self.start = Counts() if resumed is None else Counts(resumed.given, resumed.raised)
        self.opened = False
        # All the mutable state. One thread counts, errors first:
        self.given, self.raised = self.start
        self.finished = False  # that it ended was told
        self.droppings: list[Dropping] = []
        # And under the lock, which the handler of a signal may take again to save a state:
        self._lock = threading.RLock()
        self._places: dict[Place, list[_Marks]] = {}  # and each pass, in the order of these
        self._made, self._kept, self._limit = 0, 0, _MOST

    # -- marks -----------------------------------------------------------------------------------------

    def mark(self, path: Path, number: int, mark: Mark) -> None:
        """Note that an operator could go on behind ``mark.at`` items of that pass."""
        with self._lock:
            passes = self._places.setdefault((path, number), [])
            if not passes or passes[-1].epoch != mark.epoch:
                passes.append(_Marks(mark.epoch, self._made))
            passes[-1].marks.append(mark)
            self._made += 1
            self._kept += 1
            if self._kept > self._limit:
                self._forget()
                self._kept = sum(len(m.marks) for found in self._places.values() for m in found)
                self._limit = max(_MOST, 2 * self._kept)

    def saved(self, path: Path, number: int, epoch: int) -> Mark | None:
        """Return the mark of an operator in the run before, if it was in this pass."""
        saved = self._saved.get(place_of(path, number))
        return saved if saved is not None and saved.epoch == epoch else None

    @property
    def counts(self) -> Counts:
        """Items given until now. From any thread: an error may be counted a moment too soon, which only
        has more done again than is needed."""
        given = self.given
        return Counts(given, min(self.raised, given))

    @property
    def progress(self) -> tuple[int, int] | None:
        """Items that came again and were dropped, and of how many; None if none are to be."""
        droppings = list(self.droppings)
        if all(dropping.done >= dropping.count for dropping in droppings):
            return None
        return sum(d.done for d in droppings), sum(d.count for d in droppings)

    # -- the way back ----------------------------------------------------------------------------------

    def position(self) -> tuple[Counts, dict[str, Mark]]:
        """Return the counts until now, and copies of the marks from which to go on; from any thread."""
        found: dict[str, Mark] = {}
        with self._lock:
            counts = self.counts
            for stop in self._back(counts):
                mark = stop.mark
                if isinstance(mark.value, Exception):
                    raise StateError(
                        f"a source could not tell its state behind item {mark.at}: {repr_of(mark.value)}"
                    ) from mark.value
                found[place_of(stop.path, stop.number)] = mark
        return counts, copied(found)

    def upcoming(self) -> dict[str, Mark]:
        """Return the marks that the next epoch begins with: of sources that go on by themselves."""
        found = {}
        for node in self._plan.all_nodes:
            if isinstance(node, OperatorNode) and (value := node.operator.upcoming()) is not None:
                place = place_of(node.path[:-1], node.number)
                found[place] = Mark(at=0, value=value, epoch=self.epoch + 1)
        return found

    def _back(self, counts: Counts) -> Iterator[_Stop]:
        if not self.opened:
            return iter(())
        return self._along(self._plan, counts.given, self.epoch, bool(counts.raised), False)

    def _along(
        self, plan: ChainPlan, n: int, epoch: int, raised: bool, replayed: bool
    ) -> Iterator[_Stop]:
        """Yield the operators of a chain that have marks, from its end on, behind `n` of its items."""
        for node in reversed(plan.nodes):
            if not isinstance(node, OperatorNode):
                if n and not passes_one_by_one(node, raised):
                    n, replayed = 0, True
                continue
            stop = self._stop(plan.path, node.number, n, epoch, replayed)
            mark = None if stop is None else stop.mark
            parts = before(node, n, epoch, mark, raised)
            if parts is None:
                n, replayed = 0, True
                stop = self._stop(plan.path, node.number, 0, epoch, replayed)
                mark = None if stop is None else stop.mark
                parts = before(node, 0, epoch, mark, raised) or ()
            if stop is not None:
                yield stop
            for part in parts:
                if part.branch is not None:
                    branch = node.branches[part.branch]
                    yield from self._along(branch, part.start, part.epoch, raised, replayed)
            own = [part for part in parts if part.branch is None]
            if not own:
                return
            n, epoch = own[0].start, own[0].epoch

    def _stop(self, path: Path, number: int, n: int, epoch: int, replayed: bool) -> _Stop | None:
        """Return the last mark of an operator that is not behind item `n`."""
        for marks in self._places.get((path, number), ()):
            if marks.epoch == epoch:
                mark = marks.last_before(n)
                if mark is not None:
                    return _Stop(path, number, marks, mark, replayed)
        # It may not have been opened again yet.
        saved = self.saved(path, number, epoch)
        if saved is None or saved.at > n:
            return None
        return _Stop(path, number, None, saved, replayed)

    def _forget(self) -> None:
        """Drop the marks that no state from now on can need."""
        stops = [stop for stop in self._back(self.counts) if stop.marks is not None]
        needed = {id(stop.marks) for stop in stops}
        for stop in stops:
            marks = stop.marks
            assert marks is not None
            while marks.marks[0].at < stop.mark.at:
                marks.marks.popleft()
            while stop.replayed and len(marks.marks) > 1:
                marks.marks.pop()
            for place, passes in self._places.items():
                same = place == (stop.path, stop.number)
                if same or is_before(place, (stop.path, stop.number)):
                    passes[:] = [
                        other
                        for other in passes
                        if id(other) in needed
                        or (other.number > marks.number and not (same and stop.replayed))
                    ]


def is_before(place: Place, other: Place) -> bool:
    """Tell whether items from `place` go through `other`: it is earlier, or on a branch."""
    (path, number), (chain, behind) = place, other
    return (path == chain and number < behind) or path[: len(chain) + 1] == (*chain, 0)


def place_of(path: Path, number: int) -> str:
    """Return the name of an operator in states: the path of its chain, and its number there."""
    return f"{'.'.join(map(str, path))}:{number}"


def passes_one_by_one(node: InlineNode | WorkerNode | RelayNode, raised: bool) -> bool:
    """Tell whether a node gives one item, or one error, for each that it takes.

    Not where errors were `raised` and it seeds items by their numbers: those are of what came through to
    it, and nobody knows which of the errors did not.
    """
    if isinstance(node, RelayNode):
        return True
    seeded = raised and isinstance(node.placement.seeding, SampleSeeding)
    if seeded and not all(isinstance(work.step().function, MapFetch) for work in node.works):
        return False
    return all(work.seek(1) == 1 for work in node.works)


def before(
    node: OperatorNode, n: int, epoch: int, mark: Mark | None, raised: bool
) -> Sequence[UpstreamPart] | None:
    """Call `Operator.before`; errors in the places of items are items only where nothing is before."""
    if n and raised and (node.branches or node.path[-1]):
        return None
    return node.operator.before(n, epoch, mark)
