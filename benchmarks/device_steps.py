"""One round of batches on a device, and of steps that use them.

A round has two parts. First the loader's batches are taken as fast as they come: that is the value.
Then a step of matrix products runs on the device for each batch, somewhat longer than a batch takes, so
that the next one could always be ready. Meanwhile the training thread, which is a step ahead of the
device as in training, goes round a loop and records how late it is.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from benchmarks.case import Answer, Spec
from benchmarks.timing import Clock, Meter, NoMeter, percentile
from benchmarks.usage import CpuMeter

TICK = 1e-4
"""Seconds of one turn of the loop in which the training thread records how late it is."""

AHEAD = 4
"""Bound on the batches on their way when nothing else is done, as in training."""

LONGER = 1.25
"""Time of a step over that of a batch: the loader has time to spare."""


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
        Seconds a step, seconds of each ``next()``, and seconds that each turn of the loop was late.
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
    """Measure one round.

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
