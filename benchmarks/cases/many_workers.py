"""P17: the life of a loader with 64 and 256 workers."""

from __future__ import annotations

import gc
import os
import time

from benchmarks import timing, usage
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.measurements import work_of
from benchmarks.names import BACKENDS
from benchmarks.targets import Target, flat

LOADERS = (*BACKENDS, "spawn")


def life(loader: str, spec: Spec) -> Answer:
    """Seconds a worker, from ``iter()`` until all have delivered, and from ``close()`` to its end.

    The details are of the whole loader, in seconds: until ``iter()`` returned, until the first batch,
    until all workers have delivered one, the turn of an epoch with workers kept, and the end. And in MB
    of PSS, without mapped files, what a worker adds.
    """
    from benchmarks.loaders.opening import open_loader

    work = work_of(spec)
    gc.collect()
    before = usage.memory_mb(os.getpid(), files=False)
    start = time.perf_counter()
    running = open_loader(loader, work)
    try:
        batches = running.epoch()
        began = time.perf_counter() - start
        first, every = timing.first_batches(batches, work.workers, start, time.perf_counter)
        memory = usage.memory_mb(os.getpid(), files=False) - before
        for _ in batches:
            pass
        turn = min(timing.turns(running.epoch, spec["turns"], time.perf_counter))
    finally:
        del batches
        ended = time.perf_counter()
        running.close()
    close = time.perf_counter() - ended
    details = {
        "iter": began,
        "first_batch": first,
        "every_worker": every,
        "turn": turn,
        "close": close,
        "memory_mb_per_worker": memory / work.workers,
    }
    return {"value": (every + close) / work.workers, "details": details}


def many_workers(options: Options) -> Case:
    """Batches of integers from more workers than any machine of two cores needs."""
    counts = (16, 64) if options.quick else (64, 256)
    variants = tuple(
        Variant(
            f"{workers} workers",
            {
                "dataset": "ints",
                "arguments": {"length": 8 * 4 * workers},
                "batch": 8,
                "workers": workers,
                "keep": True,
                "turns": 3,
                "checked": 1,
                "look": 0.0,
            },
            ("torch", *LOADERS),
            most_rounds=options.most(3, quick=1),
            again="threads",
            seconds=3.0,
        )
        for workers in counts
    )
    return Case("P17", "start and end of many workers", "ms / worker", life, variants, scale=1e3)


TARGETS = (
    Target("P17", "a worker of 256: <= 1.25x one of 64", flat("workers", 64, 1.25, LOADERS, 256)),
)
