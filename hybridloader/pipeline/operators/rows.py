"""Rows: items of several pipelines that belong together by their numbers.

Row `i` is made of item `i` of each pipeline. An error in the place of an item counts as one. So a
failure drops its whole row. If it dropped the item of one pipeline alone, all later rows would be
shifted. After a failure whose number is unknown, no row comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hybridloader._support.error_handling import (
    Raised,
    add_note,
    no_answer,
    repr_of,
    takes_a_place,
)
from hybridloader.errors import IteratorClosed
from hybridloader.fetching.on_error.places import LeftOut, goes_astray
from hybridloader.pipeline.operators.parameters import check_flags, settle, several
from hybridloader.pipeline.operators.split import leaves_out, may_begin_at
from hybridloader.running.operator import (
    Chain,
    Context,
    JoinIterator,
    Length,
    Mark,
    Source,
    UpstreamPart,
    close_all,
    steps_in,
)


@dataclass(frozen=True)
class Join(Source):
    """Several pipelines as one; the kinds differ in whose item comes next."""

    pipelines: tuple[Chain, ...] = field(repr=False)

    not_fingerprinted = ("pipelines",)

    def __post_init__(self) -> None:
        settle(self, pipelines=several(self, self.pipelines))

    def branches(self) -> tuple[Chain, ...]:
        return self.pipelines

    @property
    def lengths(self) -> list[Length]:
        return [pipeline.length for pipeline in self.pipelines]

    def opened(self, context: Context) -> list[Iterator[Any]]:
        """Open all of the pipelines; if one can't be opened, close the others."""
        found: list[Iterator[Any]] = []
        try:
            for pipeline in self.pipelines:
                found.append(context.open(pipeline, context.start))
        except BaseException:
            close_all(found)
            raise
        return found


@dataclass(frozen=True)
class Zip(Join):
    """Tuples of one item from each pipeline.

    Items belong together by their numbers. One that raises, or is left out by `on_error`, drops its
    whole row. After a failure whose number is unknown, no row comes.

    Parameters
    ----------
    pipelines
        At least one.
    strict
        True if pipelines of different lengths are an error: at once, if the lengths are known, else
        when the first of them has ended. False ends with the shortest.
    """

    strict: bool = True

    joins_by_number = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "strict")
        if len(self.pipelines) > 1:
            for number, pipeline in enumerate(self.pipelines):
                _check(self.name, number, pipeline)
        lengths = self.lengths
        if self.strict and len({length for length in lengths if length is not None}) > 1:
            raise ValueError(
                f"{self.name}: the pipelines are of different lengths: {lengths}; shorten them by "
                "take(), or give strict=False to end with the shortest"
            )

    def start(self, context: Context) -> Iterator[Any]:
        several = len(self.pipelines) > 1
        lost = [_loses_count(pipeline) if several else None for pipeline in self.pipelines]
        return ZipIterator(self.opened(context), self.strict, context.start, lost)

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        if n and (leaves_out(self.pipelines) or not may_begin_at(self.pipelines, n)):
            return None
        return [UpstreamPart(number, n, epoch) for number in range(len(self.pipelines))]

    def length(self, upstream: Length) -> Length:
        known = [length for length in self.lengths if length is not None]
        if self.strict and known:
            return known[0]
        if 0 in known:
            return 0
        return None if len(known) < len(self.pipelines) else min(known)


def _loses_count(pipeline: Chain) -> str | None:
    """Name a step after which the number of a raised error is unknown; None if there is none."""
    return next((step.name for step in steps_in(pipeline) if not step.keeps_count), None)


def _check(name: str, number: int, pipeline: Chain) -> None:
    """Raise `ValueError` for a pipeline that leaves items out by policy and loses count of them."""
    skipping: str | None = None
    for operator in steps_in(pipeline):
        culprit = f"after {operator.name} the number of that item is unknown"
        if operator.leaves_out:
            skipping = operator.name
            culprit = f"{skipping} makes no one item of one"
        if skipping is not None and not (operator.keeps_count and operator.keeps_gaps):
            raise ValueError(
                f"{name}: in pipeline {number}, {skipping} skips items that fail, and {culprit}: "
                "all rows after it would be joined wrongly. Put the step with on_error, or those "
                "after it, after the zip; or pass on_error=Replace(...), which keeps every position"
            )


