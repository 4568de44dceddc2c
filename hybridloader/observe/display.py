"""Statistics and comparisons as text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from hybridloader._support.text import table

if TYPE_CHECKING:
    from hybridloader.observe.comparing import Comparison
    from hybridloader.observe.stats import Stats

_HEADING = (
    *("stage", "where", "items", "busy", "starved", "blocked", "other", "load"),
    *("cpu", "queued", "stall"),
)

_FAULTS = ("skipped", "replaced", "retried", "restarted")


def rows_of(stats: Stats) -> list[list[str]]:
    """Return the cells of the table, a heading first."""
    faults = [any(counts) for counts in zip(*(s.faults.counts for s in stats.stages), strict=True)]
    extra = [name for name, any_ in zip(_FAULTS, faults, strict=True) if any_]
    bytes_known = any(stage.bytes for stage in stats.stages)
    rows = [[*_HEADING, *(["bytes"] if bytes_known else []), *extra]]
    for stage in stats.stages:
        workers = f" x {stage.num_workers}" if stage.num_workers > 1 else ""
        spent = (stage.busy, stage.starved, stage.blocked, stage.other)
        mark = " <" if stage.name == stats.verdict.stage else ""
        row = [stage.name, f"{stage.backend}{workers}", f"{stage.items:,}"]
        row += [f"{seconds:.2f} s" for seconds in spent]
        row += [f"{stage.load:.0%}{mark}", "" if stage.cpu is None else f"{stage.cpu:.2f} s"]
        row += [
            f"{stage.queued:,}",
            f"{stage.stall:.2f} s" if stage is not stats.stages[-1] else "",
        ]
        if bytes_known:
            row.append("" if stage.bytes is None else size(stage.bytes))
        counts = zip(_FAULTS, stage.faults.counts, strict=True)
        row += [f"{count:,}" for name, count in counts if name in extra]
        rows.append(row)
    return rows


def _summary(stats: Stats) -> list[str]:
    stall = stats.stall
    waited = (
        f"{stats.items:,} items in {stats.seconds:.1f} s. Your loop waited {stall.seconds:.2f} s "
        f"({stall.share:.0%}; a batch {time(stall.p50)} at the median, {time(stall.p99)} at 99 %), and "
        f"{stall.warmup:.2f} s before the prefetch was full."
    )
    return [waited, str(stats.verdict)]


def text(stats: Stats) -> str:
    """Return the table, the stall and the verdict."""
    return "\n".join([*table(rows_of(stats)), *_summary(stats)])


def html(stats: Stats) -> str:
    """Return the same as HTML."""
    return _table(rows_of(stats)) + "".join(f"<p>{escape(line)}</p>" for line in _summary(stats))


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """Return the cells of a comparison, a heading first."""
    rows = [["", "before", "after", "change"]]
    for change in comparison.changes:
        show = _UNITS[change.unit]
        ratio = change.ratio
        rows.append(
            [
                change.name,
                "" if change.before is None else show(change.before),
                "" if change.after is None else show(change.after),
                "" if ratio is None else f"x {ratio:.2f}",
            ]
        )
    return rows


def comparison_html(comparison: Comparison) -> str:
    """Return a comparison as HTML."""
    lines = [comparison.summary, comparison.verdict]
    return _table(comparison_rows(comparison)) + "".join(f"<p>{escape(line)}</p>" for line in lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def time(seconds: float) -> str:
    """Return a time with a unit that fits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(count: float) -> str:
    """Return a number of bytes with a unit that fits."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


_UNITS = {
    "s": time,
    "B": size,
    "%": lambda share: f"{share:.0%}",
    "": lambda count: f"{count:,.0f}",
    "/s": lambda rate: f"{rate:,.1f} /s",
}
"""Functions that show a figure, by its unit."""
