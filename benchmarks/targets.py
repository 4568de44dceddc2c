"""What was to be reached, as data, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks import pipeline_targets as pipes
from benchmarks.cases import device as devices
from benchmarks.device_targets import detail
from benchmarks.results import (
    DATALOADERS,
    OURS,
    PIPELINE,
    Measurement,
    Results,
    family,
    is_rival,
    ratio,
)


@dataclass(frozen=True)
class Verdict:
    """One line of the short table.

    Attributes
    ----------
    met
        None if the run can't tell.
    """

    case: str
    target: str
    reached: str
    met: bool | None


Judge = Callable[[Results], tuple[str, bool | None]]


@dataclass(frozen=True)
class Target:
    """One sentence of the requirement, and how a run is held against it."""

    case: str
    text: str
    judge: Judge
    factor: float | None = None
    """How many times faster than torch that asks for, for the marks in the figure."""
    variant: str = ""
    """Which variants the factor is about: those whose names begin so."""


def verdicts(results: Results) -> list[Verdict]:
    """One for each target whose case was run."""
    ran = set(results.cases())
    return [
        Verdict(target.case, target.text, *target.judge(results))
        for target in TARGETS
        if target.case in ran
    ]


def _chosen(results: Results, case: str, variant: str, loaders: Iterable[str]) -> list[Measurement]:
    return [
        m for m in results.of(case) if m.loader in tuple(loaders) and m.variant.startswith(variant)
    ]


def _best(rows: list[Measurement]) -> list[Measurement]:
    """Of each variant the fastest."""
    best: dict[str, Measurement] = {}
    for row in rows:
        if row.variant not in best or row.median < best[row.variant].median:
            best[row.variant] = row
    return list(best.values())


def _rest(rows: list[tuple[float, Measurement]], bound: float) -> tuple[str, bool | None]:
    """The worst of several ratios that should all be at least `bound`."""
    if not rows:
        return "not measured", None
    worst, row = min(rows, key=lambda pair: pair[0])
    return f"{_number(worst)}x ({row.loader}, {row.variant})", worst >= bound


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def faster_than_torch(
    case: str, bound: float, loaders: tuple[str, ...], *, each: bool = False, variant: str = ""
) -> Judge:
    """Ours, the best of these or `each` of them, is `bound` times faster than torch's."""

    def judge(results: Results) -> tuple[str, bool | None]:
        rows = _chosen(results, case, variant, loaders)
        rows = rows if each else _best(rows)
        return _rest([(r.versus_torch, r) for r in rows if r.versus_torch is not None], bound)

    return judge


def of_the_limit(case: str, bound: float, loaders: tuple[str, ...]) -> Judge:
    """The best of these reaches that part of the limit."""

    def judge(results: Results) -> tuple[str, bool | None]:
        rows = _best(_chosen(results, case, "", loaders))
        return _rest([(r.versus_limit, r) for r in rows if r.versus_limit is not None], bound)

    return judge


def of_all_together(case: str, bound: float, loaders: tuple[str, ...]) -> Judge:
    """As `of_the_limit`, held against as many processes as workers that only do the work."""

    def judge(results: Results) -> tuple[str, bool | None]:
        rows = _best(_chosen(results, case, "", loaders))
        found = [(r.versus_together, r) for r in rows if r.versus_together is not None]
        return _rest(found, bound)

    return judge


def ahead_of(
    case: str, bound: float, loaders: tuple[str, ...], rival: str = "", variant: str = ""
) -> Judge:
    """The best of these is `bound` times faster than the best rival (or the best way of one)."""

    def judge(results: Results) -> tuple[str, bool | None]:
        found = []
        for row in _best(_chosen(results, case, variant, loaders)):
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
        text = f"{_number(worst)}x {family(best.loader)} ({row.loader}, {row.variant})"
        return text, worst > bound

    return judge


