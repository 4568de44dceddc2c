"""tune: the plan that `hybridloader.tune` chooses, beside a grid, Grain's picker and usual guesses."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.case import Answer, Case, Options, Spec, Variant, check_installed

TUNE, GRID = "tune", "grid"
GRAIN, TORCH_AS_GRAIN = "Grain picked", "torch, as Grain"
"""Grain's pipeline with the options of its picker; torch's loader with as many worker processes."""

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

MOST = 20_000
"""Batches of torch's loader and of Grain that are timed, at most."""


def chosen_rate(loader: str, spec: Spec) -> Answer:
    """Seconds of a batch with the plan of `loader`; as details the plan, and seconds of the search.

    With a `rate` of a step, a batch takes the time of the step at least. The load average of the
    machine before the measurement is a detail, too.
    """
    load = os.getloadavg()[0]
    found, details = _found(loader, spec)
    return {
        "value": 1 / min(found, spec.get("rate", math.inf)),
        "details": details | {"load": round(load, 1)},
    }


def _found(loader: str, spec: Spec) -> tuple[float, dict[str, Any]]:
    """Batches a second with the plan of `loader`, and details."""
    from hybridloader import DataLoader, tune
    from hybridloader.tuning.planner import shown
    from hybridloader.tuning.subjects import LoaderSubject
    from hybridloader.tuning.trials import measure
    from hybridloader.tuning.tune import limits_here

    began = time.perf_counter()
    dataset, batch = _dataset(spec), spec.get("batch", 8)
    limits = limits_here(None, spec.get("memory", 0.5))
    subject = LoaderSubject(DataLoader(dataset, batch))
    seconds = spec["trial"]

    def measured(plan: Any, longest: float = 4.0) -> float:
        now = time.perf_counter()
        deadline = now + longest + seconds
        return measure(subject, plan, seconds, deadline, time.perf_counter).trial.rate

    if loader in GUESSES:
        workers = limits.whole_cores if loader == GUESSES[0] else int(loader.split()[-1])
        return _torchs(dataset, batch, workers, seconds), {"workers": workers}
    if loader in (GRAIN, TORCH_AS_GRAIN):
        check_installed(GRAIN)
        from benchmarks.loaders import grain_picked

        picked = grain_picked.pick(dataset, batch, limits.memory)
        took = time.perf_counter() - began
        if loader == TORCH_AS_GRAIN:
            workers = picked.processes
            return _torchs(dataset, batch, workers, seconds), {"workers": workers}
        with picked.batches() as batches:
            found = rate(batches, picked.ahead, seconds)
        return found, {"plan": picked.plan, "search": took}
    if loader == TUNE:
        tuning = tune(
            DataLoader(dataset, batch),
            seconds=spec["seconds_of_search"],
            step=spec.get("rate"),
            memory=spec.get("memory", 0.5),
        )
        best, plan = measured(tuning.plan), tuning.plan
    else:
        plans = _grid(limits.whole_cores)
        if spec.get("shards"):
            plans = [plan for plan in plans if plan[0].threads == 1]
        best, plan = max((measured(plan), plan) for plan in plans)
    return best, {"plan": shown(plan), "search": time.perf_counter() - began}


def _dataset(spec: Spec) -> Any:
    from benchmarks.datasets.tuned import Shards, Work

    return Shards() if spec.get("shards") else Work(**spec["arguments"])


def _grid(cores: int) -> list[Any]:
    from hybridloader.tuning.planner import INLINE, Place

    threads = [Place("threads", count) for count in THREADS]
    counts = sorted({1, 2, cores})
    processes = [Place("fork", count, inside) for count in counts for inside in INSIDE]
    return [(place,) for place in (INLINE, *threads, *processes)]


def _torchs(dataset: Any, batch: int, workers: int, seconds: float) -> float:
    """Batches a second of torch's loader, which makes two batches ahead in each worker."""
    import torch.utils.data

    loader: Any = torch.utils.data.DataLoader(dataset, batch, num_workers=workers)
    return rate(iter(loader), 2 * workers, seconds)


def rate(
    batches: Iterator[Any],
    ahead: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Batches a second, timed after the first `ahead`: these were made before the loop asked.

    At least `ahead` batches are timed, unless they take ten times `seconds`.
    """
    for _ in range(ahead):
        next(batches)
    began = clock()
    for count in itertools.count(1):
        next(batches)
        took = clock() - began
        enough = count >= ahead or took >= 10 * seconds
        if count >= MOST or (took >= seconds and enough):
            break
    return count / took


def tuning(options: Options) -> Case:
    """Ten workloads; a quick run has four of them, and searches for 5 seconds in place of 20."""
    names = list(WORKLOADS)
    if options.quick:
        names = ["waits of 20 ms", "Python", "one lock", "tiny batches"]
    variants = tuple(
        Variant(
            name,
            WORKLOADS[name] | {"trial": 0.5, "seconds_of_search": 5.0 if options.quick else 20.0},
            (GRID, TUNE, *options.taking_part(GRAIN, TORCH_AS_GRAIN), *GUESSES),
            most_rounds=options.most(1),
            again=TUNE,
            seconds=12.0,
        )
        for name in names
    )
    title = "the plan that tune() chooses"
    return Case("tune", title, "ms / batch", chosen_rate, variants, scale=1e3, check=False)
