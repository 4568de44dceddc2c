"""P13: samples that wait, some of them much longer than most."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from typing import Any

from benchmarks import timing
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.measurements import open_running, without_collections, work_of
from benchmarks.names import BACKENDS, BY_SAMPLES, FEW_PROCESSES, SEEDED, TORCH_ANY_ORDER
from benchmarks.results import Results
from benchmarks.targets import NOT_MEASURED, Found, Judge, Target, chosen, short

WORKERS = 8
SAMPLES, BATCH = 1600, 16

SPREADS = {"one in 16 takes 20 times": "few", "lognormal": "tail"}
"""Name of a variant -> how `SlowSamples` draws its times. Both sum up to the same."""

RIVALS = (
    *("torchdata threads", "torchdata processes", "torchdata threads by samples"),
    *("SPDL threads", "SPDL threads by samples"),
    *("Grain threads", "Grain processes", "Grain threads by samples"),
)


class WrongSamples(Exception):
    """An epoch did not deliver each sample once, or not in order."""


def whole_epoch(loader: str, spec: Spec) -> Answer:
    """Seconds of an epoch, from making the loader to its end: workers are started within.

    The details are the least that so many workers can need (`bound`, in seconds), and in ms the 99th
    percentile and the maximum of the times of ``next()`` but for the first.
    """
    work = work_of(spec)
    gc.collect()
    moments, batches = [], []
    with without_collections():
        start = time.perf_counter()
        with open_running(loader, work) as running:
            for batch in running.epoch():
                moments.append(time.perf_counter())
                batches.append(batch)
            seconds = time.perf_counter() - start
    _check(loader, batches, len(work.dataset))
    waits = [(late - early) * 1e3 for early, late in itertools.pairwise(moments)]
    details = {
        "bound": work.dataset.total / work.workers,
        "next_p99_ms": timing.percentile(waits, 0.99),
        "next_max_ms": max(waits),
    }
    return {"value": seconds, "details": details}


def _check(loader: str, batches: list[Any], length: int) -> None:
    """Raise `WrongSamples` unless each sample came once, and where it is promised in order."""
    indices = [int(index) for batch in batches for index in batch]
    if loader == TORCH_ANY_ORDER:
        indices.sort()
    if indices != list(range(length)):
        raise WrongSamples(f"{loader} delivered {len(indices)} samples, or in another order")


def slow_samples(options: Options) -> Case:
    """1,600 samples of 6.6 ms in the mean, all of it waiting, on 8 workers."""
    ours = (*BACKENDS, *BY_SAMPLES, SEEDED, FEW_PROCESSES)
    rivals = options.taking_part(*RIVALS)
    variants = tuple(
        Variant(
            name,
            {
                "dataset": "slow samples",
                "arguments": {"length": SAMPLES, "spread": spread},
                "batch": BATCH,
                "workers": WORKERS,
                "checked": 4,
                "look": 0.0,
            },
            ("torch", TORCH_ANY_ORDER, *ours, *rivals),
            most_rounds=options.most(5, quick=1),
        )
        for name, spread in SPREADS.items()
    )
    return Case("P13", "slow samples", "s / epoch", whole_epoch, variants)


def within(bound: float, loaders: tuple[str, ...]) -> Judge:
    """Each of `loaders` takes at most that many times what its workers need at the least."""

    def judge(results: Results, case: str) -> Found:
        rows = chosen(results, case, "", loaders)
        if not rows:
            return NOT_MEASURED
        found = [(row.median / row.details["bound"][0], row) for row in rows]
        worst, row = max(found, key=lambda pair: pair[0])
        return f"{short(worst)}x ({row.loader}, {row.variant})", worst <= bound

    return judge


def calmer_than_torch(bound: float, loaders: tuple[str, ...], variant: str = "") -> Judge:
    """The 99th percentile of ``next()`` is at most that part of torch's, for each of `loaders`."""

    def judge(results: Results, case: str) -> Found:
        found = []
        for row in chosen(results, case, variant, loaders):
            base = results.find(case, row.variant, "torch")
            if base is not None:
                ours, theirs = (statistics.median(m.details["next_p99_ms"]) for m in (row, base))
                found.append((ours / theirs, row))
        if not found:
            return NOT_MEASURED
        worst, row = max(found, key=lambda pair: pair[0])
        return f"{short(worst)}x ({row.loader}, {row.variant})", worst <= bound

    return judge


_THREADS = ("threads", *BY_SAMPLES)
TARGETS = (
    Target("P13", "threads: <= 1.1x the bound", within(1.1, _THREADS)),
    Target(
        *("P13", "processes: <= 1.25x the bound", within(1.25, BACKENDS[1:])),
        why="Each worker gets the batches that torch gives it, in turn, so that it draws what torch's "
        "would. With the times of these samples that rule alone takes 1.14 and 1.26 of the bound (by a "
        "simulation without a loader). With `seeding='sample'` any worker may make any batch: see *fork "
        "by samples*, which is within 1.25 in both lines.",
    ),
    Target(
        "P13", "threads: p99 of next() <= 0.5x torch's", calmer_than_torch(0.5, _THREADS, "one in")
    ),
)