def at_most(case: str, bound: float, loaders: tuple[str, ...]) -> Judge:
    """The best of these takes no more than that, in the unit of the case."""

    def judge(results: Results) -> tuple[str, bool | None]:
        rows = _best(_chosen(results, case, "", loaders))
        if not rows:
            return "not measured", None
        worst = max(rows, key=lambda m: m.median)
        return f"{_number(worst.median)} {worst.unit} ({worst.loader})", worst.median <= bound

    return judge


def flat(word: str, first: float, bound: float, loaders: tuple[str, ...]) -> Judge:
    """P12: from `first` (workers, samples) on, no more than `bound` times the time taken there."""

    def judge(results: Results) -> tuple[str, bool | None]:
        found = []
        for loader in loaders:
            rows = {
                float(m.variant.split(" ")[0]): m
                for m in results.of("P12")
                if m.loader == loader and m.variant.endswith(word)
            }
            base = rows.get(first)
            for size, row in rows.items():
                if base is not None and size > first:
                    found.append((row.median / base.median, row))
        if not found:
            return "not measured", None
        worst, row = max(found, key=lambda pair: pair[0])
        return f"{_number(worst)}x ({row.loader}, {row.variant})", worst <= bound

    return judge


def little_memory(bound_mb: float, loaders: tuple[str, ...]) -> Judge:
    """P12: what iterating over 1e8 samples adds to resident memory."""

    def judge(results: Results) -> tuple[str, bool | None]:
        rows = _chosen(results, "P12", "1e8", loaders)
        grown = [(max(row.details.get("rss_growth_mb", [0.0])), row) for row in rows]
        if not grown:
            return "not measured", None
        worst, row = max(grown, key=lambda pair: pair[0])
        return f"{worst:.1f} MB ({row.loader})", worst <= bound_mb

    return judge


def all_pass(case: str, loaders: tuple[str, ...]) -> Judge:
    """Every one of these passed."""

    def judge(results: Results) -> tuple[str, bool | None]:
        rows = [m for m in results.measurements if m.case == case and m.loader in loaders]
        if not rows or all(row.passed is None for row in rows):
            return rows[0].skipped if rows else "not measured", None
        failed = [row.loader for row in rows if not row.passed]
        return ("failed: " + ", ".join(failed) if failed else "all pass"), not failed

    return judge


_WORKERS = tuple(name for name in DATALOADERS if name != "inline")
_PROCESSES = tuple(name for name in _WORKERS if name != "threads")
_THREE = ("threads", "fork", "shared-memory")
_FRESH = ("spawn", "shared-memory (loky)")

