"""Operators that make one pipeline out of several, without regard to which item belongs to which.

Each pulls the pipelines in one thread, in an order that its parameters alone decide, whichever of
them has something first. An error of one of them is raised where its item would have been returned.
The operators that join items by their numbers are in `rows`.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hybridloader._support.arguments import is_number, one_of
from hybridloader._support.text import short
from hybridloader._support.user_objects import (
    Raised,
    add_note,
    counts_as_item,
    foreign,
    takes_a_place,
)
from hybridloader.fetching.on_error.places import astray
from hybridloader.pipeline.operators.parameters import SEED, settle, settle_whole, sum_of
from hybridloader.pipeline.operators.rows import Join
from hybridloader.pipeline.operators.split import reaches_out
from hybridloader.running.operator import (
    INFINITE,
    Chain,
    Context,
    JoinIterator,
    Length,
    Mark,
    PassesIterator,
    UpstreamPart,
    close_all,
)

Weights = Sequence[float] | Callable[[int], Sequence[float]] | None


@dataclass(frozen=True)
class Concat(Join):
    """All items of the first pipeline, then all of the second, and so on; each begins in its turn."""

    def start(self, context: Context) -> Iterator[Any]:
        return ConcatIterator(self.pipelines, context)

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        if mark is None:
            return None if n else [UpstreamPart(0, 0, epoch)]
        # Of a fork, other branches may be in pipelines that are over, and would pile up.
        if n and any(map(reaches_out, self.pipelines)):
            return None
        return [UpstreamPart(mark.value, n - mark.at, epoch)]

    def length(self, upstream: Length) -> Length:
        return sum_of(self.lengths)


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
        except Exception as error:
            failed = Raised(astray(error))  # its number of items is unknown
        self._given += 1
        return failed.throw()


class _InTurn(Join):
    """Base of the joins that take from all pipelines, in an order that their parameters decide."""

    counts_errors = True

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        if not n:
            return super().before(n, epoch, mark)
        # Branches of a fork would have to begin at one place.
        if mark is None or any(map(reaches_out, self.pipelines)):
            return None
        counts, over = mark.value[:2]
        branches = [number for number in range(len(counts)) if number not in over]
        return [UpstreamPart(number, counts[number], epoch, mark.at) for number in branches] or [
            UpstreamPart(0, counts[0], epoch, mark.at)
        ]


class _TurnIterator(JoinIterator):
    """Base of the iterators over pipelines in turn; notes whose items were given."""

    def __init__(
        self, pipelines: Sequence[Chain], context: Context, without: Sequence[int] = ()
    ) -> None:
        count, saved = len(pipelines), context.saved if context.start else None
        # All the mutable state:
        self._counts = [0] * count  # items, and errors in their places, of each
        self._over = [*without]  # those that are not in this pass, then those that have ended
        self._last = self._in_a_row = 0  # the one that has given last, and how many items since
        if saved is not None:
            self._counts, self._over, self._last, self._in_a_row = saved.value
        self._alive = [number for number in range(count) if number not in self._over]
        opened: list[Iterator[Any]] = []
        try:
            for number in self._alive:
                opened.append(context.open(pipelines[number], self._counts[number], number))
        except BaseException:
            close_all(opened)
            raise
        super().__init__(opened)
        self._log = context.log(self._entry(), lambda _, entry: [*map(list, entry[:2]), *entry[2:]])

    def _entry(self) -> tuple[Any, ...]:
        return tuple(self._counts), tuple(self._over), self._last, self._in_a_row

    def _note(self, place: int) -> None:
        """Note an item, or an error in its place, of number `place` of those that are left."""
        number = self._alive[place]
        self._counts[number] += 1
        self._in_a_row = self._in_a_row + 1 if number == self._last else 1
        self._last = number
        self._log.add(self._entry())

    def _note_end(self, place: int) -> None:
        self._over.append(self._alive.pop(place))
        self._in_a_row = 0


@dataclass(frozen=True)
class Mix(_InTurn):
    """Items of several pipelines, each drawn at random from one of them, errors in their places.

    The order is a function of the seed, the epoch and the lengths of the pipelines.

    Parameters
    ----------
    pipelines
        At least one.
    weights
        Frequency of each, in proportion to the others; None draws all alike. Or a function from the
        number of the epoch, from 0, to these, in which 0 leaves a pipeline out of that epoch.
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

    weights: Weights = None
    seed: int | None = None
    stop: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        settle_whole(self, "seed", 0, SEED, optional=True)
        one_of(f"{self.name}: stop", self.stop, ("all", "first"))
        if self.weights is not None and not callable(self.weights):
            settle(self, weights=self._checked(self.weights, above=True))

    def _checked(self, weights: Any, *, above: bool = False) -> tuple[float, ...]:
        """Return weights as a tuple. Raises `TypeError` or `ValueError`; `above` refuses 0."""
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
            if not 0 <= weight < math.inf or (above and not weight):
                raise ValueError(
                    f"{self.name}: weights[{number}] must be {'above 0' if above else '0 or more'} and "
                    f"finite, not {weight}; leave out a pipeline that is never to be drawn"
                )
        if not any(found):
            raise ValueError(f"{self.name}: weights are all 0; let one of them be above 0")
        return tuple(map(float, found))

    def _weights_of(self, epoch: int) -> tuple[float, ...]:
        if not callable(self.weights):
            return tuple(self.weights or (1.0,) * len(self.pipelines))
        try:
            return self._checked(self.weights(epoch))
        except Exception as error:
            add_note(error, f"{self.name}: weights({epoch})")
            Raised(foreign(error, f"{self.name}: weights")).throw()

    def start(self, context: Context) -> Iterator[Any]:
        weights = self._weights_of(context.epoch)
        generator = context.random(self.seed)
        return MixIterator(self.pipelines, context, weights, generator, self.stop == "first")

    def length(self, upstream: Length) -> Length:
        lengths = self.lengths
        if callable(self.weights) and len(lengths) > 1 and INFINITE not in lengths:
            return None  # an epoch may be without some of them
        if self.stop == "all" or len(lengths) == 1:
            return sum_of(lengths)
        return INFINITE if set(lengths) == {INFINITE} else None


