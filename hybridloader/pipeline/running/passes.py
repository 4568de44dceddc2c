"""One pass over a line of a pipeline, as one of its operators sees it: its `Context`.

It tells what the machine knows and asks it for what an operator may have. It starts nothing itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridloader._support.errors import StateError
from hybridloader.engine.fetcher import TaskContext
from hybridloader.pipeline.operators.base import Chain, Mark, Operator
from hybridloader.pipeline.running.dropping import Dropping
from hybridloader.pipeline.running.run_position import Path, RunPosition

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks
    from hybridloader.pipeline.running.executor import Machine


class Start(NamedTuple):
    """Where something begins.

    Attributes
    ----------
    items
        How many of its items are had already.
    slack
        How many of these need not be there; see `Dropping`.
    """

    items: int = 0
    slack: int = 0


class Pass:
    """One pass over a line.

    Parameters
    ----------
    trail
        Of the run that it is a part of.
    path
        Of the line, or of the operator that sees it.
    number
        Of that operator in its line.
    begins
        Where that operator begins.
    saved
        What that operator marked in the run before.
    rows
        Whether a later `zip` numbers its items, so that a left-out item keeps its place.
    """

    def __init__(
        self,
        machine: Machine,
        trail: RunPosition,
        path: Path,
        epoch: int,
        shared: dict[Any, Any],
        left: TaskContext,
        operator: Operator | None = None,
        number: int = 0,
        begins: Start = Start(),  # noqa: B008 - it can't be changed
        saved: Mark | None = None,
        *,
        rows: bool = False,
    ) -> None:
        self._machine, self.trail, self.path = machine, trail, path
        self._operator, self._number = operator, number
        self.epoch, self.shared, self.left = epoch, shared, left
        self.begins, self.saved, self.rows = begins, saved, rows
        self._opened = 0

    def at(
        self, path: Path, number: int, operator: Operator, begins: Start, saved: Mark | None
    ) -> Pass:
        """The same pass, for the operator at `path`, the one with that number in its line."""
        if saved is not None and saved.at > begins.items:
            raise StateError(
                f"operator {operator.name!r} would have to begin at item {begins.items}, and the state "
                f"knows it from item {saved.at} on; begin the epoch anew"
            )
        shared, left = self.shared, self.left
        return Pass(
            self._machine,
            self.trail,
            path,
            self.epoch,
            shared,
            left,
            operator,
            number,
            begins,
            saved,
            rows=self.rows,
        )

    def another(self, path: Path, epoch: int) -> Pass:
        """A pass of its own over a line, as a part of the same run."""
        return Pass(self._machine, self.trail, path, epoch, {}, self.left, rows=self.rows)

    @property
    def start(self) -> int:
        return self.begins.items

    @property
    def seed(self) -> int | None:
        machine = self._machine
        return machine.seed if machine.seeded else None

    @property
    def locks(self) -> PageLocks | None:
        return self._machine.stations.locks.get(self.path)

    @property
    def run_seed(self) -> int:
        return self._machine.seed

    def random(self, seed: int | None) -> random.Random:
        if seed is not None:
            return random.Random(f"{seed}/{self.epoch}")
        return random.Random(f"{self._machine.seed}/{self.path[:-1]}/{self._number}/{self.epoch}")

    def draw(self) -> int:
        return self._machine.draw(self.path[:-1], self.epoch)

    def open(self, pipeline: Chain, start: int = 0, number: int | None = None) -> Iterator[Any]:
        assert self._operator is not None
        branch = self._opened if number is None else number
        self._opened = branch + 1
        path = self._machine.path_of(self._operator, self.path, branch)
        shared, left = self.shared, self.left
        rows = self._machine.joins_rows(self._operator, inside=self.rows)
        inner = Pass(self._machine, self.trail, path, self.epoch, shared, left, rows=rows)
        return self._machine.open_line(pipeline, path, inner, Start(start, self.begins.slack))

    def mark(self, at: int, value: Any) -> None:
        self.trail.mark(self.path[:-1], self._number, self.epoch, Mark(at, value))

    def drop(self, items: Iterator[Any], at: int) -> Iterator[Any]:
        assert self._operator is not None
        start, slack = self.begins
        return self.without(items, Start(start - at, slack), self._operator.name)

    def without(self, items: Iterator[Any], first: Start, name: str) -> Iterator[Any]:
        """`items` but the first, which come again."""
        if not first.items:
            return items
        dropping = Dropping(items, first.items, first.slack, self.left, name)
        self.trail.droppings.append(dropping)
        return dropping
