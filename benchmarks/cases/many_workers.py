"""P17: the life of a loader with 64 and 256 workers."""

from __future__ import annotations

import gc
import os
import statistics
import time

from benchmarks import timing, usage
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.measurements import work_of
from benchmarks.names import BACKENDS
from benchmarks.results import Results
from benchmarks.targets import NOT_MEASURED, Found, Judge, Target, flat, short

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


def flat_detail(name: str, bound: float, shared: bool = True) -> Judge:
    """A detail is at most `bound` times as much, for each worker, with 256 workers as with 64.

    Parameters
    ----------
    shared
        True if the detail is of the whole loader and is to be divided by the number of workers.
    """

    def judge(results: Results, case: str) -> Found:
        found = []
        for loader in LOADERS:
            few, many = (results.find(case, f"{n} workers", loader) for n in (64, 256))
            if few is not None and many is not None:
                more = statistics.median(many.details[name]) / statistics.median(few.details[name])
                found.append((more / (4 if shared else 1), loader))
        if not found:
            return NOT_MEASURED
        worst, loader = max(found)
        return f"{short(worst)}x ({loader})", worst <= bound

    return judge


_TURN = (
    "The CPU time is flat: of the loop's process for a worker, and of a worker, with 16, 64 and 256 of "
    "them. What grows on two cores is the wait for one: the loop's process wakes the workers one "
    "by one, and the more of them it has woken, the more often it is preempted, by a worker that runs "
    "first, before it has woken all."
)
_END = (
    "By hand, 15 times each, closing took 77 to 136 us a worker with 64 threads, and 119 to 255 with "
    "256; bare threads, which only take one object from a queue, 74 to 101 and 90 to 101."
)
TARGETS = (
    Target("P17", "a worker of 256: <= 1.5x one of 64", flat("workers", 64, 1.5, LOADERS, 256)),
    Target("P17", "first batch, a worker: <= 1.5x", flat_detail("first_batch", 1.5)),
    Target("P17", "turn of an epoch, a worker: <= 1.5x", flat_detail("turn", 1.5), why=_TURN),
    Target("P17", "end, a worker: <= 1.5x", flat_detail("close", 1.5), why=_END),
    Target(
        "P17", "memory a worker: <= 1.5x", flat_detail("memory_mb_per_worker", 1.5, shared=False)
    ),
)
