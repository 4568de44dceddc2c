"""Jobs that are passed or failed: few descriptors, little /dev/shm, very many batches."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks import usage as cost
from benchmarks.measurements import Answer, digest, opened

MEMORY_MB = 8.0
"""Growth that is none yet: a few slots and the allocator's arenas come and go."""

DESCRIPTORS = 4
"""Likewise: descriptors of slots that are under way just then."""


def descriptors(loader: str, spec: dict[str, Any]) -> Answer:
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


def devshm(loader: str, spec: dict[str, Any]) -> Answer:
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


def _by_hand(spec: dict[str, Any]) -> Any:
    import torch

    from benchmarks.measurements import work_of

    work = work_of(spec)
    return torch.stack([work.dataset[index] for index in range(work.batch)])


def endurance(loader: str, spec: dict[str, Any]) -> Answer:
    """Growth of memory, descriptors and threads between a tenth of the batches and all of them."""
    total = spec["batches"]
    with opened(loader, spec) as running:
        batches = running.epoch()
        for _ in itertools.islice(batches, total // 10):
            pass
        start, since = cost.usage(), time.perf_counter()
        for _ in itertools.islice(batches, total - total // 10):
            pass
        seconds = time.perf_counter() - since
        end = cost.usage()
    growth = {name: end[name] - start[name] for name in start}
    passed = (
        growth["memory_mb"] <= MEMORY_MB
        and growth["descriptors"] <= DESCRIPTORS
        and growth["threads"] <= 0
        and growth["processes"] <= 0
    )
    details = {"growth": growth, "end": end, "us_per_batch": seconds / (total * 0.9) * 1e6}
    return {"value": growth["memory_mb"], "passed": passed, "details": details}


JOBS: dict[str, Callable[[str, dict[str, Any]], Answer]] = {
    job.__name__: job for job in (descriptors, devshm, endurance)
}
