"""Cases: the work, the loaders that take part, and the sentences of the page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TORCH_LIKE = ("torch", "threads", "fork", "shared-memory")
THREADS = ("torchdata threads", "SPDL threads", "Grain threads")
PROCESSES = ("torchdata processes", "SPDL subprocess", "Grain processes")


@dataclass(frozen=True)
class Case:
    """Work that loaders are compared at.

    Attributes
    ----------
    title
        Words of the page; the first row of a table.
    unit, scale
        Unit of the values, and its factor from that of `measure`.
    measure
        Function of benchmarks/measure.py.
    spec
        Its parameters; `quick` replaces some of them in a short run.
    alone
        True if nothing is compared with it twice: it takes long, and differs little.
    level
        Reason that the page gives where loaders are level.
    """

    title: str
    unit: str
    scale: float
    measure: str
    spec: dict[str, Any]
    loaders: tuple[str, ...]
    rounds: int = 5
    quick: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    level: str = ""


def _start(workers: int, **more: Any) -> dict[str, Any]:
    return {"workers": workers, "batch": 16, "start": "spawn", **more}


CASES: dict[str, Case] = {
    "large": Case(
        "a batch of 256 images (38 MB), collated and handed over",
        *("ms", 1e3, "pace"),
        {"dataset": "Images", "batch": 256, "workers": 2, "seconds": 0.6},
        (*TORCH_LIKE, *THREADS, *PROCESSES[:2]),
        quick={"batch": 16, "seconds": 0.05},
    ),
    "small": Case(
        "a batch of 64 integers: overhead alone",
        *("us", 1e6, "pace"),
        {"dataset": "Ints", "batch": 64, "workers": 2, "seconds": 0.6},
        (*TORCH_LIKE, *THREADS, *PROCESSES[:2]),
        quick={"seconds": 0.05},
    ),
    "jpeg": Case(
        "32 photographs (JPEG), decoded and resized",
        *("ms", 1e3, "pace"),
        {"dataset": "Jpegs", "batch": 32, "workers": 2, "seconds": 1.0},
        (*TORCH_LIKE, *THREADS, *PROCESSES[:2]),
        quick={"batch": 2, "seconds": 0.05},
        level="the decoder keeps both cores busy",
    ),
    "hybrid": Case(
        "a sample that waits 20 ms, decodes a JPEG and loops in Python",
        *("ms", 1e3, "per_item"),
        {
            "dataset": "Hybrid",
            "batch": 8,
            "workers": 2,
            "torch_workers": 16,
            "seconds": 1.5,
            "short": 40,
        },
        (
            *("torch", "pipeline, 3 stages", "pipeline, threads in processes"),
            *("torchdata 3 stages", "SPDL 3 stages", "Grain, threads in processes"),
        ),
        quick={"batch": 2, "torch_workers": 2, "seconds": 0.05, "short": 8},
        level="the work itself keeps both cores busy",
    ),
    "start2": Case(
        "first batch of 2 fresh workers, dataset without torch",
        *("s", 1.0, "first_batch", _start(2, dataset="Ints", length=4096)),
        ("torch", "spawn", *PROCESSES),
        quick={"workers": 1},
    ),
    "start16": Case(
        "first batch of 16 fresh workers, dataset without torch",
        *("s", 1.0, "first_batch", _start(16, dataset="Ints", length=4096)),
        ("torch", "spawn", *PROCESSES),
        rounds=3,
        quick={"workers": 2},
    ),
    "start16-torch": Case(
        "first batch of 16 fresh workers that import torch",
        *("s", 1.0, "first_batch", _start(16, dataset="Paths", length=300_000)),
        ("torch", "spawn"),
        rounds=3,
        quick={"workers": 1, "length": 300},
    ),
    "memory": Case(
        "memory of each further one of 16 fresh workers that import torch",
        *("MB", 1.0, "worker_memory", _start(16, dataset="Paths", length=300_000)),
        ("torch", "spawn", "torchdata processes"),
        rounds=1,
        quick={"workers": 2, "length": 300},
        alone=True,
    ),
    "slow": Case(
        "an epoch of 1,600 samples of which one in 16 takes 20 times as long, 8 workers",
        *("s", 1.0, "whole"),
        {"dataset": "Slow", "length": 1600, "batch": 16, "workers": 8},
        (
            *(*TORCH_LIKE, "torch, any order", "pipeline"),
            *(*THREADS, "torchdata by samples", "SPDL by samples", "Grain by samples"),
        ),
        rounds=3,
        quick={"length": 64},
        level="samples that wait keep all 8 workers busy: 1.28 s is the least",
    ),
    "epochs": Case(
        "from the last batch of an epoch to the first of the next, workers kept",
        *("ms", 1e3, "turn"),
        {"dataset": "Ints", "length": 12, "batch": 4, "workers": 2, "keep": True, "seconds": 0.5},
        (*TORCH_LIKE, *THREADS, *PROCESSES[:2]),
        quick={"seconds": 0.0},
    ),
    "disk": Case(
        "an epoch of 4,000 JPEGs in tar archives on disk, decoded",
        *("s", 1.0, "stored"),
        {
            "storage": "disk",
            "samples": 4000,
            "shards": 20,
            "width": 320,
            "batch": 64,
            "workers": 2,
        },
        ("threads", "fork", "webdataset", "torchdata threads"),
        rounds=3,
        quick={"samples": 80, "batch": 8},
    ),
    "store": Case(
        "an epoch of 4,800 JPEGs in tar archives in an object store",
        *("s", 1.0, "stored"),
        {
            "storage": "store",
            "samples": 4800,
            "shards": 48,
            "width": 480,
            "batch": 64,
            "workers": 2,
        },
        ("threads", "pipeline", "SPDL threads", "webdataset", "litdata"),
        rounds=3,
        quick={"samples": 80, "shards": 8, "batch": 8},
    ),
    "tables": Case(
        "an epoch of 5 million rows of Parquet, in order",
        *("s", 1.0, "stored"),
        {"storage": "tables", "samples": 5_000_000, "batch": 4096, "workers": 2},
        ("threads", "pyarrow"),
        rounds=3,
        quick={"samples": 4000},
    ),
    "resume": Case(
        "resume at photograph 1,600 of 2,000 (JPEG)",
        *("ms", 1e3, "resume"),
        {"dataset": "Jpegs", "length": 2000, "batch": 32, "workers": 2, "at": 50},
        ("torch", "threads", "fork", "torchdata stateful", "Grain threads"),
        rounds=3,
        quick={"length": 16, "batch": 2, "at": 4},
    ),
    "python": Case(
        "16 samples that loop in Python",
        *("ms", 1e3, "pace"),
        {"dataset": "Python", "batch": 16, "workers": 2, "seconds": 0.5},
        ("torch", "threads", "fork"),
        rounds=3,
        quick={"seconds": 0.05},
        level="the samples keep both cores busy",
    ),
}
"""Cases by name, in the order of the page. `python` is what differs without a GIL."""

FREE_THREADED = ("small", "jpeg", "python")
"""Cases of ``python -m benchmarks.free_threaded``, in which rivals that have no wheels are left out."""
