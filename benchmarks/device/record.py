"""Results of a run on a device: a line of JSON for each, a table, and a passage of a page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[1] / "device.jsonl"
"""The run that docs/devices.md quotes; there is no such file before the first one."""

_BEGIN, _END = "<!-- device:begin -->\n", "<!-- device:end -->"


@dataclass(frozen=True)
class Line:
    """Figure, check, or both.

    Attributes
    ----------
    passed
        True or False for a check; None for a figure alone, and for a check that was not possible.
    detail
        One line: the reason of a failure, or the condition of the check.
    """

    section: str
    name: str
    value: Any = None
    unit: str = ""
    passed: bool | None = None
    detail: str = ""

    @property
    def shown(self) -> str:
        value = f"{self.value:.3g}" if isinstance(self.value, float) else self.value
        return "" if value is None else f"{value} {self.unit}".rstrip()


class Record:
    """Results of one section; each is in the file before the next is measured.

    With `small` sizes, no figure is held against its bound.
    """

    def __init__(self, file: Path, section: str, *, small: bool = False) -> None:
        self._file, self._section, self._small = file, section, small

    def __call__(
        self,
        name: str,
        value: Any = None,
        unit: str = "",
        passed: bool | None = None,
        detail: object = "",
    ) -> None:
        first = (str(detail).strip().splitlines() or [""])[0][:300]
        if self._small and value is not None:
            passed = None
        line = Line(self._section, name, value, unit, passed, first)
        with self._file.open(
            "a"
        ) as file:  # one write: sections that run beside each other share it
            file.write(json.dumps(asdict(line)) + "\n")

    @contextlib.contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Record an error in the block as a failed check, and leave the block."""
        try:
            yield
        except Exception as error:
            self(name, passed=False, detail=f"{type(error).__name__}: {error}")


def read(file: Path) -> list[Line]:
    """Return the lines of a file; none if it is not there."""
    if not file.exists():
        return []
    return [Line(**json.loads(line)) for line in file.read_text().splitlines()]


def table(lines: list[Line]) -> str:
    """Return a line of text for each result, and then one for each failure."""
    verdict = {True: "ok", False: "FAILED", None: ""}
    rows = [(line.section, line.name, line.shown, verdict[line.passed]) for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    text = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    text += [
        f"FAILED {one.section}: {one.name}: {one.detail or one.shown}" for one in failed(lines)
    ]
    return "\n".join(line.rstrip() for line in [*text, counts(lines)])


def failed(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.passed is False]


def counts(lines: list[Line]) -> str:
    """Return the numbers of checks that passed and failed, and of tests that were skipped."""
    passed = sum(line.passed is True for line in lines)
    skipped = sum(line.passed is None and line.value is None for line in lines)
    return f"{passed} checks passed, {len(failed(lines))} failed, {skipped} skipped"


def passage(lines: list[Line]) -> str:
    """Return the Markdown that reports the run."""
    if not lines:
        return (
            "**Nothing has been run on a real device yet**, neither CUDA nor XPU nor MPS.\n"
            "`python -m benchmarks.device` runs the tests and the figures on yours, in four minutes.\n"
        )
    facts = [line for line in lines if line.section == "machine"]
    figures = [one for one in lines if one.section != "machine" and one.unit]
    rows = ["| figure | value |", "| --- | --- |"]
    rows += [f"| {one.section}: {one.name} | {one.shown} |" for one in figures]
    text = [", ".join(f"{one.name} {one.shown}" for one in facts) + f": {counts(lines)}.", ""]
    text += [f"- Failed: {one.name} ({one.detail or one.shown})." for one in failed(lines)]
    return "\n".join([*text, *([""] if failed(lines) else []), *rows]) + "\n"


def written(page: str, lines: list[Line]) -> str:
    """Return `page` with the passage between its two marks written again."""
    before, _, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"the page has no {_BEGIN.strip()} with {_END}")
    return f"{before}{_BEGIN}{passage(lines)}{_END}{after}"
