"""P1 and P9: large batches of images, nothing left to do but collate and hand over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.case import Case, Derived, Options, Variant
from benchmarks.measurements import whole_epochs
from benchmarks.names import (
    BACKENDS,
    FRESH_RIVALS,
    PROCESS_BACKENDS,
    RIVAL_PROCESSES,
    RIVAL_THREADS,
    WITH_WORKERS,
)
from benchmarks.results import Measurement
from benchmarks.targets import Target, ahead_of, at_least, faster_than_torch

IMAGE = 3 * 224 * 224
"""Bytes of one image."""

SIZES = {"10 MB": 66, "38 MB": 256, "150 MB": 1000}
"""Size of a batch -> its images."""


def most_loaders(options: Options) -> tuple[str, ...]:
    """Loaders of most cases; a quick run leaves out `spawn`, which takes 2 s to start each time."""
    ours = BACKENDS if options.quick else (*BACKENDS, "spawn")
    rivals = options.taking_part(*RIVAL_THREADS, *RIVAL_PROCESSES)
    return ("limit", "torch", "inline", *ours, *rivals)


def large_batches(options: Options) -> Case:
    """P1: batches of 10, 38 and 150 MB, as uint8, float32 and float16."""
    variants = []
    for label, batch in SIZES.items():
        for dtype in ("uint8", "float32", "float16"):
            usual = (label, dtype) == ("38 MB", "uint8")
            if options.quick and not usual:
                continue
            spec = {
                "dataset": "images",
                "arguments": {"dtype": dtype},
                "batch": batch,
                "batch_bytes": batch * IMAGE,
                "workers": options.workers,
                "recycled": True,
                "limit_workers": options.cores,
                "seconds": 0.25 if options.quick else 0.6,
                "look": 0.2 if options.quick else 0.4,
            }
            loaders, rounds = ("together", *most_loaders(options)), 5 if label == "38 MB" else 3
            if not usual:  # fresh processes take seconds each time: once will do
                loaders = tuple(n for n in loaders if n not in ("spawn", *FRESH_RIVALS))
            variants.append(
                Variant(f"{label} {dtype}", spec, loaders, most_rounds=options.most(rounds))
            )
    return Case(
        "P1",
        "large batches: stack and carry",
        "ms / batch",
        whole_epochs,
        tuple(variants),
        scale=1e3,
        derived=Derived("P9", "CPU time for what P1 delivers at 38 MB", cpu_per_gigabyte),
    )


def cpu_time(options: Options) -> Case:
    """P9 alone: the part of P1 that it is worked out from."""
    case = large_batches(options)
    return replace(case, variants=tuple(v for v in case.variants if v.name.startswith("38 MB")))


def cpu_per_gigabyte(measurements: Sequence[Measurement]) -> list[Measurement]:
    """P9, from the 38 MB variants of P1."""
    found = []
    gigabytes = SIZES["38 MB"] * IMAGE / 1e9
    for m in measurements:
        if m.case == "P1" and m.variant.startswith("38 MB"):
            row = Measurement("P9", m.variant, m.loader, "CPU s / GB", skipped=m.skipped)
            if m.values:
                row.values = [cpu / gigabytes for cpu in m.cpu]
            found.append(row)
    return found


_TWO_SPEEDS = (
    "Two cores that copy at once have two speeds on a shared host, which change within seconds: on "
    "a Xeon together they took 0.12 or 0.30 ms for a batch of 10 MB, one alone 0.25 ms. There, in "
    "slices of 30 to 50 ms, in turn with both cores together, threads reached 1.06 (10 MB) and "
    "0.94 (38 MB), `fork` 0.78 to 0.82 and 0.84 to 0.88. No page is new then. At 10 MB the number "
    "of slots in turn counts: `fork` reaches 0.86 with one batch prefetched for each worker, 0.78 "
    "with two, 0.74 with three. Two bare processes, too, are slower with two or three buffers in "
    "turn than with one, at 10 MB and not at 38, where one is more than the cache. A worker has "
    "three slots in turn, which is the least: two batches are prefetched, one is in the loop's "
    "hand. It is the slot that was freed last; a fourth is taken now and then."
)
_MEMORY = (
    "Memory is the limit: both cores together, which do nothing but copy, take 1/3 to 1/5 of "
    "Grain's time at 38 MB. On a Xeon, whose memory is slower for two cores at once, they took 1/6 "
    "to 1/8 of torch's, and threads were 6.1 to 9.8 times as fast as torch."
)
TARGETS = (
    faster_than_torch("P1", ">= 10x torch", 10, WITH_WORKERS, why=_MEMORY),
    Target(
        *("P1", ">= 5x the best rival, 38 MB"),
        ahead_of(5, WITH_WORKERS, variant="38 MB"),
        why=_MEMORY,
    ),
    Target(
        *("P1", ">= 0.6 of the limit", at_least(0.6, WITH_WORKERS, "limit")),
        why="At 10 MB the plain loop has its buffers in the cache, and a loader of two workers has six "
        "slots.",
    ),
    Target(
        *("P1", "threads >= 0.85 of all together"),
        at_least(0.85, ("threads",), "together"),
        why=_TWO_SPEEDS,
    ),
    Target(
        *("P1", "processes >= 0.85 of all together"),
        at_least(0.85, PROCESS_BACKENDS, "together"),
        why=_TWO_SPEEDS,
    ),
    faster_than_torch("P9", "<= 0.3x torch's CPU seconds", 1 / 0.3, WITH_WORKERS),
)
