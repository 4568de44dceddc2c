"""The case `stores`: two epochs over archives in a store that is far away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.case import Answer, CannotDo, Case, Options, Spec, Variant, check_installed
from benchmarks.datasets.object_store import ObjectStore
from benchmarks.names import BY_SAMPLE, FROM_STORES, is_rival
from benchmarks.results import Results
from benchmarks.targets import NOT_MEASURED, Found, Judge, Target, ahead_of, chosen, short
from benchmarks.usage import CpuMeter

VENVS = "HYBRIDLOADER_RIVALS"
"""Variable with a folder of virtual environments, one for each rival by the first word of its name, as
some need versions of packages that others do not take."""


SHARDS = 48

WIDTH = 480
"""Pixels of the width of a picture, whose file has 24 kB."""


def two_epochs(loader: str, spec: Spec) -> Answer:
    """Seconds of the first epoch, and the CPU seconds of its processes.

    The details are the seconds until the first batch and of the second epoch, and the requests and MB
    of both. A rival that is not installed runs in its own environment, if it has one.
    """
    if not is_rival(loader):
        return measured(loader, spec)
    python = Path(os.environ.get(VENVS, ""), loader.split(" ")[0], "bin", "python")
    if VENVS not in os.environ or not python.exists():
        check_installed(loader)
        return measured(loader, spec)
    command = [python, "-m", "benchmarks.cases.stores", loader, json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    if done.returncode:
        raise CannotDo(f"failed: {done.stderr.strip().splitlines()[-1]}")
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    return answer


def measured(loader: str, spec: Spec) -> Answer:
    """Do what `two_epochs` does, in this process."""
    import torch

    from benchmarks.loaders.stores import LOADERS, folder_of

    torch.set_num_threads(1)
    store = ObjectStore(folder_of(spec))
    details: dict[str, Any] = {}
    try:
        # Not in /tmp/streaming: MosaicML's registers of shared memory live there.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            batches = LOADERS[loader](spec, store, scratch)
            if not is_rival(loader):
                store.counts()  # an index of ours is kept from then on; rivals read theirs each time
            epochs = 1 if loader == BY_SAMPLE else 2  # whose epochs are alike
            found = [_epoch(batches(epoch), store, spec) for epoch in range(epochs)]
    finally:
        store.close()
    first = found[0]
    details = {"first_batch": first["first_batch"], "requests": first["requests"]}
    details |= {"MB": first["MB"]}
    if len(found) > 1:
        details |= {"second_epoch": found[1]["value"], "second_MB": found[1]["MB"]}
    return {"value": first["value"], "cpu": first["cpu"], "details": details}


def _epoch(batches: Any, store: ObjectStore, spec: Spec) -> dict[str, float]:
    meter, first, samples = CpuMeter(), 0.0, 0
    meter.start()
    began = time.perf_counter()
    for batch in batches:
        samples += len(batch)
        first = first or time.perf_counter() - began
    seconds, cpu = time.perf_counter() - began, meter.stop()
    if samples != spec["samples"]:
        raise ValueError(f"{samples} samples came, of {spec['samples']}")
    counts = store.counts()
    return {
        "value": seconds,
        "cpu": cpu,
        "first_batch": first,
        "requests": counts["requests"],
        "MB": counts["bytes"] / 1e6,
    }


def stores(options: Options) -> Case:
    """12,000 JPEG files of 24 kB in 48 archives; 25 ms to the first byte, 50 MB/s a connection."""
    samples = 2400 if options.quick else 12_000
    spec = {"samples": samples, "shards": SHARDS, "width": WIDTH, "batch": 64}
    spec["workers"] = options.workers
    rivals = options.taking_part("SPDL", "webdataset", "webdataset cache", "litdata", "MosaicML")
    rounds = options.most(3, quick=1)
    whole = Variant(
        f"{samples:,} files in 48 archives",
        {**spec, "decoded": False},
        (*FROM_STORES, *rivals),
        most_rounds=rounds,
        seconds=8.0,
    )
    decoded = Variant(
        f"{samples:,} files, decoded",
        {**spec, "decoded": True},
        ("blocks", *options.taking_part("SPDL", "webdataset")),
        most_rounds=rounds,
        seconds=20.0,
    )
    variants = (whole, decoded)
    return Case("stores", "archives in a store", "s / epoch", two_epochs, variants, check=False)


def _rate(least: float, loader: str, detail: str = "") -> Judge:
    """`loader` has at least so many samples a second, undecoded, in the first epoch or by a `detail`."""

    def judge(results: Results, case: str) -> Found:
        rows = [row for row in chosen(results, case, "", (loader,)) if "decoded" not in row.variant]
        if not rows:
            return NOT_MEASURED
        row = rows[0]
        seconds = min(row.details[detail]) if detail else row.median
        rate = int(row.variant.split(" ")[0].replace(",", "")) / seconds
        return f"{short(rate)} samples/s", rate >= least

    return judge


TARGETS = (
    Target("stores", ">= 10,000 samples/s", _rate(10_000, "blocks")),
    Target("stores", ">= 10,000 samples/s while it fills a cache", _rate(10_000, "blocks, cache")),
    Target(
        "stores",
        ">= 20,000 samples/s from the cache",
        _rate(20_000, "blocks, cache", "second_epoch"),
    ),
    Target("stores", "ahead of SPDL", ahead_of(1, ("blocks",), "SPDL")),
    Target("stores", "ahead of litdata", ahead_of(1, ("blocks",), "litdata")),
    Target("stores", "ahead of webdataset", ahead_of(1, ("blocks",), "webdataset")),
)

if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], json.loads(sys.argv[2]))))
