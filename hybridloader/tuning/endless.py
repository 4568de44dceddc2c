"""Endless runs for a measurement: epoch after epoch, and the figures of the stages from statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybridloader.observe.stats import Stats
from hybridloader.tuning.planner import StageTrial
from hybridloader.tuning.trials import Running

AND = " + "
"""Text between the names of functions that share a stage."""


class Endless(Running):
    """Results of epoch after epoch."""

    def __init__(self, epochs: Iterator[Any], stats: Any, names: Sequence[str]) -> None:
        self._epochs, self._stats, self._names = epochs, stats, names
        self._epoch: Iterator[Any] = iter(())
        self._empty = False

    def __next__(self) -> Any:
        while True:
            try:
                result = next(self._epoch)
            except StopIteration:
                if self._empty:  # an epoch without a result
                    raise
                self._epoch, self._empty = next(self._epochs), True
                continue
            self._empty = False
            return result

    def stages(self) -> tuple[StageTrial | None, ...]:
        stats: Stats = self._stats()
        return tuple(_figures(stats, name) for name in self._names)


def _figures(stats: Stats, name: str) -> StageTrial | None:
    """Return the figures of the stage `name`, which may be a part of a row."""
    for row in stats.stages:
        if {*name.split(AND)} <= {*row.name.split(AND)} and row.items:
            count = row.items
            cpu = None if row.cpu is None else row.cpu / count
            return StageTrial(row.busy / count, cpu, (row.bytes or 0) // count, row.load)
    return None
