"""P5, P6 and P8: the first batch, the turn of an epoch, and whole epochs over a small table."""

from __future__ import annotations

from typing import Any

from benchmarks.case import Case, Options, Variant
from benchmarks.measurements import epoch_turn, epochs, first_batch
from benchmarks.names import BACKENDS, DATALOADERS, RIVAL_PROCESSES, RIVAL_THREADS
from benchmarks.targets import Target, at_most, faster_than_torch


def start(options: Options) -> Case:
    """P5: the first batch from three fresh processes."""
    common: dict[str, Any] = {"batch": 16, "workers": 3, "start_method": "spawn", "look": 0.0}
    count = 200_000 if options.quick else 1_000_000
    specs = {
        "dataset without torch": common | {"dataset": "numbers", "arguments": {"length": 512}},
        f"paths, {count:,}": common | {"dataset": "paths", "arguments": {"count": count}},
    }
    loaders = ("torch", *_FRESH, *options.taking_part(*RIVAL_PROCESSES))
    variants = tuple(
        Variant(name, spec, loaders, most_rounds=options.most(3, quick=1))
        for name, spec in specs.items()
    )
    return Case("P5", "first batch, 3 fresh processes", "s", first_batch, variants)


def turn(options: Options) -> Case:
    """P6: from the last batch of an epoch to the first one of the next, workers kept."""
    spec = {
        "dataset": "ints",
        "arguments": {"length": 12},
        "batch": 4,
        "workers": options.workers,
        "keep": True,
        "look": 0.0,
        "turns": 30 if options.quick else 100,
        "patience": 0.5 if options.quick else 1.5,
    }
    rivals = RIVAL_THREADS if options.quick else (*RIVAL_THREADS, *RIVAL_PROCESSES)
    loaders = ("torch", *BACKENDS, "spawn", *options.taking_part(*rivals))
    variant = Variant("epochs of 3 batches", spec, loaders)
    return Case("P6", "turn of an epoch, workers kept", "ms", epoch_turn, (variant,), scale=1e3)


def table(options: Options) -> Case:
    """P8: epochs over a table in memory."""
    common: dict[str, Any] = {
        "dataset": "table",
        "batch": 256,
        "shuffled": True,
        "keep": True,
        "look": 0.2,
        "seconds": 0.2 if options.quick else 0.6,
    }
    loaders = ("torch", *BACKENDS, *options.taking_part(*RIVAL_THREADS, *RIVAL_PROCESSES))
    variants = (
        Variant("0 workers", common | {"workers": 0}, ("torch", "inline")),
        Variant(f"{options.workers} workers", common | {"workers": options.workers}, loaders),
    )
    return Case("P8", "TensorDataset 20000x20", "ms / epoch", epochs, variants, scale=1e3)


_FRESH = ("spawn", "shared-memory (loky)")
_WITHOUT_TORCH = "<= 0.4x torch's time, dataset without torch"
TARGETS = (
    faster_than_torch("P5", _WITHOUT_TORCH, 2.5, _FRESH, variant="dataset"),
    faster_than_torch("P5", "<= 0.25x torch's time, paths", 4, _FRESH, variant="paths"),
    Target(
        *("P6", "<= 0.2 ms", at_most(0.2, BACKENDS)),
        why="On this host at another hour (2026-11-22, 2 rounds) threads took 0.164 ms, and torch 1.13.",
    ),
    faster_than_torch("P6", "<= 0.2x torch's time", 5, BACKENDS),
    faster_than_torch(
        *("P8", ">= 20x torch", 20, DATALOADERS),
        why="Most of the time is torch's sampler, which hands out indices one by one, and "
        "`index_select`.",
    ),
)
