"""P14, P15, P16: objects behind a server, archives, and tables."""

from __future__ import annotations

import gc
import os
import time

from benchmarks import usage
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.measurements import without_collections
from benchmarks.names import BY_COROUTINES, BY_SAMPLES
from benchmarks.results import Results
from benchmarks.targets import NOT_MEASURED, Found, Judge, Target, ahead_of, at_least, chosen, short

DELAY_MS, AT_ONCE = 50, 32

OBJECT_LOADERS = (*BY_SAMPLES, *BY_COROUTINES)

ORDERS = {"in order": False, "shuffled": True}


class WrongCount(Exception):
    """An epoch did not deliver as many samples as there are."""


def whole_epoch(loader: str, spec: Spec) -> Answer:
    """Seconds of an epoch, from making the loader to its end.

    The details are the seconds until the first batch, and the PSS in MB of all its processes in the
    middle of the epoch, without mapped files; the time that weighing takes does not count.
    """
    import torch

    from benchmarks.loaders.stored import EPOCHS, samples_in

    torch.set_num_threads(1)  # it is imported before the clock starts
    gc.collect()
    found, memory, weighing, first = 0, 0.0, 0.0, None
    with without_collections():
        start = time.perf_counter()
        for batch in EPOCHS[spec["files"]][loader](spec):
            found += samples_in(batch)
            if first is None:
                first = time.perf_counter() - start
            if not memory and found >= spec["samples"] // 2:
                before = time.perf_counter()
                memory = usage.memory_mb(os.getpid(), files=False)
                weighing = time.perf_counter() - before
        seconds = time.perf_counter() - start - weighing
    if found != spec["samples"]:
        raise WrongCount(f"{loader} delivered {found} samples of {spec['samples']}")
    return {"value": seconds, "details": {"first_batch": first, "memory_mb": memory}}


def objects(options: Options) -> Case:
    """2,000 objects, each answered after 50 ms: 32 requests at a time, and torch's 16 workers."""
    spec = {
        "files": "objects",
        "samples": 2000,
        "batch": 50,
        "delay_ms": DELAY_MS,
        "at_once": AT_ONCE,
        "torch_workers": 16,
    }
    blanks = {
        "webdataset": "it reads archives from their beginning, not objects",
        "litdata": "it reads S3, GCS, Azure and local files, not HTTP",
    }
    variant = Variant(
        "2,000 objects, 50 ms each",
        spec,
        ("torch", *OBJECT_LOADERS),
        blanks=blanks,
        most_rounds=options.most(5, quick=1),
        seconds=5.0,
    )
    return Case(
        "P14", "small objects behind HTTP", "s / epoch", whole_epoch, (variant,), check=False
    )


def archives(options: Options) -> Case:
    """20,000 JPEG files of 160x120 in 20 tar archives, decoded."""
    rivals = options.taking_part("webdataset", "torchdata threads", "torchdata processes")
    samples = 2000 if options.quick else 20_000
    variants = tuple(
        Variant(
            name,
            {
                "files": "archives",
                "samples": samples,
                "batch": 64,
                "workers": options.workers,
                "shuffled": shuffled,
            },
            ("limit", "together", "threads", "fork", *rivals),
            most_rounds=options.most(3, quick=1),
            seconds=10.0,
        )
        for name, shuffled in ORDERS.items()
    )
    return Case("P15", "JPEGs in tar archives", "s / epoch", whole_epoch, variants, check=False)


def tables(options: Options) -> Case:
    """5 million rows of 20 columns in 4 Parquet files, as batches of 4,096 rows of tensors.

    datasets takes minutes for them, so it is compared at 500,000 rows.
    """
    rivals = options.taking_part("pyarrow", "datasets")
    sizes = {"500,000 rows": 500_000} | ({} if options.quick else {"5 million rows": 5_000_000})
    variants = tuple(
        Variant(
            f"{size}, {name}",
            {
                "files": "tables",
                "samples": samples,
                "batch": 4096,
                "workers": options.workers,
                "shuffled": shuffled,
            },
            (
                "threads",
                "fork",
                *(rival for rival in rivals if rival == "pyarrow" or samples < 1e6),
            ),
            most_rounds=options.most(3, quick=1),
            seconds=5.0,
        )
        for size, samples in sizes.items()
        for name, shuffled in ORDERS.items()
    )
    return Case("P16", "rows of Parquet", "s / epoch", whole_epoch, variants, check=False)


def of_the_bound(share: float, loaders: tuple[str, ...]) -> Judge:
    """The best of `loaders` reads at least that part of what so many requests at a time can."""

    def judge(results: Results, case: str) -> Found:
        rows = chosen(results, case, "", loaders)
        if not rows:
            return NOT_MEASURED
        row = min(rows, key=lambda row: row.median)
        reached = 2000 * DELAY_MS / 1e3 / AT_ONCE / row.median
        return f"{short(reached)} ({row.loader})", reached >= share

    return judge


_TAR = ("threads", "fork")
_PYARROW = (
    "In order, pyarrow's loop gives views of what it has decoded, on threads that know no GIL, and no "
    "place to resume at; the loader copies rows into tensors that are yours. Of 1.0 s for 5 million "
    "rows, 0.3 are decoding on both cores. At random, where pyarrow's loop gathers rows as well, the "
    "two are level within the noise. Before row groups were read without a scan, and columns copied "
    "in few calls, it was 0.17x and 0.26x, on the other machine."
)
TARGETS = (
    Target("P14", ">= 0.9 of concurrency / latency", of_the_bound(0.9, OBJECT_LOADERS)),
    Target("P14", ">= 2x torch with 16 workers", at_least(2, OBJECT_LOADERS), factor=2),
    Target("P15", ">= 0.95 of reading and decoding alone", at_least(0.95, _TAR, "together")),
    Target("P15", "ahead of webdataset and torchdata", ahead_of(1, _TAR)),
    Target("P16", "ahead of datasets", ahead_of(1, _TAR, "datasets")),
    Target("P16", "ahead of pyarrow's own loop", ahead_of(1, _TAR, "pyarrow"), why=_PYARROW),
)
