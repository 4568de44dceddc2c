"""P4: three kinds of work at once: waiting, decoding without the GIL, and a loop in Python."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.calibration import loops_for, width_for
from benchmarks.case import Case, Options, Variant
from benchmarks.datasets.remote import SIDE
from benchmarks.measurements import per_item
from benchmarks.names import HYBRIDS, PIPELINE, STAGES_ALONE, is_rival
from benchmarks.results import Measurement, Results, ratio
from benchmarks.targets import NOT_MEASURED, Found, Judge, Target, at_least

WAITING_MS, DECODING, LOOPING = 20, 2e-3, 2e-3
"""Work of an item: ms of waiting, seconds without the GIL, and seconds with it."""

BATCH = 8

MANY = (8, 16, 32)
"""Numbers of processes of the rivals that may have more than there are cores."""

_THREADS = ("torchdata threads", "SPDL threads", "SPDL subprocess", "Grain threads")
_PROCESSES = ("torchdata processes", "SPDL processes", "Grain processes")
_STAGES = ("torchdata stages", "SPDL stages")


def hybrid(options: Options) -> Case:
    """P4: as many processes as there are cores and any number of threads; then more processes.

    Ours is the same with few and with many.
    """
    spec: dict[str, Any] = {
        "dataset": "remote",
        "arguments": {
            "width": width_for(DECODING),
            "loops": loops_for(LOOPING),
            "delay_ms": WAITING_MS,
        },
        "stages": 3,
        "batch": BATCH,
        "batch_bytes": BATCH * 3 * SIDE * SIDE,
        "cores": options.cores,
        "limit_workers": options.cores,
        "seconds": 1.0 if options.quick else 4.0,
        "look": 0.5 if options.quick else 2.5,
    }
    ours = HYBRIDS[:1] if options.quick else HYBRIDS
    threads = _THREADS[1:2] if options.quick else _THREADS
    rivals = options.taking_part(*threads, *_PROCESSES, *_STAGES)
    few = ("together", *STAGES_ALONE, "torch", *ours, *rivals)
    rivals = options.taking_part(*(() if options.quick else _PROCESSES), *_STAGES)
    several = ("torch", PIPELINE, *rivals)
    many = MANY[1:2] if options.quick else MANY
    variants = tuple(
        Variant(
            f"{workers} processes",
            # Twice as many batches as all workers prefetch: with 24 of them that takes seconds.
            spec | {"workers": workers, "short": 4 * workers + 4},
            loaders,
            most_rounds=options.most(3, quick=2),
        )
        for workers, loaders in ((options.cores, few), *((count, several) for count in many))
    )
    return Case("P4", "wait, decode, loop: a hybrid", "ms / item", per_item, variants, scale=1e3)


def of_the_slowest_stage(bound: float) -> Judge:
    """The pipeline reaches that part of its slowest stage's speed when that runs alone."""

    def judge(results: Results, case: str) -> Found:
        for variant in results.variants(case):
            whole = results.find(case, variant, PIPELINE)
            stages = [m for m in results.of(case, variant) if m.loader in STAGES_ALONE]
            if whole is not None and stages:
                slowest = max(stages, key=lambda m: m.median)
                part = ratio(slowest, whole) or 0.0
                return f"{part:.2f} of {slowest.loader}", part >= bound
        return NOT_MEASURED

    return judge


def beside_cores(bound: float) -> Judge:
    """Our speed over that of the best of all others with as many processes as cores."""

    def judge(results: Results, case: str) -> Found:
        found = _best_other(results, case, results.variants(case)[:1])
        if found is None:
            return NOT_MEASURED
        factor = ratio(*found) or 0.0
        return f"{factor:.2f}x {found[0].loader}", factor >= bound

    return judge


def keeps_up(bound: float) -> Judge:
    """Our speed over that of the best of all others with any number of processes."""

    def judge(results: Results, case: str) -> Found:
        found = _best_other(results, case, results.variants(case))
        if found is None:
            return NOT_MEASURED
        factor, best = ratio(*found) or 0.0, found[0]
        return f"{factor:.2f}x {best.loader}, {best.variant}", factor >= bound

    return judge


def memory_of_best(bound: float) -> Judge:
    """Our memory as a part of that best one's."""

    def judge(results: Results, case: str) -> Found:
        found = _best_other(results, case, results.variants(case))
        sizes = [m.memory_mb for m in found or () if m.memory_mb]
        if found is None or len(sizes) < 2:
            return NOT_MEASURED
        theirs, ours = sizes
        text = f"{ours:.0f} of {theirs:.0f} MB ({found[0].loader}, {found[0].variant})"
        return text, ours <= bound * theirs

    return judge


def start_of_best(bound: float) -> Judge:
    """Our time until the first batch as a part of that best one's."""

    def judge(results: Results, case: str) -> Found:
        found = _best_other(results, case, results.variants(case))
        times = [statistics.median(m.details.get("first_batch") or [0.0]) for m in found or ()]
        if found is None or not all(times):
            return NOT_MEASURED
        theirs, ours = times
        text = f"{ours:.2f} of {theirs:.2f} s ({found[0].loader}, {found[0].variant})"
        return text, ours <= bound * theirs

    return judge


def _best_other(
    results: Results, case: str, variants: list[str]
) -> tuple[Measurement, Measurement] | None:
    """The best of all others in these variants, and ours of the same rounds.

    Of the same rounds, because the speed of a shared machine differs from hour to hour.
    """
    pairs = [
        (other, ours)
        for variant in variants
        if (ours := results.find(case, variant, PIPELINE)) is not None
        for other in results.of(case, variant)
        if is_rival(other.loader) or other.loader == "torch"
    ]
    return min(pairs, key=lambda pair: ratio(*pair) or 0.0) if pairs else None


TARGETS = (
    Target("P4", ">= 0.95 of the slowest stage alone", of_the_slowest_stage(0.95)),
    Target("P4", ">= 0.95 of all cores together", at_least(0.95, (PIPELINE,), "together")),
    Target("P4", ">= 1.5x the best with as many processes", beside_cores(1.5)),
    Target("P4", "keeps up with any number (>= 0.95x)", keeps_up(0.95)),
    Target("P4", "<= 0.4x that one's memory", memory_of_best(0.4)),
    Target("P4", "<= 0.4x that one's start", start_of_best(0.4)),
)
