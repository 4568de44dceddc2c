"""Measurements, one per loader and variant, and the file they are kept in.

Of every value less is better: seconds, bytes, CPU seconds. Medians, spreads, ratios and the noise of
the machine are worked out from the values of the rounds, never stored by hand.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.names import LIMITS, OURS

Row = TypeVar("Row")


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


NOISE = 0.1
"""Noise above which figures are not quoted."""


@dataclass
class Take:
    """All rounds of one variant, and the noise of the machine meanwhile.

    Attributes
    ----------
    again
        Loader that took part twice, in two runners; "" where nothing was timed.
    pairs
        Its two values in each round.
    quiet
        True if the machine was quiet before each round.
    takes
        Number of times that the variant was measured; the best of them is kept.
    seconds
        Time that it took.
    """

    case: str
    variant: str
    again: str = ""
    pairs: list[list[float]] = field(default_factory=list)
    quiet: bool = True
    takes: int = 1
    seconds: float = 0.0

    @property
    def noise(self) -> float | None:
        """Difference of the loader from itself, as a ratio of two loaders is worked out; 0.1 is 10 %."""
        quotients = [first / second for first, second in self.pairs if first > 0 and second > 0]
        if not quotients:
            return None
        middle = statistics.median(quotients)
        return max(middle, 1 / middle) - 1

    @property
    def quotable(self) -> bool:
        """True if the noise is small, or nothing was timed."""
        return not self.again or (self.noise is not None and self.noise <= NOISE)


@dataclass
class Results:
    """One run: about the machine, all measurements, and notes on what could not be done."""

    about: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    takes: list[Take] = field(default_factory=list)

    def take(self, case: str, variant: str) -> Take | None:
        return next((t for t in self.takes if (t.case, t.variant) == (case, variant)), None)

    def noise(self, case: str, variant: str | None = None) -> float | None:
        """Noise of a variant, or the greatest of a case; None if it was not measured."""
        found = [t.noise for t in self.takes if t.case == case and variant in (None, t.variant)]
        return max((noise for noise in found if noise is not None), default=None)

    def put(self, take: Take, rows: Sequence[Measurement]) -> None:
        """Take in the measurements of a variant, in place of those that were there."""
        of = (take.case, take.variant)
        _replace(self.takes, [take], lambda t: (t.case, t.variant) == of)
        _replace(self.measurements, rows, lambda m: (m.case, m.variant) == of)

    def forget(self, cases: Sequence[str]) -> None:
        """Remove all that was measured of these cases."""
        self.takes[:] = [t for t in self.takes if t.case not in cases]
        self.measurements[:] = [m for m in self.measurements if m.case not in cases]

    def sort(self, order: Sequence[str]) -> None:
        """Put the cases into that order."""
        places = {case: place for place, case in enumerate(order)}
        self.takes.sort(key=lambda t: places.get(t.case, len(places)))
        self.measurements.sort(key=lambda m: places.get(m.case, len(places)))

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
        takes = [asdict(t) | {"noise": t.noise} for t in self.takes]
        content = {"about": self.about, "notes": self.notes, "takes": takes, "measurements": rows}
        # A run that is ended while it writes leaves the file as it was.
        beside = file.with_name(file.name + ".part")
        beside.write_text(json.dumps(content, indent=1) + "\n")
        beside.replace(file)

    @classmethod
    def read(cls, file: Path) -> Results:
        content = json.loads(file.read_text())
        rows = [Measurement(**_known(Measurement, row)) for row in content["measurements"]]
        takes = [Take(**_known(Take, row)) for row in content.get("takes", ())]
        return cls(content["about"], rows, content["notes"], takes)


def _known(kind: type[Measurement] | type[Take], row: dict[str, Any]) -> dict[str, Any]:
    """Fields of `kind` in a row of the file, which also has what was worked out."""
    names = {f.name for f in fields(kind)}
    return {key: value for key, value in row.items() if key in names}


def _replace(rows: list[Row], new: Sequence[Row], old: Callable[[Row], bool]) -> None:
    """Put `new` where the first old row is, or at the end, and remove all old ones."""
    places = [place for place, row in enumerate(rows) if old(row)]
    place = places[0] if places else len(rows)
    rest = [row for row in rows[place:] if not old(row)]
    rows[place:] = [*new, *rest]


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
