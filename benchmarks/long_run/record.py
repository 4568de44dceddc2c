"""Record of a long run: its parts, kept in a file, and the verdict on each."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.display import number

BACKENDS = ("inline", "threads", "fork", "spawn", "shared-memory")

MEMORY_MB = 8.0
"""Growth in MB that passes: the allocator's arenas come and go, as do a few slots."""

P50, P99 = 1.25, 1.5
"""Ratios of latencies at the end to those at the beginning that pass.

One that has grown is greater both in us and beside the reference loop: a busy machine makes it greater
in us, one that was busy at the beginning makes it greater beside the reference.
"""

COUNTS = ("descriptors", "threads", "processes", "segments")


class OtherRun(Exception):
    """The file holds a run with other settings."""


@dataclass
class Part:
    """One backend's part.

    Attributes
    ----------
    looks
        Column -> values, one for each cycle: memory in MB, latencies in us, `at` in seconds.
    tally
        What was done, by name.
    failed
        Reason why it ended early; empty if it did not.
    """

    backend: str
    looks: dict[str, list[float]] = field(default_factory=dict)
    tally: dict[str, int] = field(default_factory=dict)
    failed: str = ""


@dataclass
class Change:
    """Beginning and end of one quantity.

    Attributes
    ----------
    relative
        End over beginning, both as times of the reference loop; None if that has no meaning.
    """

    what: str
    beginning: float
    end: float
    passed: bool
    relative: float | None = None

    def __str__(self) -> str:
        text = f"{number(self.beginning)} -> {number(self.end)}"
        return text if self.relative is None else f"{text} ({self.relative:.2f}x)"


@dataclass
class Run:
    """A run, as far as it has come."""

    about: dict[str, Any]
    minutes: float
    seed: int
    parts: list[Part] = field(default_factory=list)

    def missing(self, backends: tuple[str, ...]) -> list[str]:
        """Backends whose part is not done, or failed."""
        done = {part.backend for part in self.parts if not part.failed}
        return [backend for backend in backends if backend not in done]

    def add(self, part: Part) -> None:
        """Take in a part, in place of an earlier one of that backend."""
        others = [other for other in self.parts if other.backend != part.backend]
        self.parts = sorted([*others, part], key=lambda part: BACKENDS.index(part.backend))

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=None) + "\n")

    @classmethod
    def read(cls, file: Path) -> Run:
        content = json.loads(file.read_text())
        parts = [Part(**part) for part in content.pop("parts")]
        return cls(**content, parts=parts)

    @classmethod
    def resume(cls, file: Path, about: dict[str, Any], minutes: float, seed: int) -> Run:
        """The run in `file`, to go on with, or a new one.

        Raises
        ------
        OtherRun
            It has other minutes, or another seed.
        """
        if not file.exists():
            return cls(about, minutes, seed)
        run = cls.read(file)
        if (run.minutes, run.seed) != (minutes, seed):
            raise OtherRun(
                f"{file} has a run of {run.minutes:g} minutes a backend with seed {run.seed}; "
                "give the same --minutes and --seed to go on with it, or another --json"
            )
        return run


def tenth(values: list[float], which: int) -> list[float]:
    """The values of one tenth of the run, the first being 0; of a short run at least one."""
    count = len(values)
    start = which * count // 10
    return values[start : max(start + 1, (which + 1) * count // 10)]


def changes(part: Part) -> list[Change]:
    """Medians of the second tenth beside those of the last, and which of them pass."""
    looks = part.looks
    rows = []
    for name in ("memory_mb", *COUNTS):
        begun, end = _ends(looks[name])
        rows.append(
            Change(name, begun, end, end - begun <= (MEMORY_MB if name == "memory_mb" else 0))
        )
    for name, bound in (("p50_us", P50), ("p99_us", P99)):
        begun, end = _ends(looks[name])
        first, last = _ends(beside_reference(part, name))
        passed = min(end / begun, last / first) <= bound
        rows.append(Change(name.removesuffix("_us"), begun, end, passed, last / first))
    return rows


def beside_reference(part: Part, name: str) -> list[float]:
    """Latencies as times those of the reference loop, which was timed beside them."""
    pairs = zip(part.looks[name], part.looks[f"reference_{name}"], strict=True)
    return [own / other for own, other in pairs]


def _ends(values: list[float]) -> tuple[float, float]:
    return statistics.median(tenth(values, 1)), statistics.median(tenth(values, 9))


def verdict(part: Part) -> str:
    """One word, or the names of what was more at the end."""
    if part.failed:
        return f"failed: {part.failed}"
    grown = [change.what for change in changes(part) if not change.passed]
    return f"more at the end: {', '.join(grown)}" if grown else "as at the beginning"


def table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the table of a run: a row for each part."""
    heading = ["backend", "cycles", "batches", "faults", "memory, MB", *COUNTS]
    heading += ["p50 of next(), us", "p99 of next(), us", "verdict"]
    rows = []
    for part in run.parts:
        done = [f"{part.tally.get(name, 0):,}" for name in ("cycles", "batches", "faults")]
        cells = [str(change) for change in changes(part)] if part.looks else [""] * 7
        rows.append([part.backend, *done, *cells, verdict(part)])
    return heading, rows
