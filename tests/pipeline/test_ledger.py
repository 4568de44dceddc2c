"""Logs of a node: a place that is forgotten is never taken for another one."""

from __future__ import annotations

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
