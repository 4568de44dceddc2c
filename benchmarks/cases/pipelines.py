"""The cases that are about pipelines: three kinds of work at once, and what the machinery costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.datasets.remote import SIDE, loops_for, width_for
from benchmarks.harness import Case, Variant
from benchmarks.results import HYBRIDS, PIPELINE

if TYPE_CHECKING:
    from benchmarks.registry import Options

WAITING_MS, DECODING, LOOPING = 20, 2e-3, 2e-3
"""What an item of P4 takes: ms of waiting, seconds of work without the GIL, and seconds with it."""

BATCH = 16

MANY = (8, 16, 32)
"""Workers of those who may have as many as they like."""

ALONE = ("read alone", "decode alone", "augment alone")

_THREADS = ("torchdata threads", "SPDL threads", "SPDL subprocess", "Grain threads")
_PROCESSES = ("torchdata processes", "SPDL processes", "Grain processes")
_STAGES = ("torchdata stages", "SPDL stages")


def p4(options: Options) -> Case:
    """The hybrid."""
    spec: dict[str, Any] = {
        "dataset": "remote",
        "arguments": {
            "width": width_for(DECODING),
            "loops": loops_for(LOOPING),
            "delay_ms": WAITING_MS,
        },
        "stages": 3,
        "batch": BATCH,
        "batch_bytes": BATCH * 3 * SIDE * SIDE,
        "cores": options.cores,
        "limit_workers": options.cores,
        "seconds": 1.0 if options.quick else 4.0,
        "look": 0.5 if options.quick else 2.5,
    }
    rounds = options.most(2 if options.quick else 3)
    few = _few(options, spec, rounds)
    several = (16,) if options.quick else MANY
    return Case(
        "P4",
        "wait, decode, loop: a hybrid",
        "ms / item",
        "sustained",
        (few, *(_more(options, spec, rounds, workers) for workers in several)),
        scale=1e3,
    )


def _few(options: Options, spec: dict[str, Any], rounds: int) -> Variant:
    """As many processes as there are cores, and any number of threads."""
    ours = (PIPELINE,) if options.quick else HYBRIDS
    threads = _THREADS[1:2] if options.quick else _THREADS
    rivals = options.others(*threads, *_PROCESSES, *_STAGES)
    loaders = ("together", *ALONE, "torch", *ours, *rivals)
    name = f"{options.cores} processes"
    return Variant(name, spec | {"workers": options.cores}, loaders, most_rounds=rounds)


def _more(options: Options, spec: dict[str, Any], rounds: int, workers: int) -> Variant:
    """More of them. Ours is the same as with few."""
    rivals = options.others(*(() if options.quick else _PROCESSES), *_STAGES)
    return Variant(
        f"{workers} processes",
        spec | {"workers": workers},
        ("torch", PIPELINE, *rivals),
        most_rounds=rounds,
    )


def stage(options: Options) -> Case:
    """An empty stage."""
    spec: dict[str, Any] = {
        "workers": options.workers,
        "stages": 1,
        "seconds": 0.15 if options.quick else 0.5,
        "repeats": 3 if options.quick else 5,
        "warmup": 500,
    }
    rivals = options.others(
        "torchdata threads", "SPDL threads", "torchdata processes", "SPDL processes"
    )
    one = ("inline", "threads", "fork", "shared-memory", *rivals)
    six = ("threads, by hand", "threads", "threads, not fused")
    variants = (
        Variant("an empty stage", spec, one),
        Variant("six empty stages", spec | {"stages": 6}, six),
    )
    title = "what an empty stage adds"
    return Case("stage", title, "us / item", "empty_stage", variants, scale=1e6, check=False)


def tick(options: Options) -> Case:
    """1 ms of Python in the loop, late."""
    common: dict[str, Any] = {
        "stages": 1,
        "workers": options.workers,
        "batch": 4,
        "tick_loops": loops_for(1e-3),
        "seconds": 1.5 if options.quick else 5.0,
        "ticks": 100 if options.quick else 300,
        "look": 0.1,
    }
    jpegs = common | {"dataset": "jpegs"}
    spinning = common | {"dataset": "spinning", "arguments": {"loops": loops_for(LOOPING)}}
    rivals = options.others(
        "torchdata threads", "SPDL threads", "SPDL subprocess", "torchdata processes"
    )
    loaders = ("torch", "threads", "fork", "shared-memory", *rivals)
    variants = (
        Variant("behind it JPEGs", jpegs, loaders, most_rounds=options.most(3)),
        Variant("behind it Python", spinning, loaders, most_rounds=options.most(3)),
    )
    title = "how late 1 ms of Python in the loop is done, 99th percentile"
    return Case("tick", title, "ms late", "tick", variants, scale=1e3)


def books(options: Options) -> Case:
    """What `stats()` reads, kept."""
    spec: dict[str, Any] = {
        "workers": options.workers,
        "batch": 64,
        "batches": 300,
        "seconds": 0.15 if options.quick else 0.5,
        "repeats": 3 if options.quick else 9,
    }
    variant = Variant("64 ints", spec, ("threads", "fork", "shared-memory"))
    title = "the part of the time that goes into the books"
    return Case("books", title, "% of the time", "books", (variant,), scale=100, check=False)
