"""P19: batches of a thousand small tensors, collated or not, and of strings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.measurements import opened, whole_epochs
from benchmarks.names import BACKENDS
from benchmarks.results import Measurement, Results
from benchmarks.targets import NOT_MEASURED, Found, Judge, Target, chosen, faster_than_torch, short

OURS = (*BACKENDS, "spawn")
PROCESSES = OURS[1:]
RIVALS = ("torchdata processes", "SPDL subprocess", "Grain threads")

VARIANTS: dict[str, Spec] = {
    "dict of 1,000 keys": {"dataset": "keys", "arguments": {"keys": 1000}, "batch": 32},
    "32 dicts of 100 tensors": {
        "dataset": "small tensors",
        "arguments": {"keys": 100},
        "batch": 32,
        "uncollated": True,
    },
    "32 lists of 64 tensors": {
        "dataset": "ragged",
        "arguments": {"count": 64},
        "batch": 32,
        "uncollated": True,
    },
    "256 texts": {"dataset": "texts", "batch": 256},
}


def seconds_of_a_batch(loader: str, spec: Spec) -> Answer:
    """Seconds a batch, as `whole_epochs` has it; as a detail the CPU time of the loop's thread.

    The thread's time (`loop_us`, in us a batch) is taken in one more epoch. It is what ``next()``
    computes, and what it takes to free the batch before.
    """
    answer = whole_epochs(loader, spec)
    count = spec["short"]
    with opened(loader, spec) as running:
        batches = running.epoch()
        for _ in range(count):
            batch = next(batches)
        began = time.thread_time()
        for _ in range(2 * count):
            batch = next(batches)
        spent = (time.thread_time() - began) / (2 * count)
        del batch
    answer["details"]["loop_us"] = spent * 1e6
    return answer


def small_tensors(options: Options) -> Case:
    """A dict of 1,000 keys; lists of dicts and of ragged lists of tensors; texts with a tensor."""
    loaders = ("limit", "torch", *OURS, *options.taking_part(*RIVALS))
    base: dict[str, Any] = {
        "workers": options.workers,
        "seconds": 0.3 if options.quick else 1.0,
        "short": 4
        + 2 * options.workers,  # half of them prefetched; torch takes up to a second each
        "look": 0.0,
        "batch_bytes": 1 << 24,
    }
    variants = tuple(
        Variant(name, base | spec, loaders, most_rounds=options.most(3, quick=1))
        for name, spec in VARIANTS.items()
    )
    return Case("P19", "many small tensors", "us / batch", seconds_of_a_batch, variants, scale=1e6)


def less_than_torch(
    bound: float, loaders: tuple[str, ...], amount: Callable[[Measurement], float]
) -> Judge:
    """For each of `loaders` that `amount` is at most that part of torch's."""

    def judge(results: Results, case: str) -> Found:
        found = []
        for row in chosen(results, case, "", loaders):
            base = results.find(case, row.variant, "torch")
            if base is not None and base.values and row.values:
                found.append((amount(row) / amount(base), row))
        if not found:
            return NOT_MEASURED
        worst, row = max(found, key=lambda pair: pair[0])
        return f"{short(worst)}x ({row.loader}, {row.variant})", worst <= bound

    return judge


def _cpu(row: Measurement) -> float:
    return statistics.median(row.cpu)


def _loop(row: Measurement) -> float:
    return statistics.median(row.details["loop_us"])


TARGETS = (
    faster_than_torch("P19", "each of ours >= 2x torch", 2, OURS, each=True),
    Target("P19", "processes: <= 0.5x torch's CPU time", less_than_torch(0.5, PROCESSES, _cpu)),
    Target("P19", "the loop's thread: <= 0.5x torch's", less_than_torch(0.5, OURS, _loop)),
)