_END = object()
"""Stands in a row for the item of a pipeline that has ended."""


class ZipIterator(JoinIterator):
    """Iterator of `Zip`; `start` rows were given before.

    `lost` is, for each branch, the step that makes the number of a failure unknown; None without one.
    """

    def __init__(
        self,
        branches: list[Iterator[Any]],
        strict: bool,
        start: int,
        lost: Sequence[str | None] = (),
    ) -> None:
        super().__init__(branches)
        self._strict, self._lost = strict, [*lost, *[None] * (len(branches) - len(lost))]
        self._pulls = [branch.__next__ for branch in branches]
        # All the mutable state:
        self._count = start  # rows given, or raised
        self._row: list[Any] = []  # the items of the next one, as far as they have come
        self._failed: Exception | None = None  # what that row raises, once all of it has come
        self._ended = False
        self._last: Exception | None = None  # what is to be raised yet, after the end

    def __next__(self) -> Any:
        if self._ended:
            self._raise_last()
        row, pulls = self._row, self._pulls
        while len(row) < len(pulls):
            try:
                item = pulls[len(row)]()
            except StopIteration:
                item = _END
            except Exception as error:
                if not takes_a_place(error):
                    raise
                item = None
                self._spoil(error)
            row.append(item)
            if item is _END or row[0] is _END:
                self._check_end(row)
        if row[0] is _END:
            self._end(None)
        self._count += 1
        self._row = []
        if self._failed is not None:
            self._raise_failed()
        return tuple(row)

    def _spoil(self, error: Exception) -> None:
        """Note that an item of this row failed: the row fails after all branches gave theirs."""
        number, first = len(self._row), self._failed
        if number and self._row[0] is _END:  # the others have more items
            self._failed = None if type(error) is LeftOut else error
            return
        # No step after the one that left an item out loses count (`_check`).
        culprit = None if type(error) is LeftOut else self._lost[number]
        if goes_astray(error) or culprit is not None:
            why = f"after {culprit}" if culprit is not None else "after such an error"
            text = (
                f"zip: {why}, it is unknown to which row of the others the items of pipeline {number} "
                "belong, so the error ends it. "
                + ("Put that step after the zip" if culprit is not None else "Fix the source")
                + ", or keep items from failing before it, with on_error=Replace(...)"
            )
            add_note(error, text)
            self._ended, self._last = True, no_answer(IteratorClosed(text))
            try:
                raise error
            finally:
                del error, first  # a traceback whose frame holds its own exception is a cycle
        if first is None or (type(first) is LeftOut and type(error) is not LeftOut):
            self._failed = error
        elif type(error) is not LeftOut and (found := repr_of(error)) != repr_of(first):
            add_note(first, f"In the same row of zip, pipeline {number} raised {found}.")

    def _check_end(self, row: list[Any]) -> None:
        """End, unless the pipelines must be of the same length and all until now have ended."""
        first, last = row[0] is _END, row[-1] is _END
        if not self._strict:
            self._end(None)
        if first != last:
            self._end(self._uneven(0, len(row) - 1) if first else self._uneven(len(row) - 1, 0))

    def _raise_failed(self) -> NoReturn:
        assert self._failed is not None
        failed, self._failed = Raised(self._failed), None
        failed.throw()

    def _raise_last(self) -> NoReturn:
        if self._last is None:
            raise StopIteration
        last = Raised(self._last)
        if not isinstance(self._last, IteratorClosed):
            self._last = None
        last.throw()

    def _end(self, last: Exception | None) -> NoReturn:
        """Raise the error of this row, then `last`, then always `StopIteration`."""
        self._ended, self._last = True, last
        if self._failed is not None and type(self._failed) is not LeftOut:
            self._raise_failed()
        self._raise_last()

    def _uneven(self, ended: int, other: int) -> ValueError:
        return ValueError(
            f"zip: pipeline {ended} ended after {self._count} items and pipeline {other} has more; pass "
            "strict=False to end with the shortest"
        )

    def close(self) -> None:
        self._ended, self._row = True, []
        self._failed = self._last = None
        super().close()
