"""tune: the plan that `hybridloader.tune` chooses, beside the best of a grid and usual guesses."""

from __future__ import annotations

import math
import time
from typing import Any

from benchmarks.case import Answer, Case, Options, Spec, Variant

TUNE, GRID = "tune", "grid"
GUESSES = ("torch, cores", "torch, 4", "torch, 8", "torch, 16")
"""torch's loader with as many workers as there are cores, its advice, and with usual numbers."""

WORKLOADS: dict[str, dict[str, Any]] = {
    "decoding": {"arguments": {"unpacked": 1}},
    "waits of 20 ms": {"arguments": {"waiting_ms": 20}},
    "Python": {"arguments": {"loops": 30_000}},
    "hybrid": {"arguments": {"waiting_ms": 20, "unpacked": 1, "loops": 30_000}},
    "one lock": {"arguments": {"locked_ms": 2}},
    "38 MB batches": {"arguments": {"size": 3 * 224 * 224}, "batch": 256},
    "tiny batches": {"arguments": {}, "batch": 4},
    "slow step": {"arguments": {"unpacked": 1}, "rate": 10.0},
    "uneven shards": {"shards": True},
    "hybrid, half the memory": {
        "arguments": {"waiting_ms": 20, "unpacked": 1, "loops": 30_000},
        "memory": 0.25,
    },
}
"""Workload -> its dataset; `rate` is that of a training step, in batches a second."""

THREADS = (1, 2, 4, 8, 16, 32, 64)
INSIDE = (1, 4, 16)
"""Threads in each process, on the grid."""


def chosen_rate(loader: str, spec: Spec) -> Answer:
    """Seconds of a batch with the plan of `loader`; as details the plan, and seconds of the search.

    With a `rate` of a step, a batch takes the time of the step at least.
    """
    from hybridloader import DataLoader, tune
    from hybridloader.tuning.subjects import LoaderSubject
    from hybridloader.tuning.trials import measure
    from hybridloader.tuning.tune import limits_here

    began = time.perf_counter()
    dataset, batch = _dataset(spec), spec.get("batch", 8)
    limits = limits_here(None, spec.get("memory", 0.5))
    subject = LoaderSubject(DataLoader(dataset, batch))
    seconds, rate = spec["trial"], spec.get("rate", math.inf)

    def measured(plan: Any, longest: float = 4.0) -> float:
        now = time.perf_counter()
        deadline = now + longest + seconds
        return measure(subject, plan, seconds, deadline, time.perf_counter).trial.rate

    if loader.startswith("torch"):
        workers = limits.whole_cores if loader == GUESSES[0] else int(loader.split()[-1])
        found = _torchs(dataset, batch, workers, seconds)
        return {"value": 1 / min(found, rate), "details": {"workers": workers}}
    if loader == TUNE:
        tuning = tune(
            DataLoader(dataset, batch),
            seconds=spec["seconds_of_search"],
            step=None if rate == math.inf else rate,
            memory=spec.get("memory", 0.5),
        )
        best, took = measured(tuning.plan), time.perf_counter() - began
    else:
        plans = _grid(limits.whole_cores)
        if spec.get("shards"):
            plans = [plan for plan in plans if plan[0].threads == 1]
        best, took = max(map(measured, plans)), time.perf_counter() - began
    return {"value": 1 / min(best, rate), "details": {"search": took}}


def _dataset(spec: Spec) -> Any:
    from benchmarks.datasets.tuned import Shards, Work

    return Shards() if spec.get("shards") else Work(**spec["arguments"])


def _grid(cores: int) -> list[Any]:
    from hybridloader.tuning.plans import INLINE, Place

    threads = [Place("threads", count) for count in THREADS]
    counts = sorted({1, 2, cores})
    processes = [Place("fork", count, inside) for count in counts for inside in INSIDE]
    return [(place,) for place in (INLINE, *threads, *processes)]


def _torchs(dataset: Any, batch: int, workers: int, seconds: float) -> float:
    """Batches a second of torch's loader, after two batches of each worker."""
    import torch.utils.data

    loader: Any = torch.utils.data.DataLoader(dataset, batch, num_workers=workers)
    iterator, times = iter(loader), []
    for _ in range(2 * workers):
        next(iterator)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < 2 * workers:
        next(iterator)
        times.append(time.perf_counter())
        if len(times) > 20_000 or time.perf_counter() - began > 10 * seconds:
            break
    del iterator
    return len(times) / (times[-1] - began)


def tuning(options: Options) -> Case:
    """Ten workloads; a quick run has four of them, and searches for 5 seconds in place of 20."""
    names = list(WORKLOADS)
    if options.quick:
        names = ["waits of 20 ms", "Python", "one lock", "tiny batches"]
    variants = tuple(
        Variant(
            name,
            WORKLOADS[name] | {"trial": 0.5, "seconds_of_search": 5.0 if options.quick else 20.0},
            (GRID, TUNE, *GUESSES),
            most_rounds=options.most(1),
            again=TUNE,
            seconds=12.0,
        )
        for name in names
    )
    title = "the plan that tune() chooses"
    return Case("tune", title, "ms / batch", chosen_rate, variants, scale=1e3, check=False)
