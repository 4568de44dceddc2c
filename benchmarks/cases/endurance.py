"""descriptors, devshm and endurance: cases that are passed or failed."""

from __future__ import annotations

import itertools
import resource
import time
from typing import Any

import psutil

from benchmarks import usage
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.measurements import digest, opened, work_of
from benchmarks.names import BACKENDS
from benchmarks.targets import Target, all_pass

MEMORY_MB = 8.0
"""Growth in MB that passes: a few slots and the allocator's arenas come and go."""

DESCRIPTORS = 4
"""Growth in descriptors that passes: those of slots that are under way just then."""


def keep_batches(loader: str, spec: Spec) -> Answer:
    """Keep all batches while the process may have 256 descriptors."""
    own = psutil.Process()  # the limit is each process's own
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
    try:
        with opened(loader, spec) as running:
            start = own.num_fds()
            kept = list(itertools.islice(running.epoch(), spec["batches"]))
            held = own.num_fds() - start
            right = all(int(b[0, 0]) == i % 251 for i, b in enumerate(kept))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    passed = right and len(kept) == spec["batches"]
    return {"value": held, "passed": passed, "details": {"kept": len(kept)}}


def small_shm(loader: str, spec: Spec) -> Answer:
    """Seconds a batch of 38 MB where /dev/shm has 64 MB; the harness has mounted it so."""
    with opened(loader, spec) as running:
        batches = running.epoch()
        start = time.perf_counter()
        found = list(itertools.islice(batches, 6))
        wrong = digest(found[:1]) != digest([_by_hand(spec)])
        del found
        for _ in itertools.islice(batches, spec["batches"] - 6):
            pass
        seconds = time.perf_counter() - start
    return {"value": seconds / spec["batches"], "passed": not wrong}


def _by_hand(spec: Spec) -> Any:
    import torch

    work = work_of(spec)
    return torch.stack([work.dataset[index] for index in range(work.batch)])


def growth(loader: str, spec: Spec) -> Answer:
    """Growth of memory, descriptors and threads between a tenth of the batches and all of them."""
    total = spec["batches"]
    with opened(loader, spec) as running:
        batches = running.epoch()
        for _ in itertools.islice(batches, total // 10):
            pass
        start, since = usage.holdings(), time.perf_counter()
        for _ in itertools.islice(batches, total - total // 10):
            pass
        seconds = time.perf_counter() - since
        end = usage.holdings()
    grown = {name: end[name] - start[name] for name in start}
    passed = (
        grown["memory_mb"] <= MEMORY_MB
        and grown["descriptors"] <= DESCRIPTORS
        and grown["threads"] <= 0
        and grown["processes"] <= 0
    )
    details = {"growth": grown, "end": end, "us_per_batch": seconds / (total * 0.9) * 1e6}
    return {"value": grown["memory_mb"], "passed": passed, "details": details}


def descriptors(options: Options) -> Case:
    spec = {
        "dataset": "blocks",
        "arguments": {"size": 65536},
        "batch": 1,
        "workers": 8,
        "batches": 1_500 if options.quick else 10_000,
        "timeout": 60.0 if options.quick else 120.0,
    }
    name = f"ulimit -n 256, 8 workers, {spec['batches']:,} batches kept"
    variant = Variant(name, spec, ("torch", *BACKENDS))
    title = "few descriptors"
    return Case("descriptors", title, "descriptors more", keep_batches, (variant,), kind="pass")


def devshm(options: Options) -> Case:
    spec = {
        "dataset": "images",
        "arguments": {"dtype": "uint8"},
        "batch": 256,
        "workers": options.workers,
        "batches": 20,
        "small_devshm": True,
        "timeout": 60.0,
    }
    variant = Variant("64 MB of /dev/shm, batches of 38 MB", spec, ("torch", *BACKENDS))
    title = "little /dev/shm"
    return Case("devshm", title, "ms / batch", small_shm, (variant,), kind="pass", scale=1e3)


def endurance(options: Options) -> Case:
    spec = {
        "dataset": "blocks",
        "arguments": {"size": 65536},
        "batch": 1,
        "workers": options.workers,
        "batches": 5_000 if options.quick else 200_000,
        "timeout": 60.0 if options.quick else 300.0,
    }
    variant = Variant(f"{spec['batches']:,} batches of 64 kB", spec, ("torch", *BACKENDS))
    return Case("endurance", "a long run", "MB more", growth, (variant,), kind="pass")


TARGETS = (
    Target("descriptors", "no error", all_pass(BACKENDS)),
    Target("devshm", "no error", all_pass(BACKENDS)),
    Target("endurance", "no growth", all_pass(BACKENDS)),
)
