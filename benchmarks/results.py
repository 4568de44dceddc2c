"""Measurements, one per loader and variant, and the file they are kept in.

Of every value less is better: seconds, bytes, CPU seconds. Medians, spreads and ratios are
worked out from the values of the rounds, never stored by hand.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.names import LIMITS, OURS


@dataclass
class Measurement:
    """One loader in one variant of one case.

    Attributes
    ----------
    values
        One per round, in `unit`; less is better. Empty if it was skipped.
    cpu
        CPU seconds of the whole process tree, one per round, for the work that `values` is about.
    memory_mb
        Peak of the tree's PSS in MB in a repetition that was not timed.
    skipped
        Reason why there are no values.
    failed
        True if that is because it raised, died or hung.
    passed
        Outcome of the cases that are passed or failed.
    versus_torch, versus_limit, versus_together
        Torch's value over this one; the part that is reached of the limit, and of what the same
        number of processes reach when they do nothing but the work at the same time.
    """

    case: str
    variant: str
    loader: str
    unit: str
    values: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory_mb: float | None = None
    skipped: str = ""
    failed: bool = False
    passed: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)
    versus_torch: float | None = None
    versus_limit: float | None = None
    versus_together: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half of the distance between the least and the greatest value."""
        return (max(self.values) - min(self.values)) / 2


@dataclass
class Results:
    """One run: about the machine, all measurements, and notes on what could not be done."""

    about: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cases(self) -> list[str]:
        """The cases in the order in which they were run."""
        return list(dict.fromkeys(m.case for m in self.measurements))

    def variants(self, case: str) -> list[str]:
        return list(dict.fromkeys(m.variant for m in self.measurements if m.case == case))

    def of(self, case: str, variant: str | None = None) -> list[Measurement]:
        """The measurements of a case, or of one variant of it, that have values."""
        return [
            m
            for m in self.measurements
            if m.case == case and variant in (None, m.variant) and m.values
        ]

    def find(self, case: str, variant: str, loader: str) -> Measurement | None:
        return next((m for m in self.of(case, variant) if m.loader == loader), None)

    def failures(self) -> list[str]:
        """Loaders of ours that raised, died or hung. Work that one can't do is no failure."""
        return [
            f"{m.case} {m.variant}: {m.loader}: {m.skipped}"
            for m in self.measurements
            if m.failed and m.loader in (*OURS, *LIMITS)
        ]

    def write(self, file: Path) -> None:
        relate(self.measurements)
        rows = []
        for m in self.measurements:
            row = asdict(m)
            if m.values:
                row |= {"median": m.median, "spread": m.spread}
            rows.append(row)
        content = {"about": self.about, "notes": self.notes, "measurements": rows}
        file.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> Results:
        content = json.loads(file.read_text())
        names = {f.name for f in fields(Measurement)}
        rows = [
            Measurement(**{key: value for key, value in row.items() if key in names})
            for row in content["measurements"]
        ]
        return cls(content["about"], rows, content["notes"])


def relate(measurements: Iterable[Measurement]) -> None:
    """Fill in the ratios to torch's loader and to the limit."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.case, m.variant), []).append(m)
    for group in groups.values():
        by_name = {m.loader: m for m in group if m.values}
        for m in group:
            m.versus_torch = ratio(by_name.get("torch"), m)
            m.versus_limit = ratio(by_name.get("limit"), m)
            m.versus_together = ratio(by_name.get("together"), m)


def ratio(base: Measurement | None, other: Measurement) -> float | None:
    """Value of `base` over that of `other`: the median over the rounds.

    A shared machine is slower in one minute than in the next. One round measures both within seconds,
    so their quotient says more than that of two medians.
    """
    if base is None or not base.values or not other.values:
        return None
    if len(base.values) != len(other.values):
        return base.median / other.median if other.median else None
    pairs = [b / o for b, o in zip(base.values, other.values, strict=True) if o]
    return statistics.median(pairs) if pairs else None
