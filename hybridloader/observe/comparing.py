"""Comparison of two statistics: each figure before and after, and its ratio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hybridloader._support.text import html, table, time
from hybridloader.observe.recording import Faults
from hybridloader.observe.stats import StageStats, Stats

LITTLE = 0.01
"""Load below which a stage is left out of the comparison."""


@dataclass(frozen=True)
class Change:
    """One figure, before and after; None if that run had no such stage.

    `unit` is ``"s"``, ``"%"`` (a share from 0 to 1), ``"/s"``, or empty for a count.
    """

    name: str
    before: float | None
    after: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """`after` divided by `before`; None if either is missing or `before` is 0."""
        if self.before is None or self.after is None or self.before <= 0:
            return None
        return self.after / self.before


@dataclass(frozen=True)
class Comparison:
    """Two statistics side by side; prints as a table and two sentences."""

    before: Stats
    after: Stats
    changes: tuple[Change, ...]

    @property
    def speedup(self) -> float | None:
        """Rate after divided by the rate before; None if one of the runs had no items.

        Rates are samples per second if both batch sizes are known, else items per second.
        """
        return self.changes[0].ratio

    @property
    def summary(self) -> str:
        """Summary of the changes, as a sentence."""
        speedup, shares = self.speedup, (self.before.stall.share, self.after.stall.share)
        if not speedup:
            return "One of the two had no items."
        faster = f"{speedup:.2f} times as many" if abs(speedup - 1) >= 0.02 else "as many"
        return (
            f"The second had {faster} {self._unit}s a second; its loop waited for "
            f"{shares[1]:.0%} of the time, that of the first for {shares[0]:.0%}."
        )

    @property
    def _unit(self) -> str:
        return _unit_of(self.before, self.after)

    @property
    def verdict(self) -> str:
        """Verdicts of both, as a sentence."""
        causes = [
            v.cause
            if v.stage is None
            else f"{v.cause}, {v.stage}" + (f" ({v.kind})" if v.kind else "")
            for v in (self.before.verdict, self.after.verdict)
        ]
        if causes[0] == causes[1]:
            return f"The bottleneck stayed the same: {causes[0]}. {self.after.verdict.advice}"
        return (
            f"The bottleneck was: {causes[0]}; it is now: {causes[1]}. {self.after.verdict.advice}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the changes as a dict of JSON types."""
        return {
            "speedup": self.speedup,
            "changes": [asdict(change) | {"ratio": change.ratio} for change in self.changes],
            "summary": self.summary,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        return "\n".join([*table(self._rows(), (0,)), self.summary, self.verdict])

    def print(self) -> None:
        """Print the table and the sentences."""
        print(self)

    def _repr_html_(self) -> str:
        return html(self._rows(), [self.summary, self.verdict])

    def _rows(self) -> list[list[str]]:
        rows = [["", "before", "after", "change"]]
        for change in self.changes:
            show, ratio = _SHOW[change.unit], change.ratio
            figures = ("" if one is None else show(one) for one in (change.before, change.after))
            rows.append([change.name, *figures, "" if ratio is None else f"x {ratio:.2f}"])
        return rows


_SHOW: dict[str, Callable[[float], str]] = {
    "s": time,
    "%": lambda share: f"{share:.0%}",
    "": lambda count: f"{count:,.0f}",
    "/s": lambda rate: f"{rate:,.1f}",
}
"""Functions that show a figure, by its unit."""


def compare(a: Stats, b: Stats) -> Comparison:
    """Compare two statistics, such as those of two epochs with different numbers of workers.

    Parameters
    ----------
    a, b
        Results of `stats()` of loaders or pipelines, before and after a change.

    Returns
    -------
    Comparison
        Figures side by side; it prints as a table. Stages are matched by name. If both batch sizes are
        known, rates count samples; so runs with different batch sizes are comparable.

    Raises
    ------
    TypeError
        `a` or `b` is not a result of `stats()`.
    """
    for stats in (a, b):
        if not isinstance(stats, Stats):
            raise TypeError(
                f"compare() takes two results of stats(), not {type(stats).__name__}; call "
                "compare(before.stats(), after.stats())"
            )
    unit = _unit_of(a, b)
    changes = [
        Change(f"{unit}s a second", _rate(a, unit), _rate(b, unit), "/s"),
        Change("stall, share of the time", a.stall.share, b.stall.share, "%"),
        Change("stall, median a batch", a.stall.p50, b.stall.p50, "s"),
        Change("stall, 99 % a batch", a.stall.p99, b.stall.p99, "s"),
        Change("before the prefetch was full", a.stall.warmup, b.stall.warmup, "s"),
    ]
    names = tuple(dict.fromkeys(stage.name for stage in (*a.stages, *b.stages)))
    for name in names:
        changes += _of_stage(name, a, b, unit)
    for name in names:
        changes += _faults_of(name, a, b)
    return Comparison(a, b, tuple(changes))


def _of_stage(name: str, a: Stats, b: Stats, unit: str) -> list[Change]:
    one, other = _rows_of(name, a, b)

    def change(label: str, unit: str, figure: Callable[[StageStats, Stats], float]) -> Change:
        before, after = (
            None if stage is None else figure(stage, stats)
            for stage, stats in ((one, a), (other, b))
        )
        return Change(f"{name}: {label}", before, after, unit)

    changes = [
        change(
            f"busy {_ARTICLES[unit]} {unit}",
            "s",
            lambda stage, stats: stage.busy / max(1, _counted(stage.items, stats, unit)),
        ),
        change("load", "%", lambda stage, _: stage.load),
    ]
    stalls = change("stall", "s", lambda stage, _: stage.stall)
    if all((stage is None or stage.load < LITTLE) for stage in (one, other)):
        return []  # a stage without load can't explain a difference
    return [*changes, stalls] if stalls.before or stalls.after else changes


def _faults_of(name: str, a: Stats, b: Stats) -> list[Change]:
    rows = _rows_of(name, a, b)
    changes = []
    for fault in vars(Faults()):
        one, other = (None if row is None else getattr(row.faults, fault) for row in rows)
        if one or other:
            changes.append(Change(f"{name}: {fault}", one, other, ""))
    return changes


def _rows_of(name: str, a: Stats, b: Stats) -> list[StageStats | None]:
    return [{s.name: s for s in stats.stages}.get(name) for stats in (a, b)]


_ARTICLES = {"item": "an", "sample": "a"}


def _unit_of(a: Stats, b: Stats) -> str:
    return "item" if a.batch_size is None or b.batch_size is None else "sample"


def _counted(items: int, stats: Stats, unit: str) -> int:
    return items if unit == "item" else items * (stats.batch_size or 1)


def _rate(stats: Stats, unit: str) -> float:
    return _counted(stats.items, stats, unit) / stats.seconds if stats.seconds > 0 else 0.0