class MixIterator(_TurnIterator):
    """Iterator of `Mix`."""

    def __init__(
        self,
        pipelines: Sequence[Chain],
        context: Context,
        weights: tuple[float, ...],
        generator: random.Random,
        first: bool,
    ) -> None:
        without = [number for number, weight in enumerate(weights) if not weight]
        super().__init__(pipelines, context, without)
        self._first = first
        self._draw = generator.random  # see `ShuffleIterator`
        ended = len(self._over) - len(without)
        for _ in range(sum(self._counts) + ended):  # each item, and each end, was drawn
            self._draw()
        # All the mutable state:
        alive = zip(self._opened, self._alive, strict=True)
        self._left = [(branch.__next__, weights[number]) for branch, number in alive]
        self._edges = self._edges_now()
        self._place: int | None = None  # of the one that was drawn, and has given nothing yet

    def __next__(self) -> Any:
        while self._left:
            place = self._place
            if place is None:
                edges = self._edges
                place = bisect_right(edges, self._draw() * edges[-1], hi=len(edges) - 1)
            try:
                item = self._left[place][0]()
            except StopIteration:
                self._place = None
                if self._first:
                    self._left = []
                else:
                    del self._left[place]
                    self._edges = self._edges_now()
                    self._note_end(place)
            except Exception as error:
                self._place = None if takes_a_place(error) else place
                if counts_as_item(error):
                    self._note(place)
                raise
            else:
                self._place = None
                self._note(place)
                return item
        raise StopIteration

    def _edges_now(self) -> list[float]:
        """Return the end of the part of each that is left, from 0 to the sum of the weights."""
        return list(accumulate(weight for _, weight in self._left))

    def close(self) -> None:
        self._left = []
        super().close()


@dataclass(frozen=True)
class Interleave(_InTurn):
    """`block_length` items of each pipeline in turn, until all have ended.

    Parameters
    ----------
    pipelines
        At least one.
    block_length
        Items in a row from one of them.
    """

    block_length: int = 1

    def __post_init__(self) -> None:
        instead = "give how many items in a row come from one pipeline"
        settle_whole(self, "block_length", 1, instead)
        super().__post_init__()

    def start(self, context: Context) -> Iterator[Any]:
        return InterleaveIterator(self.pipelines, context, self.block_length)

    def length(self, upstream: Length) -> Length:
        return sum_of(self.lengths)


class InterleaveIterator(_TurnIterator):
    """Iterator of `Interleave`."""

    def __init__(self, pipelines: Sequence[Chain], context: Context, block: int) -> None:
        super().__init__(pipelines, context)
        self._block = block
        # All the mutable state:
        self._left = [branch.__next__ for branch in self._opened]
        self._turn = 0  # whose it is, of those that are left
        self._given = 0  # items, in this turn
        if self._in_a_row:
            self._turn = self._alive.index(self._last)
            self._given = (self._in_a_row - 1) % block + 1

    def __next__(self) -> Any:
        while self._left:
            if self._given == self._block:
                self._given = 0
                self._turn += 1
            if self._turn >= len(self._left):
                self._turn = 0
            try:
                item = self._left[self._turn]()
            except StopIteration:
                del self._left[self._turn]
                self._given = 0
                self._note_end(self._turn)
                continue
            except Exception as error:
                self._given += takes_a_place(error)
                if counts_as_item(error):
                    self._note(self._turn)
                raise
            self._given += 1
            self._note(self._turn)
            return item
        raise StopIteration

    def close(self) -> None:
        self._left = []
        super().close()
