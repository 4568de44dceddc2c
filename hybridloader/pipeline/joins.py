"""Operators of several pipelines: rows of a zip, and joins."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from hybridloader._support.text import is_number, one_of, short
from hybridloader._support.user_objects import (
    Raised,
    add_note,
    close,
    has,
    no_answer,
    takes_a_place,
)
from hybridloader.errors import IteratorClosed
from hybridloader.running.operator import (
    INFINITE,
    SEED,
    Chain,
    Context,
    Length,
    Mark,
    PassesIterator,
    Source,
    UpstreamPart,
    check_flags,
    settle,
    settle_whole,
    steps_in,
)

# -- rows: items of several pipelines that belong together by their numbers
#
# Row `i` is made of item `i` of each pipeline. So no pipeline may leave out items, and no row follows an
# error, after which the numbers of items may be unknown.


def sum_of(lengths: Iterable[Length]) -> Length:
    """Return the sum; None if one of them is not known and none is infinite."""
    total: Length = 0
    for length in lengths:
        if length == INFINITE:
            return length
        total = None if total is None or length is None else total + length
    return total


@dataclass(frozen=True)
class Join(Source):
    """Several pipelines as one; the kinds differ in whose item comes next."""

    pipelines: tuple[Chain, ...] = field(repr=False)

    not_fingerprinted = ("pipelines",)

    def __post_init__(self) -> None:
        found: tuple[Any, ...] = tuple(self.pipelines)
        settle(self, pipelines=found)
        if not found:
            raise ValueError(f"{self.name}: there are no pipelines; give at least one")
        for pipeline in found:
            if not isinstance(pipeline, Chain):
                hint = "; make one with Pipeline.from_iterable" if has(pipeline, "__iter__") else ""
                if isinstance(pipeline, (list, tuple)) and all(
                    isinstance(p, Chain) for p in pipeline
                ):
                    hint = "; pass each pipeline as an argument of its own"
                raise TypeError(f"{self.name} joins pipelines, not {pipeline!r}{hint}")

    def branches(self) -> tuple[Chain, ...]:
        return self.pipelines

    @property
    def lengths(self) -> list[Length]:
        return [pipeline.length for pipeline in self.pipelines]

    def length(self, upstream: Length) -> Length:
        return sum_of(self.lengths)


class JoinIterator(Iterator[Any]):
    """Base of the iterators over several pipelines, which are closed with this.

    `starts` are the numbers of those that are opened, with the items after which each begins.
    """

    def __init__(
        self, pipelines: Sequence[Chain], context: Context, starts: Mapping[int, int]
    ) -> None:
        self._opened: list[Iterator[Any]] = []
        with ExitStack() as opened:
            for number, start in starts.items():
                branch = context.open(pipelines[number], start, number)
                opened.callback(close, branch)
                self._opened.append(branch)
            self._rest = opened.pop_all()

    def close(self) -> None:
        """Close them all, also when closing another fails, the last first. Idempotent."""
        self._rest.close()


@dataclass(frozen=True)
class Zip(Join):
    """Tuples of one item from each pipeline, which belong together by their numbers.

    Parameters
    ----------
    pipelines
        At least one. An error in one of them ends the rows.
    strict
        True if pipelines of different lengths are an error: at once, if the lengths are known, else
        when the first of them has ended. False ends with the shortest.
    """

    strict: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "strict")
        for number, pipeline in enumerate(self.pipelines):
            skipping = next((step.name for step in steps_in(pipeline) if step.leaves_out), None)
            if skipping is not None:
                raise ValueError(
                    f"{self.name}: in pipeline {number}, {skipping} skips items that fail, so all rows "
                    "after one would be joined wrongly. Give on_error to a step after the zip, or pass "
                    "on_error=Replace(...), which keeps every position"
                )
        lengths = self.lengths
        if self.strict and len({length for length in lengths if length is not None}) > 1:
            raise ValueError(
                f"{self.name}: the pipelines are of different lengths: {lengths}; shorten them by "
                "take(), or give strict=False to end with the shortest"
            )

    def start(self, context: Context) -> Iterator[Any]:
        return ZipIterator(self, context)

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        return [UpstreamPart(number, n, epoch) for number in range(len(self.pipelines))]

    def length(self, upstream: Length) -> Length:
        known = [length for length in self.lengths if length is not None]
        if self.strict and known:
            return known[0]
        if 0 in known:
            return 0
        return None if len(known) < len(self.pipelines) else min(known)


_END = object()  # stands in a row for the item of a pipeline that has ended


class ZipIterator(JoinIterator):
    """Iterator of `Zip`."""

    def __init__(self, join: Zip, context: Context) -> None:
        starts = dict.fromkeys(range(len(join.pipelines)), context.start)
        super().__init__(join.pipelines, context, starts)
        self._strict = join.strict
        self._pulls = [branch.__next__ for branch in self._opened]
        # All the mutable state:
        self._count = context.start  # rows given
        self._row: list[Any] = []  # the items of the next one, as far as they have come
        self._over: Exception | None = None  # raised by every call after the end

    def __next__(self) -> Any:
        row, pulls = self._row, self._pulls
        while self._over is None and len(row) < len(pulls):
            try:
                item = pulls[len(row)]()
            except StopIteration:
                item = _END
            except Exception as error:
                if takes_a_place(error):
                    why = f"zip: an error of pipeline {len(row)} at row {self._count} has ended the rows"
                    add_note(
                        error, f"{why}; on_error=Replace(...) in that pipeline keeps its place"
                    )
                    self._over = no_answer(IteratorClosed(why))
                raise
            row.append(item)
            if item is _END or row[0] is _END:
                self._check_end(row)
        if self._over is not None:
            Raised(self._over).throw()
        self._count += 1
        self._row = []
        return tuple(row)

    def _check_end(self, row: list[Any]) -> None:
        """End, unless the pipelines must be of the same length and all until now have ended."""
        even = row[0] is row[-1]
        if not even or not self._strict or len(row) == len(self._pulls):
            self._over = StopIteration()
        if self._strict and not even:
            ended, other = (0, len(row) - 1) if row[0] is _END else (len(row) - 1, 0)
            raise ValueError(
                f"zip: pipeline {ended} ended after {self._count} items and pipeline {other} has more; "
                "pass strict=False to end with the shortest"
            )


# -- operators that make one pipeline out of several, without regard to which item belongs to which
#
# Each pulls the pipelines in one thread, in an order that its parameters alone decide, whichever of
# them has something first. An error of one of them is raised where its item would have been returned.


@dataclass(frozen=True)
class Concat(Join):
    """All items of the first pipeline, then all of the second, and so on; each begins in its turn."""

    def start(self, context: Context) -> Iterator[Any]:
        return ConcatIterator(self.pipelines, context)

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        if mark is None:
            return None if n else [UpstreamPart(0, 0, epoch)]
        return [UpstreamPart(mark.value, n - mark.at, epoch)]


class ConcatIterator(PassesIterator):
    """Iterator of `Concat`. A pipeline that can't be opened raises once and is passed over."""

    def __init__(self, pipelines: tuple[Chain, ...], context: Context) -> None:
        super().__init__(context)
        self._pipelines, self._context = pipelines, context

    def _is_over(self) -> bool:
        return self._begun == len(self._pipelines)

    def _open(self, number: int, start: int) -> Iterator[Any]:
        try:
            return self._context.open(self._pipelines[number], start, number)
        except Exception:
            self._given += 1
            raise


