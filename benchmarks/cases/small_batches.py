"""P2 and P12: batches of a few integers, where a loader's overhead is all there is."""

from __future__ import annotations

from typing import Any

from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.cases.image_batches import most_loaders
from benchmarks.measurements import whole_epochs, window
from benchmarks.names import BACKENDS, FRESH_RIVALS, RIVAL_PROCESSES, RIVAL_THREADS
from benchmarks.results import Results
from benchmarks.targets import (
    NOT_MEASURED,
    Found,
    Target,
    ahead_of,
    chosen,
    faster_than_torch,
    flat,
)


def small_batches(options: Options) -> Case:
    """P2: batches of 64 integers."""
    spec = {
        "dataset": "ints",
        "batch": 64,
        "workers": options.workers,
        "seconds": 0.25 if options.quick else 1.0,
    }
    # Fresh processes take seconds to start, and the other forms of the same rivals are faster here.
    loaders = tuple(name for name in most_loaders(options) if name not in FRESH_RIVALS)
    variant = Variant("64 ints", spec, loaders)
    title = "small batches: nothing but overhead"
    return Case("P2", title, "us / batch", whole_epochs, (variant,), scale=1e6)


def of_workers_or_samples(loader: str, spec: Spec) -> Answer:
    """Seconds a batch; of a number of samples only the first batches, as 1,000 of them make 500."""
    return window(loader, spec) if "most" in spec else whole_epochs(loader, spec)


def many(options: Options) -> Case:
    """P12: more workers than cores; more and more samples, in order."""
    quick = options.quick
    base: dict[str, Any] = {"dataset": "ints", "look": 0.1, "batch": 8}
    rivals = RIVAL_THREADS[:1] if quick else (*RIVAL_THREADS, "torchdata processes")
    blanks = dict.fromkeys(
        () if quick else options.taking_part(*RIVAL_PROCESSES[1:]),
        "not measured: 64 fresh processes that import torch",
    )
    specs: dict[str, Spec] = {}
    for workers in (2, 8) if quick else (2, 8, 64):
        specs[f"{workers} workers"] = {"workers": workers, "seconds": 0.1 if quick else 0.4}
    for power in (3, 8):
        specs[f"1e{power} samples"] = {
            "arguments": {"length": 10**power},
            "batch": 2,
            "workers": options.workers,
            "seconds": 10.0,  # the number of batches decides: 1,000 samples make 500
            "most": 400,
            "repeats": 2 if quick else 7,  # 400 batches take some 12 ms
        }
    loaders = ("torch", *BACKENDS, *options.taking_part(*rivals), *blanks)
    variants = tuple(
        Variant(
            *(name, base | spec, loaders, blanks),
            most_rounds=options.most(3),
            seconds=1.0 if "most" in spec else 2.0,
        )
        for name, spec in specs.items()
    )
    title = "many workers, many samples"
    return Case("P12", title, "us / batch", of_workers_or_samples, variants, scale=1e6)


def _little_memory(results: Results, case: str) -> Found:
    """Iterating over 1e8 samples adds at most 10 MB to resident memory."""
    rows = chosen(results, case, "1e8", BACKENDS)
    grown = [(max(row.details.get("rss_growth_mb", [0.0])), row) for row in rows]
    if not grown:
        return NOT_MEASURED
    worst, row = max(grown, key=lambda pair: pair[0])
    return f"{worst:.1f} MB ({row.loader})", worst <= 10


_PROCESSES = ("fork", "shared-memory")
_OVERHEAD = (
    "A batch takes 10 to 12 us for the dataset and the collation alone. Two bare threads with queues "
    "take 10 to 17 us, two bare processes with sockets and pickles 13 to 15 us, by hand."
)
TARGETS = (
    faster_than_torch(
        *("P2", "shared-memory and fork >= 10x torch", 10, _PROCESSES), each=True, why=_OVERHEAD
    ),
    faster_than_torch("P2", "threads >= 10x torch", 10, ("threads",), why=_OVERHEAD),
    Target("P2", "threads ahead of torchdata.nodes", ahead_of(1, ("threads",), "torchdata")),
    Target(
        *("P12", "workers: <= 1.5x of 2 workers", flat("workers", 2, 1.5, BACKENDS)),
        why="It can be met on two cores: eight bare processes with a socket each, by hand, take 0.97 to "
        "1.5x what two take a batch (1.16x in the median of seven). Ours does no more for a batch with "
        "eight: the loop's process takes as much CPU time, a worker makes one `send` and at most one "
        "`recvmsg` for a task, has next to no page faults, and its other thread never wakes. What grows "
        "is the workers' CPU time, and so does that of the bare ones: on two cores more tasks find "
        "their worker asleep, and probably the caches full of another's.",
    ),
    Target("P12", "samples: <= 1.5x of 1e3", flat("samples", 1e3, 1.5, BACKENDS)),
    Target("P12", "1e8 samples: no list of indices (<= 10 MB)", _little_memory),
)
