"""Short forms of values for errors and tables, and tables as lines of text."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence
from typing import Any

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = 8
_short.maxother = _short.maxstring = 120

brief = _short.repr  # function: the repr of a value, cut where it is long

_cell = reprlib.Repr()
_cell.maxother = _cell.maxstring = 60

cell = _cell.repr  # shorter form, for the cell of a table, or one of several values


def short(value: Any) -> str:
    """Return the repr of `value`, cut where it is long, and its type."""
    return f"{brief(value)} (a {type(value).__qualname__})"


def beginning(text: str, longest: int = 80) -> str:
    """Return a text, cut where it is longer than that many characters."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def table(
    rows: Sequence[Sequence[str]], left: Collection[int] = (0, 1), *, underlined: bool = True
) -> list[str]:
    """Return rows as lines, a heading first; the columns in `left` are to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if underlined:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return lines