TARGETS: tuple[Target, ...] = (
    Target("P1", ">= 10x torch", faster_than_torch("P1", 10, _WORKERS), 10),
    Target("P1", ">= 5x the best rival, 38 MB", ahead_of("P1", 5, _WORKERS, variant="38 MB")),
    Target("P1", ">= 0.6 of the limit", of_the_limit("P1", 0.6, _WORKERS)),
    Target("P1", ">= 0.6 of all cores together", of_all_together("P1", 0.6, _WORKERS)),
    Target(
        "P2",
        "shared-memory and fork >= 10x torch",
        faster_than_torch("P2", 10, ("fork", "shared-memory"), each=True),
        10,
    ),
    Target("P2", "threads >= 10x torch", faster_than_torch("P2", 10, ("threads",)), 10),
    Target("P2", "threads ahead of torchdata.nodes", ahead_of("P2", 1, ("threads",), "torchdata")),
    Target("P3", "threads >= 0.98 of the limit", of_the_limit("P3", 0.98, ("threads",))),
    Target("P3", "processes >= 0.98 of the limit", of_the_limit("P3", 0.98, _PROCESSES)),
    Target("P3", "threads >= 0.98 of all together", of_all_together("P3", 0.98, ("threads",))),
    Target("P3", "processes >= 0.98 of all together", of_all_together("P3", 0.98, _PROCESSES)),
    Target("P3", "ahead of every rival", ahead_of("P3", 1, _WORKERS)),
    Target(
        "P4", ">= 0.95 of the slowest stage alone", lambda r: pipes.of_the_slowest_stage(r, 0.95)
    ),
    Target("P4", ">= 0.95 of all cores together", of_all_together("P4", 0.95, (PIPELINE,))),
    Target("P4", ">= 1.5x the best with as many processes", lambda r: pipes.beside_cores(r, 1.5)),
    Target("P4", "keeps up with any number (>= 0.95x)", lambda r: pipes.keeps_up(r, 0.95)),
    Target("P4", "<= 0.4x that one's memory", lambda r: pipes.memory_of_best(r, 0.4)),
    Target("P4", "<= 0.4x that one's start", lambda r: pipes.start_of_best(r, 0.4)),
    Target(
        "P5",
        "<= 0.4x torch's time, dataset without torch",
        faster_than_torch("P5", 2.5, _FRESH, variant="dataset"),
        2.5,
        "dataset",
    ),
    Target(
        "P5",
        "<= 0.25x torch's time, paths",
        faster_than_torch("P5", 4, _FRESH, variant="paths"),
        4,
        "paths",
    ),
    Target("P6", "<= 0.2 ms", at_most("P6", 0.2, _THREE)),
    Target("P6", "<= 0.2x torch's time", faster_than_torch("P6", 5, _THREE), 5),
    Target(
        "P7",
        "SharedList: <= 1.15x one process",
        lambda results: shared_memory_of_one(results, 1.15),
    ),
    Target("P8", ">= 20x torch", faster_than_torch("P8", 20, DATALOADERS), 20),
    Target(
        "P9", "<= 0.3x torch's CPU seconds", faster_than_torch("P9", 1 / 0.3, _WORKERS), 1 / 0.3
    ),
    Target("P11", ">= 0.95 of a pinned copy alone", of_the_limit("P11", 0.95, devices.OURS)),
    Target("P11", ">= 0.9 of the copy behind the step", lambda r: _p11(r, "overlap", 0.9)),
    Target("P11", "p99 of next() <= 1 ms", lambda r: _p11(r, "next_p99_ms", 1)),
    Target("P11", "training thread late < 2 ms (p99)", lambda r: _p11(r, "late_p99_ms", 2)),
    Target("P12", "workers: <= 1.5x of 2 workers", flat("workers", 2, 1.5, _THREE)),
    Target("P12", "samples: <= 1.5x of 1e3", flat("samples", 1e3, 1.5, _THREE)),
    Target("P12", "1e8 samples: no list of indices (<= 10 MB)", little_memory(10, _THREE)),
    Target("stage", "inline <= 2 us", lambda r: pipes.adds_at_most(r, 2, ("inline",))),
    Target("stage", "threads <= 15 us", lambda r: pipes.adds_at_most(r, 15, ("threads",))),
    Target("stage", "processes <= 40 us", lambda r: pipes.adds_at_most(r, 40, _PROCESSES)),
    Target("books", "<= 1 % of the time", lambda r: pipes.books_take(r, 1)),
    Target("descriptors", "no error", all_pass("descriptors", _THREE)),
    Target("devshm", "no error", all_pass("devshm", _THREE)),
    Target("endurance", "no growth", all_pass("endurance", _THREE)),
)


def _p11(results: Results, key: str, bound: float) -> tuple[str, bool | None]:
    return detail(results, key, bound, devices.OURS, least=key == "overlap")


def shared_memory_of_one(results: Results, bound: float) -> tuple[str, bool | None]:
    """P7: each of ours with a SharedList, as a multiple of one process alone with it."""
    rows = [m for m in results.of("P7") if m.variant.endswith("SharedList") and m.loader in OURS]
    sizes = [(1 / m.versus_limit, m) for m in rows if m.versus_limit]
    if not sizes:
        return "not measured", None
    worst, row = max(sizes, key=lambda pair: pair[0])
    return f"{worst:.2f}x ({row.loader})", worst <= bound
