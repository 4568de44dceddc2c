"""Units for people, and tables as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html(rows: Sequence[Sequence[str]], lines: Sequence[str]) -> str:
    """Return a table, a heading first, and lines of text below it."""
    found = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        cells = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        found.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(found)}</table>" + "".join(f"<p>{escape(line)}</p>" for line in lines)


def time(seconds: float) -> str:
    """Return a time with a unit that fits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """Return a number of bytes with a unit that fits."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
