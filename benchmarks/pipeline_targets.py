"""How a run is held against what pipelines were to reach: the judges of P4, stage and books."""

from __future__ import annotations

import statistics

from benchmarks.cases.pipelines import ALONE
from benchmarks.results import PIPELINE, Measurement, Results, is_rival, ratio

Found = tuple[str, bool | None]
"""What was reached, in words, and whether that is enough; None if the run can't tell."""

_NOTHING: Found = ("not measured", None)


def of_the_slowest_stage(results: Results, bound: float) -> Found:
    """P4: the part that the whole reaches of what its slowest stage reaches when it runs alone."""
    for variant in results.variants("P4"):
        whole = results.find("P4", variant, PIPELINE)
        stages = [m for m in results.of("P4", variant) if m.loader in ALONE]
        if whole is not None and stages:
            slowest = max(stages, key=lambda m: m.median)
            part = ratio(slowest, whole) or 0.0
            return f"{part:.2f} of {slowest.loader}", part >= bound
    return _NOTHING


def beside_cores(results: Results, bound: float) -> Found:
    """P4: how many times faster than the best of all others that have as many processes as cores."""
    variants = results.variants("P4")
    ours = results.find("P4", variants[0], PIPELINE)
    others = _others(results, variants[0])
    if ours is None or not others:
        return _NOTHING
    best = min(others, key=lambda m: m.median)
    factor = ratio(best, ours) or 0.0
    return f"{factor:.2f}x {best.loader}", factor >= bound


def keeps_up(results: Results, bound: float) -> Found:
    """P4: how many times faster than the best of all others with any number of processes."""
    found = _best_of_any(results)
    if found is None:
        return _NOTHING
    best, ours = found
    factor = ratio(best, ours) or 0.0
    return f"{factor:.2f}x {best.loader}, {best.variant}", factor >= bound


def memory_of_best(results: Results, bound: float) -> Found:
    """P4: our memory as a part of that best one's."""
    found = _best_of_any(results)
    if found is None or not found[0].memory_mb or not found[1].memory_mb:
        return _NOTHING
    best, ours = found
    assert ours.memory_mb is not None
    assert best.memory_mb is not None
    text = f"{ours.memory_mb:.0f} of {best.memory_mb:.0f} MB ({best.loader}, {best.variant})"
    return text, ours.memory_mb <= bound * best.memory_mb


def start_of_best(results: Results, bound: float) -> Found:
    """P4: our time until the first batch as a part of that best one's."""
    found = _best_of_any(results)
    if found is None:
        return _NOTHING
    best, ours = found
    times = [statistics.median(m.details.get("first_batch") or [0.0]) for m in (ours, best)]
    if not all(times):
        return _NOTHING
    text = f"{times[0]:.2f} of {times[1]:.2f} s ({best.loader}, {best.variant})"
    return text, times[0] <= bound * times[1]


def _others(results: Results, variant: str) -> list[Measurement]:
    return [m for m in results.of("P4", variant) if is_rival(m.loader) or m.loader == "torch"]


def _best_of_any(results: Results) -> tuple[Measurement, Measurement] | None:
    """The best of all others with any number of workers, and ours beside it, in the same rounds."""
    pairs = [
        (other, ours)
        for variant in results.variants("P4")
        if (ours := results.find("P4", variant, PIPELINE)) is not None
        for other in _others(results, variant)
    ]
    # Held against ours of the same rounds, as the hours of a shared machine differ.
    return min(pairs, key=lambda pair: ratio(*pair) or 0.0) if pairs else None


def adds_at_most(results: Results, bound: float, loaders: tuple[str, ...]) -> Found:
    """stage: microseconds that one empty stage adds to an item."""
    rows = [m for m in results.of("stage", "an empty stage") if m.loader in loaders]
    if not rows:
        return _NOTHING
    worst = max(rows, key=lambda m: m.median)
    return f"{worst.median:.2g} us ({worst.loader})", worst.median <= bound


def books_take(results: Results, bound: float) -> Found:
    """books: per cent of the time."""
    rows = results.of("books")
    if not rows:
        return _NOTHING
    worst = max(rows, key=lambda m: m.median)
    return f"{worst.median:.2f} % ({worst.loader})", worst.median <= bound
