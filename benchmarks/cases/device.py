"""P11: batches on their way to a device, beside the copy alone from page-locked memory.

Without a CUDA device nothing of this is run, and the run says so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.case import Answer, CannotDo, Case, Options, Spec, Variant
from benchmarks.cases.image_batches import IMAGE, SIZES
from benchmarks.device_steps import Cuda, each, measure
from benchmarks.measurements import work_of
from benchmarks.results import Results
from benchmarks.targets import Found, Judge, Target, at_least

NEEDED = "needs a CUDA device, and there is none here: not run, and no figures are claimed"
OURS = ("threads", "shared-memory")
"""Not ``fork``: the device is in use when workers start, as in training, and it refuses then."""


def device_in_sight() -> bool:
    """True if torch may find a device. Asking torch takes two seconds of importing it."""
    if not sys.platform.startswith("linux"):
        return sys.platform == "win32"
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()  # the latter in WSL


def to_device(options: Options) -> Case:
    """Batches of 10, 38 and 150 MB. More workers than elsewhere: a link takes 25 to 55 GB/s."""
    loaders = ("limit", "torch", *OURS, *options.taking_part("SPDL threads"))
    blanks = {} if device_in_sight() else dict.fromkeys(loaders, NEEDED)
    workers = max(options.workers, min(8, len(os.sched_getaffinity(0)) // 2))
    variants = []
    for label, batch in SIZES.items():
        spec = {
            "dataset": "images",
            "arguments": {"dtype": "uint8"},
            "batch": batch,
            "batch_bytes": batch * IMAGE,
            "workers": workers,
            "seconds": 0.5 if options.quick else 2.0,
            "steps": 100 if options.quick else 400,
        }
        if label == "38 MB" or not options.quick:
            variants.append(Variant(label, spec, loaders, blanks))
    title = "to the device, beside a pinned copy"
    return Case("P11", title, "ms / batch", a_round, tuple(variants), scale=1e3, check=False)


Batches = AbstractContextManager[Iterator[Any]]


def a_round(loader: str, spec: Spec) -> Answer:
    """A round of `loader`; needs a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise CannotDo(NEEDED)
    work, gpu = work_of(spec), Cuda()
    with _pinned(work) as batches:
        copy, _ = each(batches, gpu, 0.2, 4, time.perf_counter)
    with _OPENERS[loader](work) as batches:
        first = next(batches).cpu()
        expected = torch.stack([work.dataset[index] for index in range(spec["batch"])])
        if not torch.equal(first, expected):
            raise RuntimeError("the batch on the device is not the one that was loaded")
        return measure(batches, gpu, spec, copy)


@contextlib.contextmanager
def _pinned(work: Any) -> Iterator[Iterator[Any]]:
    """The limit: batches that are made already, in torch's page-locked memory."""
    import torch

    batch = torch.stack([work.dataset[index] for index in range(work.batch)])
    made = [batch.pin_memory() for _ in range(4)]
    yield (host.to("cuda", non_blocking=True) for host in itertools.cycle(made))


@contextlib.contextmanager
def _torch(work: Any) -> Iterator[Iterator[Any]]:
    """Batches pinned by torch's thread, copied on the training stream, as its documentation has it."""
    from benchmarks.loaders.dataloaders import open_torch

    with contextlib.closing(open_torch(work, pin_memory=True)) as running:
        yield (batch.to("cuda", non_blocking=True) for batch in running.epoch())


@contextlib.contextmanager
def _ours(backend: str, work: Any) -> Iterator[Iterator[Any]]:
    from benchmarks.loaders.dataloaders import open_ours

    with contextlib.closing(open_ours(backend, work, device="cuda")) as running:
        yield running.epoch()


@contextlib.contextmanager
def _spdl(work: Any) -> Iterator[Iterator[Any]]:
    from concurrent.futures import ThreadPoolExecutor

    try:
        from spdl.io import transfer_tensor_h2d
    except ImportError as error:
        raise CannotDo(f"not installed: spdl-core and spdl-io ({error})") from None
    from benchmarks.loaders.rival_spdl import items_to_device

    with ThreadPoolExecutor(1) as thread:
        items = items_to_device(work, transfer_tensor_h2d, thread)
        with contextlib.closing(items):
            yield items


_OPENERS: dict[str, Callable[[Any], Batches]] = {
    "limit": _pinned,
    "torch": _torch,
    "SPDL threads": _spdl,
    **{name: partial(_ours, name) for name in OURS},
}


def detail(key: str, bound: float, *, least: bool = False) -> Judge:
    """Detail `key` of the fastest of ours, in the worst variant: at most `bound`, or at `least` that."""

    def judge(results: Results, case: str) -> Found:
        found = []
        for variant in results.variants(case):
            rows = [m for m in results.of(case, variant) if m.loader in OURS and m.details.get(key)]
            if rows:
                best = min(rows, key=lambda m: m.median)
                found.append((statistics.median(best.details[key]), best))
        if not found:
            return "not run: needs a CUDA device", None
        worst, row = (min if least else max)(found, key=lambda pair: pair[0])
        met = worst >= bound if least else worst <= bound
        return f"{worst:.3g} ({row.loader}, {row.variant})", met

    return judge


TARGETS = (
    Target("P11", ">= 0.95 of a pinned copy alone", at_least(0.95, OURS, "limit")),
    Target("P11", ">= 0.9 of the copy behind the step", detail("overlap", 0.9, least=True)),
    Target("P11", "p99 of next() <= 1 ms", detail("next_p99_ms", 1)),
    Target("P11", "training thread late < 2 ms (p99)", detail("late_p99_ms", 2)),
)
