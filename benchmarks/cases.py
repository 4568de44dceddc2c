"""Cases: the work, the loaders that take part, and the sentences of the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCALES = {"s": 1.0, "ms": 1e3, "us": 1e6, "MB": 1.0}
"""Unit of the page -> its factor from the unit of a measurement."""


@dataclass(frozen=True)
class Case:
    """Work that loaders are compared at.

    Attributes
    ----------
    measure
        Function of benchmarks/measure.py.
    spec, quick
        Its parameters, and those that differ in a short run.
    alone
        True if nothing is rehearsed or measured twice: it takes long, and differs little.
    level
        Reason that the page gives where loaders are level.
    """

    title: str
    unit: str
    measure: str
    loaders: tuple[str, ...]
    spec: dict[str, Any]
    quick: dict[str, Any]
    rounds: int = 5
    alone: bool = False
    level: str = ""


TORCH_LIKE = ("torch", "threads", "fork", "shared-memory")
THREADS = ("torchdata threads", "SPDL threads", "Grain threads")
PROCESSES = ("torchdata processes", "SPDL subprocess", "Grain processes")
BATCHES = (*TORCH_LIKE, *THREADS, *PROCESSES[:2])
START = {"workers": 16, "batch": 16, "start": "spawn", "dataset": "Ints", "length": 4096}
TENSORS = START | {"dataset": "Paths", "length": 300_000}
FEW = {"workers": 2, "length": 300}

# fmt: off
CASES: dict[str, Case] = {
    "large": Case(
        "a batch of 256 images (38 MB), collated and handed over", "ms", "pace", BATCHES,
        {"dataset": "Images", "batch": 256, "workers": 2, "seconds": 0.6, "short": 16},
        {"batch": 16, "seconds": 0.05}),
    "small": Case(
        "a batch of 64 integers: overhead alone", "us", "pace", BATCHES,
        {"dataset": "Ints", "batch": 64, "workers": 2, "seconds": 0.6}, {"seconds": 0.05}),
    "jpeg": Case(
        "32 photographs (JPEG), decoded and resized", "ms", "pace", BATCHES,
        {"dataset": "Jpegs", "batch": 32, "workers": 2, "seconds": 1.0, "short": 12},
        {"batch": 2, "seconds": 0.05}, level="the decoder keeps both cores busy"),
    "hybrid": Case(
        "a sample that waits 20 ms, decodes a JPEG and loops in Python", "ms", "pace",
        ("torch", "pipeline, 3 stages", "pipeline, threads in processes",
         "torchdata 3 stages", "SPDL 3 stages", "Grain, threads in processes"),
        {"dataset": "Hybrid", "batch": 8, "workers": 2, "torch_workers": 16, "seconds": 1.5,
         "short": 40, "items": True},
        {"batch": 2, "torch_workers": 2, "seconds": 0.05, "short": 8}, rounds=3,
        level="the work itself keeps both cores busy"),
    "start2": Case(
        "first batch of 2 fresh workers, dataset without torch", "s", "first_batch",
        ("torch", "spawn", *PROCESSES), START | {"workers": 2}, {"workers": 1}, rounds=3),
    "start16": Case(
        "first batch of 16 fresh workers, dataset without torch", "s", "first_batch",
        ("torch", "spawn", *PROCESSES), START, {"workers": 2}, rounds=2),
    "start16-torch": Case(
        "first batch of 16 fresh workers that import torch", "s", "first_batch",
        ("torch", "spawn"), TENSORS, FEW, rounds=2),
    "memory": Case(
        "memory of each further one of 16 fresh workers that import torch", "MB", "worker_memory",
        ("torch", "spawn", "torchdata processes"), TENSORS, FEW, rounds=1, alone=True),
    "slow": Case(
        "an epoch of 1,600 samples of which one in 16 takes 20 times as long, 8 workers", "s",
        "whole", (*TORCH_LIKE, "torch, any order", "pipeline", *THREADS, "Grain by samples"),
        {"dataset": "Slow", "length": 1600, "batch": 16, "workers": 8}, {"length": 64}, rounds=3,
        level="samples that wait keep all 8 workers busy, which takes 1.28 s at least"),
    "epochs": Case(
        "from the last batch of an epoch to the first of the next, workers kept", "ms", "turn",
        BATCHES, {"dataset": "Ints", "length": 12, "batch": 4, "workers": 2, "keep": True,
                  "seconds": 0.5}, {"seconds": 0.0}),
    "disk": Case(
        "an epoch of 4,000 JPEGs in tar archives on disk, decoded", "s", "stored",
        ("threads", "fork", "webdataset"),
        {"storage": "disk", "samples": 4000, "shards": 20, "width": 320, "batch": 64, "workers": 2},
        {"samples": 80, "batch": 8}, rounds=3),
    "store": Case(
        "an epoch of 4,800 JPEGs in tar archives in an object store", "s", "stored",
        ("threads", "SPDL threads", "webdataset", "litdata"),
        {"storage": "store", "samples": 4800, "shards": 48, "width": 480, "batch": 64, "workers": 2},
        {"samples": 80, "shards": 8, "batch": 8}, rounds=3),
    "tables": Case(
        "an epoch of 5 million rows of Parquet, in order", "s", "stored", ("threads", "pyarrow"),
        {"storage": "tables", "samples": 5_000_000, "batch": 4096, "workers": 2},
        {"samples": 4000}, rounds=3),
    "resume": Case(
        "resume at photograph 1,600 of 2,000 (JPEG)", "ms", "resume",
        ("torch", "threads", "fork", "torchdata stateful", "Grain threads"),
        {"dataset": "Jpegs", "length": 2000, "batch": 32, "workers": 2, "at": 50},
        {"length": 16, "batch": 2, "at": 4}, rounds=3),
    "python": Case(
        "16 samples that loop in Python", "ms", "pace", TORCH_LIKE[:3],
        {"dataset": "Python", "batch": 16, "workers": 2, "seconds": 0.5}, {"seconds": 0.05},
        rounds=3, level="the samples keep both cores busy"),
}
# fmt: on

FREE_THREADED = ("small", "jpeg", "python")
"""Cases of ``python -m benchmarks.free_threaded``: what differs without a GIL, and what does not."""
