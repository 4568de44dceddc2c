"""Comparison of two statistics: each figure before and after, and its ratio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from hybridloader._support.text import Shown, time
from hybridloader.observe.figures import Faults
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
class Comparison(Shown):
    """Two statistics side by side; prints as a table and two sentences."""

    before: Stats
    after: Stats
    changes: tuple[Change, ...]
    _left = (0,)

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
        unit = _unit_of(self.before, self.after)
        return (
            f"The second had {faster} {unit}s a second; its loop waited for "
            f"{shares[1]:.0%} of the time, that of the first for {shares[0]:.0%}."
        )

    @property
    def verdict(self) -> str:
        """Verdicts of both, as a sentence."""
        was, now = (
            v.cause
            + (f", {v.stage}" if v.stage else "")
            + (f" ({v.kind})" if v.stage and v.kind else "")
            for v in (self.before.verdict, self.after.verdict)
        )
        same = f"The bottleneck stayed the same: {now}."
        moved = f"The bottleneck was: {was}; it is now: {now}."
        return f"{same if was == now else moved} {self.after.verdict.advice}"

    def to_dict(self) -> dict[str, Any]:
        """Return the changes as a dict of JSON types."""
        return {
            "speedup": self.speedup,
            "changes": [asdict(change) | {"ratio": change.ratio} for change in self.changes],
            "summary": self.summary,
            "verdict": self.verdict,
        }

    def _lines(self) -> list[str]:
        return [self.summary, self.verdict]

    def _tables(self) -> list[list[list[str]]]:
        rows = [["", "before", "after", "change"]]
        for change in self.changes:
            show, ratio = _SHOW[change.unit], change.ratio
            figures = ("" if one is None else show(one) for one in (change.before, change.after))
            rows.append([change.name, *figures, "" if ratio is None else f"x {ratio:.2f}"])
        return [rows]


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
    names = dict.fromkeys(stage.name for stage in (*a.stages, *b.stages))
    rows = [{stage.name: (stage, _size(s, unit)) for stage in s.stages} for s in (a, b)]

    def change(
        name: str, label: str, unit: str, figure: Callable[[StageStats, int], float]
    ) -> Change:
        one, other = (None if name not in row else figure(*row[name]) for row in rows)
        return Change(f"{name}: {label}", one, other, unit)

    for name in names:
        load = change(name, "load", "%", lambda stage, _: stage.load)
        if max(load.before or 0.0, load.after or 0.0) < LITTLE:
            continue  # a stage without load can't explain a difference
        label = "busy an item" if unit == "item" else "busy a sample"
        busy = change(name, label, "s", lambda stage, size: stage.busy / max(1, stage.items * size))
        stall = change(name, "stall", "s", lambda stage, _: stage.stall)
        changes += [busy, load, *([stall] if stall.before or stall.after else [])]
    for name in names:
        for fault in vars(Faults()):
            of_fault = attrgetter(f"faults.{fault}")
            count = change(name, fault, "", lambda stage, _: of_fault(stage))  # noqa: B023
            changes += [count] if count.before or count.after else []
    return Comparison(a, b, tuple(changes))


def _unit_of(a: Stats, b: Stats) -> str:
    return "item" if a.batch_size is None or b.batch_size is None else "sample"


def _size(stats: Stats, unit: str) -> int:
    """Return the units of an item."""
    return 1 if unit == "item" else stats.batch_size or 1


def _rate(stats: Stats, unit: str) -> float:
    return stats.items * _size(stats, unit) / stats.seconds if stats.seconds > 0 else 0.0
