"""``python -m benchmarks.page``: write the kept results into the pages that quote them.

It fills the blocks from ``<!-- benchmarks:begin NAME -->`` to ``<!-- benchmarks:end NAME -->``, and the
figures ``<!-- figure CASE; LOADER -->...<!-- end -->``. A row that was measured while the machine was
not quiet is left out. With ``--check`` it writes nothing, and fails if a page differs from the results,
or a result is of an old commit.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, Case
from benchmarks.loaders import is_rival, project
from benchmarks.machine import ROOT, commits_since
from benchmarks.runner import AGAIN, BEFORE, NOISE, Result, spread

RESULTS = ROOT / "benchmarks" / "results.json"
HEADLINES = ("small", "large", "start16", "jpeg", "hybrid")
OLDEST = 20
"""Library commits after a result with which a page may still quote it."""

LEVEL = 0.05
"""Difference that counts as level, as does one that is within the noise."""

NAMES = {"torchdata": "torchdata.nodes"}
Row = dict[str, Any]
Rows = dict[str, Row]


class BadPage(Exception):
    """A page quotes a result that is not there."""


# -- results -----------------------------------------------------------------------------------------


def record(case: Case, result: Result, rounds: int, about: dict[str, Any]) -> Row:
    """Return the results of a case as they are kept."""
    return {
        "commit": about["commit"],
        "date": about["date"],
        "machine": sentence(about),
        "rounds": rounds,
        "unit": case.unit,
        "quiet": result.quiet,
        "noise": None if result.noise is None else round(result.noise, 4),
        "failures": result.failures,
        "loaders": {
            name: [float(f"{value:.4g}") for value in values]
            for name, values in result.values.items()
        },
    }


def sentence(about: dict[str, Any]) -> str:
    """Return a line about the machine of a run."""
    where = "{cpu}, {cores} cores, {memory_gb} GB, {os}, Python {python}; {versions}"
    return where.format(**about)


def keep(file: Path, name: str, row: Row) -> None:
    """Write the results of a case into the file, a line for each loader; others stay."""
    rows = (json.loads(file.read_text()) if file.exists() else {}) | {name: row}
    rows = {one: rows[one] for one in CASES if one in rows}
    text = json.dumps(rows, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    file.write_text(text + "\n")


def shown(row: Row) -> bool:
    """Return True if the machine was quiet, and the loader measured twice agreed with itself."""
    return bool(row["quiet"]) and (row["noise"] or 0.0) <= NOISE


def stale(rows: Rows, since: Callable[[str], int | None] = commits_since) -> list[str]:
    """Return a line for each result that is shown and is of a commit more than `OLDEST` commits old."""
    found = []
    for name, row in rows.items():
        try:
            age = since(row["commit"]) if shown(row) else None
        except ValueError as error:
            found.append(f"{name}: {error}")
            continue
        if age is not None and age > OLDEST:
            found.append(f"{name}: commit {row['commit']} is {age} library commits old")
    return found


# -- words -------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return a number with three significant digits."""
    text = f"{float(f'{value:.3g}'):,.10f}".rstrip("0").rstrip(".")
    return text if abs(value) < 100 else f"{value:,.0f}"


def medians(row: Row, which: Callable[[str], bool]) -> dict[str, float]:
    """Return the medians of the loaders that `which` is true of; without those measured again."""
    return {
        name: spread(values)[0]
        for name, values in row["loaders"].items()
        if which(name) and not name.endswith((AGAIN, BEFORE))
    }


def is_ours(loader: str) -> bool:
    """Return True if `loader` is hybridloader's."""
    return project(loader) != "torch" and not is_rival(loader)


def against(other: float | None, ours: float, row: Row, reason: str = "") -> str:
    """Return how ours compares with another loader, in words."""
    if other is None:
        return ""
    better, worse = ("less", "more") if row["unit"] == "MB" else ("faster", "slower")
    factor = other / ours
    within = 1 + max(LEVEL, row["noise"] or 0.0)
    if 1 / within <= factor <= within:
        return f"level: {reason}" if reason else "level"
    if factor > 1:
        return f"**{number(factor)} times {better}**"
    return f"{number(1 / factor)} times {worse}"


def cells(name: str, row: Row) -> list[str]:
    """Return the cells of a row of a table: torch, best rival, ours, and two comparisons."""
    torch = medians(row, lambda loader: loader == "torch").get("torch")
    rivals = medians(row, is_rival)
    ours = medians(row, is_ours)
    best, rival = min(ours, key=ours.__getitem__), min(rivals, key=rivals.__getitem__, default="")
    unit, reason = row["unit"], CASES[name].level
    first = against(torch, ours[best], row, reason)
    second = against(rivals.get(rival), ours[best], row, "" if "level" in first else reason)
    of_rival = (
        f"{number(rivals[rival])} {unit} ({NAMES.get(project(rival), project(rival))})"
        if rival
        else ""
    )
    return [
        CASES[name].title,
        "" if torch is None else f"{number(torch)} {unit}",
        of_rival,
        f"{number(ours[best])} {unit} (`{best.partition(',')[0]}`)",
        first,
        second,
    ]


