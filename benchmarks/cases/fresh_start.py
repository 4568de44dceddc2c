"""fresh: the first batch from few and from many fresh workers."""

from __future__ import annotations

import gc
import time
from typing import Any

from benchmarks import timing, usage
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.measurements import open_running, work_of
from benchmarks.names import FRESH, TORCH_FORKSERVER
from benchmarks.results import Results, ratio
from benchmarks.targets import NOT_MEASURED, Found, Target, chosen, flat, short

TENSORS = ", tensors"
INTS = ", ints"
"""Ends of the names of the variants: workers that need torch, and that need none."""

_TORCHS = ("torch", TORCH_FORKSERVER)
_TORCH_MOST = 16
"""Workers that torch's loader is measured with: 64 that import torch take a minute of two cores."""


def first_batches(loader: str, spec: Spec) -> Answer:
    """Seconds from ``iter()`` to the first batch; CPU time until each worker has delivered one.

    As details the seconds until ``iter()`` returned, and until each worker has delivered one.
    """
    work = work_of(spec)
    gc.collect()
    meter = usage.CpuMeter()
    meter.start()
    start = time.perf_counter()
    with open_running(loader, work) as running:
        batches = running.epoch()
        began = time.perf_counter() - start
        first, every = timing.first_batches(batches, work.workers, start, time.perf_counter)
        cpu = meter.stop()
    return {"value": first, "cpu": cpu, "details": {"iter": began, "every_worker": every}}


def fresh_start(options: Options) -> Case:
    """1 to 64 fresh workers, over 300,000 paths whose samples are tensors, and over integers."""
    common: dict[str, Any] = {"batch": 16, "start_method": "spawn", "look": 0.0, "checked": 1}
    count = 100_000 if options.quick else 300_000
    specs = {
        TENSORS: common | {"dataset": "path tensors", "arguments": {"count": count}},
        INTS: common | {"dataset": "ints", "arguments": {"length": 16_384}},
    }
    ours = FRESH[:1] if options.quick else FRESH
    why = f"not measured: more than {_TORCH_MOST} processes that import torch"
    variants = tuple(
        Variant(
            f"{workers} worker{'s' if workers > 1 else ''}{words}",
            spec | {"workers": workers},
            (*_TORCHS, *ours),
            dict.fromkeys(_TORCHS, why) if workers > _TORCH_MOST else {},
            most_rounds=options.most(3, quick=1),
            again=FRESH[0],
            seconds=2.0,
        )
        for words, spec in specs.items()
        for workers in ((1, 16) if options.quick else (1, 4, 16, 64))
    )
    title = "first batch from fresh workers"
    return Case("fresh", title, "s", first_batches, variants, check=not options.quick)


def _sooner_than_both(results: Results, case: str) -> Found:
    """`spawn` with 16 workers is 5 times sooner than torch with spawn and with a forkserver."""
    found = []
    for row in chosen(results, case, "16 workers", FRESH[:1]):
        for name in _TORCHS:
            quotient = ratio(results.find(case, row.variant, name), row)
            if quotient is not None:
                found.append((quotient, name, row.variant))
    if not found:
        return NOT_MEASURED
    worst, name, variant = min(found)
    return f"{short(worst)}x {name} ({variant})", worst >= 5


TARGETS = (
    Target("fresh", "16 workers: <= 1.5x one, tensors", flat(TENSORS, 1, 1.5, FRESH[:1], 16)),
    Target("fresh", "16 workers: <= 1.5x one, ints", flat(INTS, 1, 1.5, FRESH[:1], 16)),
    Target("fresh", "64 workers: <= 2.5x one, tensors", flat(TENSORS, 1, 2.5, FRESH[:1])),
    Target("fresh", "64 workers: <= 2.5x one, ints", flat(INTS, 1, 2.5, FRESH[:1])),
    Target("fresh", "16 workers: >= 5x sooner than torch", _sooner_than_both, 5, "16 workers"),
)
