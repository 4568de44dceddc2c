"""P4: three kinds of work at once: waiting, decoding without the GIL, and a loop in Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.calibration import loops_for, width_for
from benchmarks.case import Case, Options, Variant
from benchmarks.datasets.remote import SIDE
from benchmarks.measurements import per_item
from benchmarks.names import HYBRIDS, PIPELINE, SPREAD, is_rival
from benchmarks.results import Measurement, Results, ratio
from benchmarks.targets import NOT_MEASURED, Found, Judge, Target, at_least

WAITING_MS, DECODING, LOOPING = 20, 2e-3, 2e-3
"""Work of an item: ms of waiting, seconds without the GIL, and seconds with it."""

BATCH = 8

MANY = (8, 16, 24)
"""Numbers of processes of the rivals that may have more than there are cores."""

_THREADS = ("torchdata threads", "SPDL threads", "SPDL subprocess", "Grain threads")
_PROCESSES = ("torchdata processes", "SPDL processes", "Grain processes")
_STAGES = ("torchdata stages", "SPDL stages")


def hybrid(options: Options) -> Case:
    """P4: as many processes as there are cores and any number of threads; then more processes.

    Ours are the same with few and with many.
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
        "seconds": 1.0 if options.quick else 2.0,
        "look": 0.5 if options.quick else 2.0,
    }
    ours = HYBRIDS[:1] if options.quick else HYBRIDS
    threads = _THREADS[1:2] if options.quick else _THREADS
    rivals = options.taking_part(*threads, *_PROCESSES, *_STAGES)
    few = ("together", "torch", *ours, *rivals)
    # Their other forms start as many fresh processes for each epoch, which takes longer than the rest.
    several = (
        "torch",
        PIPELINE,
        *(name for name in ours if name == SPREAD),
        *options.taking_part(*_STAGES),
    )
    many = MANY[1:2] if options.quick else MANY
    variants = tuple(
        Variant(
            f"{workers} processes",
            # Twice as many batches as all workers prefetch: with 24 of them that takes seconds.
            spec | {"workers": workers, "short": 4 * workers + 4},
            loaders,
            most_rounds=options.most(3, quick=2),
            again=PIPELINE,
            seconds=5.0 if workers == options.cores else 9.0,
        )
        for workers, loaders in ((options.cores, few), *((count, several) for count in many))
    )
    return Case("P4", "wait, decode, loop: a hybrid", "ms / item", per_item, variants, scale=1e3)


def ahead_with_as_many(bound: float) -> Judge:
    """Our best is more than `bound` times as fast as the best of all others with as many processes."""

    def judge(results: Results, case: str) -> Found:
        (variant, *_) = results.variants(case)
        ours = _fastest_of_ours(results, case, variant)
        others = [
            other
            for other in results.of(case, variant)
            if is_rival(other.loader) or other.loader == "torch"
        ]
        if ours is None or not others:
            return NOT_MEASURED
        best = min(others, key=lambda other: ratio(other, ours) or 0.0)
        factor = ratio(best, ours) or 0.0
        return f"{factor:.2f}x {best.loader} ({ours.loader})", factor > bound

    return judge


def level_with_torch(results: Results, case: str) -> Found:
    """As fast as torch's loader with 8 and more processes, or slower by no more than the noise."""
    found = []
    for ours, theirs in _beside_more_processes(results, case):
        factor = ratio(theirs, ours) or 0.0
        noise = results.noise(case, ours.variant) or 0.0
        found.append((factor + noise, factor, noise, ours.variant))
    if not found:
        return NOT_MEASURED
    _, factor, noise, variant = min(found)
    return f"{factor:.2f}x, noise {noise:.2f} ({variant})", factor + noise >= 1


def of_its_memory(bound: float) -> Judge:
    """Our memory as a part of that of torch's loader with 8 and more processes."""

    def judge(results: Results, case: str) -> Found:
        found = [
            (ours.memory_mb / theirs.memory_mb, ours.memory_mb, theirs.memory_mb, ours.variant)
            for ours, theirs in _beside_more_processes(results, case)
            if ours.memory_mb and theirs.memory_mb
        ]
        if not found:
            return NOT_MEASURED
        part, own, other, variant = max(found)
        return f"{part:.2f}x: {own:.0f} of {other:.0f} MB ({variant})", part <= bound

    return judge


def _beside_more_processes(
    results: Results, case: str
) -> Iterator[tuple[Measurement, Measurement]]:
    """Our best and torch's, of each variant in which torch's has more processes than there are cores."""
    for variant in results.variants(case)[1:]:
        ours = _fastest_of_ours(results, case, variant)
        theirs = results.find(case, variant, "torch")
        if ours is not None and theirs is not None:
            yield ours, theirs


def _fastest_of_ours(results: Results, case: str, variant: str) -> Measurement | None:
    found = [results.find(case, variant, name) for name in HYBRIDS]
    measured = [one for one in found if one is not None and one.values]
    return min(measured, key=lambda one: one.median, default=None)


_GIL = (
    "In each process the threads take turns at one GIL: one that comes back from the server, or from "
    "decoding, waits for a loop of 2 ms to end, several times a sample. In a trial "
    "both cores were busy for 0.94 of the time with 3 tasks of 16 samples at hand for each "
    "process, which is the default, and for 0.95 with 4. Grain's processes have 16 batches of 8 each in "
    "work, and take 2.2 times the memory."
)
TARGETS = (
    Target(
        *("P4", ">= 0.95 of all cores together"),
        at_least(0.95, HYBRIDS, "together"),
        why=_GIL,
    ),
    Target("P4", "ahead of all with as many processes", ahead_with_as_many(1), why=_GIL),
    Target("P4", "level with torch with 8 to 24 processes", level_with_torch),
    Target(
        *("P4", "<= 0.5x its memory", of_its_memory(0.5)),
        why="The form with three stages takes some 210 MB, and the fastest, *pipeline spread* with 16 "
        "threads in each process, 270 to 300. torch takes 300 with 8 processes, 440 with 16, 580 "
        "with 24.",
    ),
)
