"""What ``seeding="sample"`` costs: time a sample beside that of ``seeding="worker"``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.datasets import plain as light
from benchmarks.harness import Case, Variant

if TYPE_CHECKING:
    from benchmarks.measurements import Answer
    from benchmarks.registry import Options

LENGTH = 1 << 40


class Ints:
    """Samples that are made in no time."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def seeding(loader: str, spec: dict[str, Any]) -> Answer:
    """Seconds a sample that seeding by sample adds, with one worker: the median over `repeats`.

    One worker, because then its work is what a batch takes. The two are measured in turn.
    """
    batch, batches = spec["batch"], spec["batches"]
    found = []
    for _ in range(spec["repeats"]):
        plain, seeded = (_seconds(loader, batch, batches, how) for how in ("worker", "sample"))
        found.append((plain / (batch * batches), seeded / (batch * batches)))
    details = {
        "worker": min(plain for plain, _ in found),
        "sample": min(seeded for _, seeded in found),
    }
    return {
        "value": statistics.median(after - before for before, after in found),
        "details": details,
    }


def _seconds(backend: str, batch: int, batches: int, how: str) -> float:
    from hybridloader import DataLoader

    inline = backend == "inline"
    loader = DataLoader(
        Ints(),  # type: ignore[arg-type]  # no subclass of torch's, on purpose: it need not be one
        batch,
        sampler=range(LENGTH),
        num_workers=0 if inline else 1,
        backend=None if inline else backend,
        collate_fn=light.nothing,
        seeding=how,
    )
    items = iter(loader)
    try:
        for _ in range(batches // 4 + 4):
            next(items)
        began = time.perf_counter()
        for _ in range(batches):
            next(items)
        return time.perf_counter() - began
    finally:
        items.close()  # type: ignore[attr-defined]


def case(options: Options) -> Case:
    """Samples that are nothing but their index."""
    spec = {
        "batch": 64,
        "batches": 40 if options.quick else 200,
        "repeats": 3 if options.quick else 7,
    }
    variant = Variant("64 ints", spec, ("inline", "threads", "fork", "shared-memory"))
    title = "seeding every sample"
    return Case("seeding", title, "us / sample more", "seeding", (variant,), scale=1e6, check=False)


JOBS: dict[str, Callable[[str, dict[str, Any]], Answer]] = {"seeding": seeding}
