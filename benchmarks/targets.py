"""Targets of the cases, and the functions that judge whether a run met them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.names import family, is_rival
from benchmarks.results import Measurement, Results, ratio

Found = tuple[str, bool | None]
"""Value that a run reached, in words, and whether it meets the target; None if the run can't tell."""

Judge = Callable[[Results, str], Found]
"""Function of a run and the name of the target's case."""

NOT_MEASURED: Found = ("not measured", None)


@dataclass(frozen=True)
class Target:
    """One sentence of the requirement, and the function that holds a run against it.

    Attributes
    ----------
    factor
        Factor to torch that the target asks for, for the marks in the figure.
    variant
        Beginning of the names of the variants that the factor is about.
    why
        Reason why it is missed, if it is: one sentence or more of Markdown.
    """

    case: str
    text: str
    judge: Judge
    factor: float | None = None
    variant: str = ""
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """One line of the table of targets; `met` is None if the run can't tell."""

    case: str
    target: str
    reached: str
    met: bool | None
    why: str = ""


def verdicts(results: Results, targets: Iterable[Target]) -> list[Verdict]:
    """One verdict for each target whose case was run."""
    ran = set(results.cases())
    return [
        Verdict(target.case, target.text, *target.judge(results, target.case), target.why)
        for target in targets
        if target.case in ran
    ]


def chosen(results: Results, case: str, variant: str, loaders: Iterable[str]) -> list[Measurement]:
    """Measurements of `loaders` in the variants whose names begin with `variant`."""
    return [
        m for m in results.of(case) if m.loader in tuple(loaders) and m.variant.startswith(variant)
    ]


def best_of_each(rows: Iterable[Measurement]) -> list[Measurement]:
    """The fastest measurement of each variant."""
    best: dict[str, Measurement] = {}
    for row in rows:
        if row.variant not in best or row.median < best[row.variant].median:
            best[row.variant] = row
    return list(best.values())


def short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def at_least(
    bound: float,
    loaders: tuple[str, ...],
    versus: str = "torch",
    *,
    each: bool = False,
    variant: str = "",
) -> Judge:
    """The best of `loaders`, or `each` of them, has at least that ratio in every variant.

    Parameters
    ----------
    versus
        "torch": torch's time over ours. "limit", "together": the part of the limit that is reached.
    """

    def judge(results: Results, case: str) -> Found:
        rows = chosen(results, case, variant, loaders)
        rows = rows if each else best_of_each(rows)
        pairs = [(getattr(row, f"versus_{versus}"), row) for row in rows]
        pairs = [pair for pair in pairs if pair[0] is not None]
        if not pairs:
            return NOT_MEASURED
        worst, row = min(pairs, key=lambda pair: pair[0])
        return f"{short(worst)}x ({row.loader}, {row.variant})", worst >= bound

    return judge


def faster_than_torch(
    case: str,
    text: str,
    factor: float,
    loaders: tuple[str, ...],
    *,
    each: bool = False,
    variant: str = "",
    why: str = "",
) -> Target:
    """Target: the best of `loaders`, or `each` of them, is `factor` times faster than torch's loader."""
    judge = at_least(factor, loaders, each=each, variant=variant)
    return Target(case, text, judge, factor, variant, why)


def ahead_of(bound: float, loaders: tuple[str, ...], rival: str = "", variant: str = "") -> Judge:
    """The best of `loaders` is more than `bound` times as fast as the best rival, or form of `rival`."""

    def judge(results: Results, case: str) -> Found:
        found = []
        for row in best_of_each(chosen(results, case, variant, loaders)):
            others = [
                m
                for m in results.of(case, row.variant)
                if is_rival(m.loader) and m.loader.startswith(rival)
            ]
            if others:
                best = min(others, key=lambda m: m.median)
                found.append((ratio(best, row) or 0.0, row, best))
        if not found:
            return "no rival measured", None
        worst, row, best = min(found, key=lambda item: item[0])
        text = f"{short(worst)}x {family(best.loader)} ({row.loader}, {row.variant})"
        return text, worst > bound

    return judge


def at_most(
    bound: float, loaders: tuple[str, ...], *, each: bool = False, variant: str = ""
) -> Judge:
    """The best of `loaders`, or `each` of them, takes no more than that, in the unit of the case."""

    def judge(results: Results, case: str) -> Found:
        rows = chosen(results, case, variant, loaders)
        rows = rows if each else best_of_each(rows)
        if not rows:
            return NOT_MEASURED
        worst = max(rows, key=lambda m: m.median)
        return f"{short(worst.median)} {worst.unit} ({worst.loader})", worst.median <= bound

    return judge


def flat(
    word: str, first: float, bound: float, loaders: tuple[str, ...], last: float = math.inf
) -> Judge:
    """From `first` (workers, samples) to `last`, no more than `bound` times the value at `first`.

    Parameters
    ----------
    word
        End of the names of the variants, which begin with the number.
    """

    def judge(results: Results, case: str) -> Found:
        found = []
        for loader in loaders:
            rows = {
                float(m.variant.split(" ")[0]): m
                for m in results.of(case)
                if m.loader == loader and m.variant.endswith(word)
            }
            base = rows.get(first)
            for size, row in rows.items():
                if base is not None and first < size <= last:
                    found.append((row.median / base.median, row))
        if not found:
            return NOT_MEASURED
        worst, row = max(found, key=lambda pair: pair[0])
        return f"{short(worst)}x ({row.loader}, {row.variant})", worst <= bound

    return judge


def all_pass(loaders: tuple[str, ...]) -> Judge:
    """Every one of `loaders` passed."""

    def judge(results: Results, case: str) -> Found:
        rows = [m for m in results.measurements if m.case == case and m.loader in loaders]
        if not rows or all(row.passed is None for row in rows):
            return (rows[0].skipped, None) if rows else NOT_MEASURED
        failed = [row.loader for row in rows if not row.passed]
        return ("failed: " + ", ".join(failed) if failed else "all pass"), not failed

    return judge
