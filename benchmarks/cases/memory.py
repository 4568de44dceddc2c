"""P7: memory of all processes over a large dataset of strings."""

from __future__ import annotations

from typing import Any

from benchmarks.case import Case, Options, Variant
from benchmarks.measurements import hold
from benchmarks.names import BACKENDS, OURS, RIVAL_THREADS
from benchmarks.results import Results
from benchmarks.targets import NOT_MEASURED, Found, Target


def memory(options: Options) -> Case:
    """Paths in a list, and in a `SharedList`, after a shuffled epoch with four workers."""
    count = 200_000 if options.quick else 1_000_000
    shared: dict[str, Any] = {"arguments": {"count": count, "container": "shared"}}
    common: dict[str, Any] = {
        "dataset": "paths",
        "batch": 1000,
        "workers": 4,
        "keep": True,
        "shuffled": True,
        "limit_spec": shared | {"workers": 0},
    }
    loaders = ("limit", "torch", *BACKENDS, *(() if options.quick else ("spawn",)))
    rivals = () if options.quick else (*RIVAL_THREADS, "torchdata processes")
    most = options.most(2, quick=1)
    variants = (
        Variant(
            f"{count:,} paths, list",
            common | {"arguments": {"count": count}},
            (*loaders, *options.taking_part(*rivals)),
            most_rounds=most,
            seconds=7.0,
        ),
        Variant(
            f"{count:,} paths, SharedList", common | shared, loaders, most_rounds=most, seconds=7.0
        ),
    )
    title = "memory of all processes after an epoch, 4 workers"
    return Case("P7", title, "MB of PSS", hold, variants, kind="weigh", check=False)


def _of_one_process(results: Results, case: str) -> Found:
    """Each of ours with a SharedList takes at most 1.15 times the memory of one process with it."""
    rows = [m for m in results.of(case) if m.variant.endswith("SharedList") and m.loader in OURS]
    sizes = [(1 / m.versus_limit, m) for m in rows if m.versus_limit]
    if not sizes:
        return NOT_MEASURED
    worst, row = max(sizes, key=lambda pair: pair[0])
    return f"{worst:.2f}x ({row.loader})", worst <= 1.15


TARGETS = (Target("P7", "SharedList: <= 1.15x one process", _of_one_process),)
