"""How a run is held against what the way to the device was to reach: the judge of P11's details."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.results import Results

Found = tuple[str, bool | None]
"""What was reached, in words, and whether that is enough; None if the run can't tell."""


def detail(
    results: Results, key: str, bound: float, loaders: Iterable[str], *, least: bool
) -> Found:
    """What the fastest of `loaders` reaches of a detail, in the worst of the variants.

    Parameters
    ----------
    least
        Whether the bound is the least that will do; else it is the most.
    """
    found = []
    for variant in results.variants("P11"):
        rows = [m for m in results.of("P11", variant) if m.loader in tuple(loaders)]
        rows = [m for m in rows if m.details.get(key)]
        if rows:
            best = min(rows, key=lambda m: m.median)
            found.append((statistics.median(best.details[key]), best))
    if not found:
        return "not run: needs a CUDA device", None
    worst, row = (min if least else max)(found, key=lambda pair: pair[0])
    met = worst >= bound if least else worst <= bound
    return f"{worst:.3g} ({row.loader}, {row.variant})", met
