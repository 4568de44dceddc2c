"""P11: batches on their way to a device, beside the copy alone from page-locked memory.

Each round has two parts. First the loader's batches are taken as fast as they come: that is the value.
Then a step of matrix products runs on the device for each batch, somewhat longer than a batch takes, so
that the next one could always be ready; the training thread, which is a step ahead of the device as in
training, goes round a loop meanwhile and notes how late it is. Without a CUDA device nothing of this is
run, and it says so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.case import Answer, CannotDo, Case, Options, Spec, Variant
from benchmarks.cases.image_batches import IMAGE, SIZES
from benchmarks.measurements import work_of
from benchmarks.results import Results
from benchmarks.targets import Found, Judge, Target, at_least
from benchmarks.timing import Clock, Meter, NoMeter, percentile
from benchmarks.usage import CpuMeter

NEEDED = "needs a CUDA device, and there is none here: not run, and no figures are claimed"
OURS = ("threads", "shared-memory")
"""Not ``fork``: the device is in use when workers start, as in training, and it refuses then."""

TICK = 1e-4
"""Seconds of one turn of the loop in which the training thread notes how late it is."""

AHEAD = 4
"""Batches that may be on their way when nothing else is done: as in training, not any number."""

LONGER = 1.25
"""A step takes so many times as long as a batch: the loader has time to spare."""


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


class Done(Protocol):
    """A point in a stream, as torch's events are."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Gpu(Protocol):
    """A device, as the measurement uses it; tests bring one of their own."""

    def synchronize(self) -> None: ...

    def step(self, batch: Any, products: int) -> Done:
        """Begin to use `batch`, and then `products` matrix products; the point where they are done."""


class Cuda:
    """The current CUDA device."""

    def __init__(self) -> None:
        import torch

        self._matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self._torch = torch

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def step(self, batch: Any, products: int) -> Done:
        if batch is not None:
            batch.view(-1)[::65536].sum()
        for _ in range(products):
            self._matrix @ self._matrix
        done: Done = self._torch.cuda.current_stream().record_event()
        return done


# -- the parts of a round ------------------------------------------------------------------------------


def each(
    batches: Iterator[Any],
    gpu: Gpu,
    seconds: float,
    warmup: int,
    clock: Clock,
    meter: Meter | None = None,
) -> tuple[float, float]:
    """Seconds a batch, until the device has them all, when nothing else is done; and CPU seconds."""
    meter = meter or NoMeter()
    for _ in range(warmup):
        gpu.step(next(batches), 0)
    gpu.synchronize()
    meter.start()
    start = clock()
    count = 0
    under_way: deque[Done] = deque()
    while count < 4 or clock() - start < seconds:
        under_way.append(gpu.step(next(batches), 0))
        count += 1
        if len(under_way) > AHEAD:
            under_way.popleft().synchronize()
    gpu.synchronize()
    return (clock() - start) / count, meter.stop() / count


def stepping(
    batches: Iterator[Any], gpu: Gpu, products: int, steps: int, clock: Clock
) -> tuple[float, list[float], list[float]]:
    """Steps, each on a batch of its own, while the training thread watches the clock.

    One step is queued behind the one that runs. Else the device would stand still while the thread takes
    a batch and, up to a `TICK`, before it sees the end of a step: as long as a copy of 10 MB takes.

    Returns
    -------
    seconds, waits, late
        Seconds a step; of each ``next()``; and how late each turn of the waiting loop came.
    """
    gpu.synchronize()
    waits: list[float] = []
    late: list[float] = []
    before: Done | None = None
    start = clock()
    for _ in range(steps):
        began = clock()
        batch = next(batches)
        waits.append(clock() - began)
        done = gpu.step(batch, products)
        del batch
        now = clock()
        while before is not None and not before.query():
            due = now + TICK
            while (now := clock()) < due:
                pass
            late.append(now - due)
        before = done
    gpu.synchronize()
    return (clock() - start) / steps, waits, late


def overlap(step: float, alone: float, copy: float) -> float:
    """Part of a copy that is hidden behind the step: 1 if the copy costs nothing, 0 if all of it."""
    return min(1.0, max(0.0, 1.0 - (step - alone) / copy))


def measure(
    batches: Iterator[Any],
    gpu: Gpu,
    spec: Spec,
    copy: float,
    clock: Clock = time.perf_counter,
) -> Answer:
    """One round.

    Parameters
    ----------
    copy
        Seconds of a batch's copy alone.
    """
    warmup = 2 * spec["workers"] + 4
    seconds, cpu = each(batches, gpu, spec["seconds"], warmup, clock, CpuMeter())
    nothing = itertools.repeat(None)
    gpu.step(None, 1)  # the first one loads cuBLAS, which takes as long as hundreds of others
    product, _, _ = stepping(nothing, gpu, 50, 4, clock)
    products = max(1, round(LONGER * max(seconds, copy) / (product / 50)))
    alone, _, _ = stepping(nothing, gpu, products, max(10, spec["steps"] // 4), clock)
    step, waits, late = stepping(batches, gpu, products, spec["steps"], clock)
    return {
        "value": seconds,
        "cpu": cpu,
        "details": {
            "overlap": overlap(step, alone, copy),
            "next_p99_ms": 1e3 * percentile(waits, 0.99),
            "late_p99_ms": 1e3 * percentile(late, 0.99),
            "pinned_mb": pinned_bytes() / 1e6,
        },
    }


def pinned_bytes() -> int:
    """Page-locked bytes of this process: those of torch's allocator, and of our slots."""
    import torch

    from hybridloader.memory.page_locks import locked_bytes

    stats = torch.cuda.host_memory_stats() if torch.cuda.is_available() else {}
    return int(stats.get("allocated_bytes.current", 0)) + locked_bytes()


# -- who takes part ------------------------------------------------------------------------------------


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