class _InTurn(Join):
    """Base of the joins that take from all pipelines, in an order that their parameters decide."""

    counts_errors = True

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        if not n:
            return super().before(n, epoch, mark)
        if mark is None:
            return None
        counts, over = mark.value[:2]
        branches = [number for number in range(len(counts)) if number not in over] or [0]
        return [UpstreamPart(number, counts[number], epoch, mark.at) for number in branches]


class _TurnIterator(JoinIterator):
    """Base of the iterators over pipelines in turn; notes whose items were given."""

    def __init__(self, pipelines: Sequence[Chain], context: Context) -> None:
        saved = context.saved if context.start else None
        begins: Any = ([0] * len(pipelines), [], -1) if saved is None else saved.value
        # All the mutable state:
        self._counts = [*begins[0]]  # items, and errors in their places, of each
        self._over = [*begins[1]]  # those that have ended
        self._last: int = begins[2]  # the one that has given last
        self._alive = [number for number in range(len(pipelines)) if number not in self._over]
        super().__init__(
            pipelines, context, {number: self._counts[number] for number in self._alive}
        )
        self._left = [branch.__next__ for branch in self._opened]
        self._place: int | None = None  # of the one whose turn it is, and has given nothing yet
        self._total = context.start  # of all
        self._log = context.log(
            self._entry(), lambda counts, over, last: [[*counts], [*over], last]
        )

    def _entry(self) -> tuple[Any, ...]:
        return self._total, tuple(self._counts), tuple(self._over), self._last

    @abstractmethod
    def _choose(self) -> int:
        """Return the place, among those that are left, of the one whose turn is next."""

    def _lost_one(self) -> None:  # most have nothing to do
        """Note that one of those that were left has ended."""

    def __next__(self) -> Any:
        while self._left:
            place = self._place
            if place is None:
                place = self._choose()
            self._place = None
            try:
                item = self._left[place]()
            except StopIteration:
                del self._left[place]
                self._over.append(self._alive.pop(place))
                self._lost_one()
            except Exception as error:
                if takes_a_place(error):
                    self._note(place)
                else:
                    self._place = place
                raise
            else:
                self._note(place)
                return item
        raise StopIteration

    def _note(self, place: int) -> None:
        """Note an item, or an error in its place, of number `place` of those that are left."""
        self._last = self._alive[place]
        self._counts[self._last] += 1
        self._total += 1
        self._log(self._entry())