# -- blocks ------------------------------------------------------------------------------------------


def table(heading: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [heading, ["---"] * len(heading), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_HEADING = ["", "torch", "best rival", "hybridloader", "than torch", "than the best rival"]


def _summary(rows: Rows, names: Sequence[str]) -> str:
    return table(_HEADING, [cells(name, rows[name]) for name in names if name in rows])


def _figures(rows: Rows) -> str:
    body = []
    for name, row in rows.items():
        for loader, values in row["loaders"].items():
            if not loader.endswith(BEFORE):
                middle, least, most = map(number, spread(values))
                body.append([f"`{name}`", loader, f"{middle} {row['unit']}", f"{least} to {most}"])
    return table(["case", "loader", "median", "least to greatest"], body)


def _machine(rows: Rows) -> str:
    groups: dict[str, list[str]] = {}
    for name, row in rows.items():
        groups.setdefault(f"{row['machine']}; commit {row['commit']}, {row['date']}", []).append(
            name
        )
    if len(groups) == 1:
        return f"{next(iter(groups))}."
    return " ".join(
        f"{', '.join(f'`{name}`' for name in names)}: {about}." for about, names in groups.items()
    )


BLOCKS: dict[str, Callable[[Rows], str]] = {
    "headlines": lambda rows: _summary(rows, HEADLINES),
    "rivals": lambda rows: _summary(rows, (*HEADLINES, "slow", "disk", "store", "tables")),
    "summary": lambda rows: _summary(rows, list(CASES)),
    "figures": _figures,
    "machine": _machine,
}
_BLOCK = re.compile(r"<!-- benchmarks:begin (.*?) -->\n.*?<!-- benchmarks:end \1 -->", re.DOTALL)
_FIGURE = re.compile(r"(<!-- figure\s+([^;>]*?);\s+([^>]*?)\s+-->).*?<!-- end -->", re.DOTALL)


def rewritten(text: str, rows: Rows) -> str:
    """Return a page with its blocks and figures. Raises `BadPage` if the results lack one of these."""
    rows = {name: row for name, row in rows.items() if shown(row)}

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise BadPage(f"no block is called {name!r}")
        made = BLOCKS[name](rows)
        return f"<!-- benchmarks:begin {name} -->\n{made}\n<!-- benchmarks:end {name} -->"

    def figure(match: re.Match[str]) -> str:
        case, loader = (" ".join(part.split()) for part in match.group(2, 3))
        if loader not in rows.get(case, {"loaders": {}})["loaders"]:
            raise BadPage(f"figure of {case}, {loader}: not measured, or not on a quiet machine")
        middle = spread(rows[case]["loaders"][loader])[0]
        return f"{match[1]}{number(middle)} {rows[case]['unit']}<!-- end -->"

    return _FIGURE.sub(figure, _BLOCK.sub(block, text))


def lines(row: Row) -> list[str]:
    """Return the results of a case for a terminal."""
    width = max(map(len, row["loaders"]), default=0)
    found = []
    for name, values in row["loaders"].items():
        middle, least, most = map(number, spread(values))
        found.append(f"{name:{width}}  {middle} {row['unit']}  ({least} to {most})")
    if not shown(row):
        found.append(f"the machine was not quiet (noise {row['noise']}): pages leave this row out")
    return found


def pages() -> list[Path]:
    """Return the pages that may quote results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def write(results: Path = RESULTS, *, check: bool = False) -> list[str]:
    """Write the results into all pages, or return what is wrong with these."""
    rows: Rows = json.loads(results.read_text())
    wrong = stale(rows)
    for file in pages():
        text = file.read_text()
        try:
            new = rewritten(text, rows)
        except BadPage as error:
            wrong.append(f"{file.relative_to(ROOT)}: {error}")
            continue
        if new != text and check:
            wrong.append(f"{file.relative_to(ROOT)}: differs from {results.name}")
        elif new != text:
            file.write_text(new)
    for line in wrong:
        print(line, file=sys.stderr)
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    made.add_argument("--check", action="store_true", help="write nothing, and fail if it differs")
    return int(bool(write(check=made.parse_args(arguments).check)))


if __name__ == "__main__":
    sys.exit(main())
