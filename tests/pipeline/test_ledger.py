"""Logs of a node: a place that is forgotten is never taken for another one. Results that a run drops."""

from __future__ import annotations

from hybridloader.engine import Payload, TaskContext
from hybridloader.running.flow import Skipping
from hybridloader.running.operator import Mark
from hybridloader.running.state import ONE_EACH, Ledger, Log, Point


def test_a_ledger_that_forgets_later_places_knows_only_the_first_of_them() -> None:
    ledger = Ledger(0, Point(0, 0))
    ledger.several([1, 0, 3, 0])
    ledger.one_each(2)
    assert ledger.last_before(5) == Mark(0, 5, 5)
    ledger.forget_later()
    assert ledger.last_before(5) == Mark(0, 0, 0), "input 5 is not known to come after output 5"
    ledger.one_each(3)
    assert ledger.last_before(8) == Mark(0, 8, 8)
    ledger.pulled(ONE_EACH)  # it has no output
    ledger.pulled(ONE_EACH)
    assert ledger.last_before(9) == Mark(0, 9, 10)


def test_a_log_that_forgets_later_places_keeps_the_numbers_of_those_to_come() -> None:
    log = Log(0, (0, "start"), str.upper)
    for entry in enumerate("abc", 1):
        log.add(entry)
    assert log.last_before(2) == Mark(0, 2, "B")
    log.forget_later()
    assert log.last_before(2) == Mark(0, 0, "START")
    log.add((4, "d"))
    assert log.last_before(4) == Mark(0, 4, "D")
    assert log.last_before(3) == Mark(0, 0, "START")


class Several(Payload):
    """Three items that arrived as one, from number `first` on."""

    forwardable, count = True, 3

    def __init__(self, first: int, opened: list[int]) -> None:
        self.first, self.opened = first, opened

    def open(self) -> list[int]:
        self.opened.append(self.first)
        return [*range(self.first, self.first + 3)]

    def discard(self) -> None:
        pass


def test_dropped_results_are_not_opened() -> None:
    """A resumed run drops all results up to its position, which may be many."""
    opened: list[int] = []
    results = iter([Several(first, opened) for first in range(0, 15, 3)])
    items = Skipping(results, TaskContext(), "map", 7, lambda number: None, count=7)
    assert next(items) == 7
    assert opened == [6]
    assert next(items) == 8
    assert [result.first for result in items] == [9, 12]