@dataclass(frozen=True)
class Mix(_InTurn):
    """Items of several pipelines, each drawn at random from one of them, errors in their places.

    The order is a function of the seed, the epoch and the lengths of the pipelines.

    Parameters
    ----------
    pipelines
        At least one.
    weights
        Frequency of each, in proportion to the others; None draws all alike.
    seed
        None takes the seed of the run.
    stop
        ``"all"`` continues with the others, in the same proportions, when one has ended. ``"first"``
        ends when one that was drawn has ended.

    Notes
    -----
    `Repeat` defines an epoch of unequal pipelines: ``large.mix(small.repeat(3))`` has each item of
    ``small`` three times, and ``large.mix(small.repeat(), stop="first")`` repeats ``small`` as often as
    its weight asks for until ``large`` ends.
    """

    weights: Sequence[float] | None = None
    seed: int | None = None
    stop: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        settle_whole(self, "seed", 0, SEED, optional=True)
        one_of(f"{self.name}: stop", self.stop, ("all", "first"))
        if self.weights is not None:
            settle(self, weights=self._checked(self.weights))

    def _checked(self, weights: Any) -> tuple[float, ...]:
        """Return weights as a tuple. Raises `TypeError` or `ValueError`."""
        try:
            found = tuple(weights)
        except TypeError:
            found = ()
        if len(found) != len(self.pipelines):
            raise ValueError(
                f"{self.name}: weights must be one number for each of {len(self.pipelines)} pipelines, "
                f"not {short(weights)}"
            )
        for number, weight in enumerate(found):
            if not is_number(weight):
                raise TypeError(
                    f"{self.name}: weights[{number}] must be a number, not {short(weight)}"
                )
            if not 0 < weight < math.inf:
                raise ValueError(
                    f"{self.name}: weights[{number}] must be above 0 and finite, not {weight}; leave "
                    "out a pipeline that is never to be drawn"
                )
        return tuple(map(float, found))

    def start(self, context: Context) -> Iterator[Any]:
        return MixIterator(self, context)

    def length(self, upstream: Length) -> Length:
        lengths = self.lengths
        if self.stop == "all" or len(lengths) == 1:
            return sum_of(lengths)
        return INFINITE if set(lengths) == {INFINITE} else None


class MixIterator(_TurnIterator):
    """Iterator of `Mix`."""

    def __init__(self, join: Mix, context: Context) -> None:
        super().__init__(join.pipelines, context)
        self._first = join.stop == "first"
        self._weights = join.weights or (1.0,) * len(join.pipelines)
        self._draw = context.random(join.seed).random  # see `ShuffleIterator`
        for _ in range(sum(self._counts) + len(self._over)):  # each item, and each end, was drawn
            self._draw()
        self._edges = self._edges_now()  # the only other mutable state

    def _choose(self) -> int:
        edges = self._edges
        return bisect_right(edges, self._draw() * edges[-1], hi=len(edges) - 1)

    def _lost_one(self) -> None:
        if self._first:
            self._left = []
        self._edges = self._edges_now()

    def _edges_now(self) -> list[float]:
        """Return the end of the part of each that is left, from 0 to the sum of the weights."""
        return list(accumulate(self._weights[number] for number in self._alive))


@dataclass(frozen=True)
class Interleave(_InTurn):
    """One item of each pipeline in turn, until all have ended."""

    def start(self, context: Context) -> Iterator[Any]:
        return InterleaveIterator(self.pipelines, context)


class InterleaveIterator(_TurnIterator):
    """Iterator of `Interleave`."""

    def _choose(self) -> int:
        return bisect_right(self._alive, self._last) % len(self._alive)
