"""seeding: time that ``seeding="sample"`` adds to a sample, beside ``seeding="shared"``."""

from __future__ import annotations

import statistics
import time

from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.datasets.plain import ENDLESS, Ints, identity
from benchmarks.names import BACKENDS


def added_by_seeding(loader: str, spec: Spec) -> Answer:
    """Seconds a sample that seeding by sample adds, with one worker: the median over `repeats`.

    One worker, because then its work is what a batch takes. The two are measured in turn.
    """
    batch, batches = spec["batch"], spec["batches"]
    found = []
    for _ in range(spec["repeats"]):
        plain, seeded = (_seconds(loader, batch, batches, how) for how in ("shared", "sample"))
        found.append((plain / (batch * batches), seeded / (batch * batches)))
    details = {
        "shared": min(plain for plain, _ in found),
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
        sampler=range(ENDLESS),
        num_workers=0 if inline else 1,
        backend=None if inline else backend,
        collate_fn=identity,
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


def seeding(options: Options) -> Case:
    """Samples that are their own index."""
    spec = {
        "batch": 64,
        "batches": 40 if options.quick else 200,
        "repeats": 3 if options.quick else 7,
    }
    variant = Variant("64 ints", spec, ("inline", *BACKENDS))
    title, unit = "seeding every sample", "us / sample more"
    return Case("seeding", title, unit, added_by_seeding, (variant,), scale=1e6, check=False)
