"""footprint: memory that each further worker adds."""

from __future__ import annotations

import itertools
import os
from typing import Any

from benchmarks import usage
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.measurements import open_running, work_of
from benchmarks.names import FRESH, TORCH_FORKSERVER
from benchmarks.targets import Target, at_most


def of_a_further_worker(loader: str, spec: Spec) -> Answer:
    """MB of PSS of all processes with `workers` workers less those with one, for each further one.

    When each worker has delivered two batches; as details the same at the end of the epoch, and what
    all processes take with one worker.
    """
    further = spec["workers"] - 1
    one, many = (_begun_and_done(loader, spec | {"workers": n}) for n in (1, further + 1))
    begun, done = ((after - before) / further for before, after in zip(one, many, strict=True))
    return {"value": begun, "details": {"end_of_epoch_mb": done, "one_worker_mb": one[0]}}


def _begun_and_done(loader: str, spec: Spec) -> tuple[float, float]:
    """MB of PSS after two batches of each worker, and before the last batch of the epoch."""
    work = work_of(spec)
    with open_running(loader, work) as running:
        batches = running.epoch()
        begun = 2 * work.workers
        for _ in itertools.islice(batches, begun):
            pass
        first = usage.memory_mb(os.getpid(), files=True)
        for _ in itertools.islice(batches, len(work.dataset) // work.batch - begun - 1):
            pass
        return first, usage.memory_mb(os.getpid(), files=True)


def worker_memory(options: Options) -> Case:
    """16 fresh workers: over paths in a list and in a `SharedList`, as tensors, and over integers."""
    common: dict[str, Any] = {
        "batch": 16,
        "workers": 16,
        "start_method": "spawn",
        "shuffled": True,
    }
    count = 100_000 if options.quick else 300_000
    specs = {
        "tensors": common | {"dataset": "path tensors", "arguments": {"count": count}},
        "tensors, SharedList": common
        | {"dataset": "path tensors", "arguments": {"count": count, "container": "shared"}},
        "ints": common | {"dataset": "ints", "arguments": {"length": count}},
    }
    loaders = FRESH[:1] if options.quick else ("torch", TORCH_FORKSERVER, *FRESH)
    variants = tuple(
        Variant(
            f"{count:,} {words}, 16 workers",
            spec,
            loaders,
            most_rounds=options.most(2, 1),
            seconds=8.0,
        )
        for words, spec in specs.items()
    )
    title, unit = "memory of each further worker", "MB of PSS"
    return Case("footprint", title, unit, of_a_further_worker, variants, "weigh", check=False)


TARGETS = (Target("footprint", "<= 15 MB of PSS", at_most(15, FRESH[:1])),)
