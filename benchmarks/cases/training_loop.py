"""tick: lateness of the training loop's own Python while workers are busy."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.calibration import loops_for
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.datasets.plain import spin
from benchmarks.measurements import opened
from benchmarks.names import BACKENDS
from benchmarks.timing import fastest, percentile


def lateness(loader: str, spec: Spec) -> Answer:
    """Seconds that 1 ms of Python takes longer in the loop than alone, while all workers work.

    The loop takes a batch, does 1 ms of Python, and takes the next one: less work than a batch is, so
    the loader is never ahead and its workers never rest. The value is the 99th percentile.
    """
    loops = spec["tick_loops"]
    alone = fastest(lambda: spin(loops), 50)
    late: list[float] = []
    with opened(loader, spec) as running:
        batches = running.epoch()
        for _ in range(2 * spec["workers"] + 4):
            next(batches)
        until = time.perf_counter() + spec["seconds"]
        while time.perf_counter() < until or len(late) < spec["ticks"]:
            next(batches)
            began = time.perf_counter()
            spin(loops)
            late.append(time.perf_counter() - began - alone)
    details = {"max": max(late) * 1e3, "median": percentile(late, 0.5) * 1e3, "ticks": len(late)}
    return {"value": percentile(late, 0.99), "details": details}


def tick(options: Options) -> Case:
    """1 ms of Python in the training loop, while workers decode JPEGs or run Python."""
    common: dict[str, Any] = {
        "stages": 1,
        "workers": options.workers,
        "batch": 4,
        "tick_loops": loops_for(1e-3),
        "seconds": 1.5 if options.quick else 3.0,
        "ticks": 100 if options.quick else 300,
        "look": 0.1,
    }
    jpegs = common | {"dataset": "jpegs"}
    spinning = common | {"dataset": "spinning", "arguments": {"loops": loops_for(2e-3)}}
    rivals = options.taking_part(
        "torchdata threads", "SPDL threads", "SPDL subprocess", "torchdata processes"
    )
    loaders = ("torch", *BACKENDS, *rivals)
    variants = (
        Variant("behind it JPEGs", jpegs, loaders, most_rounds=options.most(3), seconds=4.5),
        Variant("behind it Python", spinning, loaders, most_rounds=options.most(3), seconds=4.5),
    )
    title = "how late 1 ms of Python in the loop is done, 99th percentile"
    return Case("tick", title, "ms late", lateness, variants, scale=1e3)
