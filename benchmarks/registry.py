"""The cases: what each measures, on which data, and who takes part."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import device as devices
from benchmarks.cases import pipelines as pipeline_cases
from benchmarks.cases import resuming, seeding
from benchmarks.harness import Case, Variant
from benchmarks.results import Measurement

IMAGE = 3 * 224 * 224
"""Bytes of one image."""

THREADS = ("torchdata threads", "SPDL threads", "Grain threads")
PROCESSES = ("torchdata processes", "SPDL subprocess", "SPDL processes", "Grain processes")
OURS = ("threads", "fork", "shared-memory")

NAMES = (
    "P1",
    "P2",
    "P3",
    "P4",
    "P5",
    "P6",
    "P7",
    "P8",
    "P9",
    "P11",
    "P12",
    "stage",
    "tick",
    "books",
    "P10",
    "resume",
    "seeding",
)
LONG_NAMES = ("descriptors", "devshm", "endurance")


class UnknownCase(ValueError):
    """There is no such case; the message lists those there are."""


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    workers: int = 2
    quick: bool = False
    rivals: bool = True
    caps: bool = True
    """Whether what is slow and steady gets fewer rounds; not when the user said how many."""

    @property
    def cores(self) -> int:
        """Workers that can work at the same time."""
        return min(self.workers, len(os.sched_getaffinity(0)))

    def most(self, rounds: int) -> int:
        return rounds if self.caps else 1 << 30

    def others(self, *names: str) -> tuple[str, ...]:
        """Those of the rivals that take part. Starting fresh processes takes them seconds each time."""
        if self.quick:
            names = tuple(name for name in names if name not in PROCESSES[2:])
        return names if self.rivals else ()


def _everybody(options: Options) -> tuple[str, ...]:
    """All loaders; a quick run leaves out `spawn`, which takes 2 s to start each time."""
    ours = OURS if options.quick else (*OURS, "spawn")
    return ("limit", "torch", "inline", *ours, *options.others(*THREADS, *PROCESSES))


def _images(options: Options, sizes: Sequence[tuple[str, int]]) -> tuple[Variant, ...]:
    variants = []
    for label, batch in sizes:
        for dtype in ("uint8",) if options.quick else ("uint8", "float32"):
            spec = {
                "dataset": "images",
                "arguments": {"dtype": dtype},
                "batch": batch,
                "batch_bytes": batch * IMAGE,
                "workers": options.workers,
                "recycled": True,
                "limit_workers": options.cores,
                "seconds": 0.25 if options.quick else 0.6,
                "look": 0.2 if options.quick else 0.4,
            }
            # What starts fresh processes takes seconds each time: at 38 MB of uint8 will do.
            everybody, rounds = ("together", *_everybody(options)), 5 if batch == 256 else 3
            if (batch, dtype) != (256, "uint8"):
                everybody = tuple(n for n in everybody if n not in ("spawn", *PROCESSES[2:]))
            name = f"{label} {dtype}"
            variants.append(Variant(name, spec, everybody, most_rounds=options.most(rounds)))
    return tuple(variants)


def _p1(options: Options) -> Case:
    sizes = [("38 MB", 256)] if options.quick else [("10 MB", 66), ("38 MB", 256), ("150 MB", 1000)]
    variants = _images(options, sizes)
    title = "large batches: stack and carry"
    return Case("P1", title, "ms / batch", "steady", variants, scale=1e3)


def _p2(options: Options) -> Case:
    spec = {
        "dataset": "ints",
        "batch": 64,
        "workers": options.workers,
        "seconds": 0.25 if options.quick else 1.0,
    }
    variant = Variant("64 ints", spec, _everybody(options))
    title = "small batches: nothing but overhead"
    return Case("P2", title, "us / batch", "steady", (variant,), scale=1e6)


def _p3(options: Options) -> Case:
    spec = {
        "dataset": "jpegs",
        "batch": 32,
        "batch_bytes": 32 * IMAGE,
        "workers": options.workers,
        "limit_workers": options.cores,
        "seconds": 0.5 if options.quick else 1.5,
    }
    variant = Variant("500x375, batch 32", spec, ("together", *_everybody(options)))
    return Case("P3", "decode and resize JPEGs", "ms / batch", "steady", (variant,), scale=1e3)


def _p5(options: Options) -> Case:
    common: dict[str, Any] = {"batch": 16, "workers": 3, "start_method": "spawn", "look": 0.0}
    count = 200_000 if options.quick else 1_000_000
    specs = {
        "dataset without torch": common | {"dataset": "numbers", "arguments": {"length": 512}},
        f"paths, {count:,}": common | {"dataset": "paths", "arguments": {"count": count}},
    }
    loaders = ("torch", "spawn", "shared-memory (loky)", *options.others(*PROCESSES))
    variants = tuple(
        Variant(name, spec, loaders, most_rounds=options.most(1 if options.quick else 3))
        for name, spec in specs.items()
    )
    title = "first batch, 3 fresh processes"
    return Case("P5", title, "s", "first_batch", variants)


def _p6(options: Options) -> Case:
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
    rivals = THREADS if options.quick else (*THREADS, *PROCESSES)
    loaders = ("torch", *OURS, "spawn", *options.others(*rivals))
    variant = Variant("epochs of 3 batches", spec, loaders)
    title = "turn of an epoch, workers kept"
    return Case("P6", title, "ms", "epoch_turn", (variant,), scale=1e3)


def _p7(options: Options) -> Case:
    count = 200_000 if options.quick else 1_000_000
    common: dict[str, Any] = {
        "dataset": "paths",
        "batch": 1000,
        "workers": 4,
        "keep": True,
        "shuffled": True,
        "limit_spec": {"arguments": {"count": count, "container": "shared"}, "workers": 0},
    }
    plain = common | {"arguments": {"count": count}}
    shared = common | {"arguments": {"count": count, "container": "shared"}}
    loaders = ("limit", "torch", *OURS) if options.quick else ("limit", "torch", *OURS, "spawn")
    rivals = () if options.quick else options.others(*THREADS, "torchdata processes")
    variants = (
        Variant(
            f"{count:,} paths, list",
            plain,
            (*loaders, *rivals),
            most_rounds=options.most(1 if options.quick else 2),
        ),
        Variant(
            f"{count:,} paths, SharedList",
            shared,
            loaders,
            most_rounds=options.most(1 if options.quick else 2),
        ),
    )
    title = "memory of all processes after an epoch, 4 workers"
    return Case("P7", title, "MB of PSS", "hold", variants, kind="weigh", check=False)


def _p8(options: Options) -> Case:
    common: dict[str, Any] = {
        "dataset": "table",
        "batch": 256,
        "shuffled": True,
        "keep": True,
        "look": 0.2,
        "seconds": 0.2 if options.quick else 0.6,
    }
    with_workers = ("torch", *OURS, *options.others(*THREADS, *PROCESSES))
    variants = (
        Variant("0 workers", common | {"workers": 0}, ("torch", "inline")),
        Variant(f"{options.workers} workers", common | {"workers": options.workers}, with_workers),
    )
    return Case("P8", "TensorDataset 20000x20", "ms / epoch", "epochs", variants, scale=1e3)


def _p9(options: Options) -> Case:
    case = _p1(options)
    variants = tuple(v for v in case.variants if v.name.startswith("38 MB"))
    return Case("P1", case.title, case.unit, "steady", variants, scale=1e3)


def _p12(options: Options) -> Case:
    quick = options.quick
    base: dict[str, Any] = {"dataset": "ints", "look": 0.1, "batch": 8}
    some = options.others(*(THREADS[:1] if quick else (*THREADS, "torchdata processes")))
    blanks = dict.fromkeys(
        () if quick else options.others(*PROCESSES[1:]),
        "not measured: 64 fresh processes that import torch",
    )
    loaders = ("torch", *OURS, *some, *blanks)
    variants = []
    for workers in (2, 8) if quick else (1, 2, 8, 32, 64):
        spec = base | {"workers": workers, "seconds": 0.1 if quick else 0.4}
        variants.append(
            Variant(f"{workers} workers", spec, loaders, blanks, most_rounds=options.most(3))
        )
    for power in (3, 8) if quick else (3, 4, 6, 8):
        spec = base | {
            "arguments": {"length": 10**power},
            "batch": 2,
            "workers": options.workers,
            "seconds": 10.0,  # the number of batches decides: 1,000 samples make 500
            "most": 400,
        }
        variants.append(
            Variant(f"1e{power} samples", spec, loaders, blanks, most_rounds=options.most(3))
        )
    title = "many workers, many samples"
    return Case("P12", title, "us / batch", "steady", tuple(variants), scale=1e6)


def _descriptors(options: Options) -> Case:
    spec = {
        "dataset": "blocks",
        "arguments": {"size": 65536},
        "batch": 1,
        "workers": 8,
        "batches": 1_500 if options.quick else 10_000,
        "timeout": 60.0 if options.quick else 120.0,
    }
    name = f"ulimit -n 256, 8 workers, {spec['batches']:,} batches kept"
    variant = Variant(name, spec, ("torch", *OURS))
    title = "few descriptors"
    return Case("descriptors", title, "descriptors more", "descriptors", (variant,), kind="pass")


def _devshm(options: Options) -> Case:
    spec = {
        "dataset": "images",
        "arguments": {"dtype": "uint8"},
        "batch": 256,
        "workers": options.workers,
        "batches": 20,
        "small_devshm": True,
        "timeout": 60.0,
    }
    variant = Variant("64 MB of /dev/shm, batches of 38 MB", spec, ("torch", *OURS))
    title = "little /dev/shm"
    return Case("devshm", title, "ms / batch", "devshm", (variant,), kind="pass", scale=1e3)


def _endurance(options: Options) -> Case:
    spec = {
        "dataset": "blocks",
        "arguments": {"size": 65536},
        "batch": 1,
        "workers": options.workers,
        "batches": 5_000 if options.quick else 200_000,
        "timeout": 60.0 if options.quick else 300.0,
    }
    variant = Variant(f"{spec['batches']:,} batches of 64 kB", spec, ("torch", *OURS))
    return Case("endurance", "a long run", "MB more", "endurance", (variant,), kind="pass")


_MAKERS = {
    "P1": _p1,
    "P2": _p2,
    "P3": _p3,
    "P4": pipeline_cases.p4,
    "P5": _p5,
    "P6": _p6,
    "P7": _p7,
    "P8": _p8,
    "P9": _p9,
    "P11": devices.p11,
    "P12": _p12,
    "stage": pipeline_cases.stage,
    "tick": pipeline_cases.tick,
    "books": pipeline_cases.books,
    "P10": resuming.p10,
    "resume": resuming.p10_middle,
    "seeding": seeding.case,
    "descriptors": _descriptors,
    "devshm": _devshm,
    "endurance": _endurance,
}


def choose(names: Sequence[str], options: Options) -> list[Case]:
    """The cases to run for these names, all of them for none. P9 is worked out from P1's runs.

    Raises
    ------
    UnknownCase
        There is no such case.
    """
    by_lower = {name.lower(): name for name in _MAKERS}
    wanted = []
    for name in names or _MAKERS:
        if name.lower() not in by_lower:
            raise UnknownCase(f"no case {name!r}; there are: {', '.join(_MAKERS)}")
        wanted.append(by_lower[name.lower()])
    wanted = list(dict.fromkeys(wanted))
    if "P1" in wanted and "P9" in wanted:
        wanted.remove("P9")
    return [_MAKERS[name](options) for name in wanted]


def cpu_per_gigabyte(measurements: Sequence[Measurement]) -> list[Measurement]:
    """P9, from the 38 MB variants of P1."""
    found = []
    gigabytes = 256 * IMAGE / 1e9
    for m in measurements:
        if m.case == "P1" and m.variant.startswith("38 MB"):
            row = Measurement("P9", m.variant, m.loader, "CPU s / GB", skipped=m.skipped)
            if m.values:
                row.values = [cpu / gigabytes for cpu in m.cpu]
            found.append(row)
    return found
