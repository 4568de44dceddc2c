"""Batches that are taken as fast as they come, and steps that use them, on a device.

In both, the training thread is a step ahead of the device, as in training. With steps, it watches the
clock meanwhile and records how late it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

Clock = Callable[[], float]

TICK = 1e-4
"""Seconds of one turn of the loop in which the training thread records how late it is."""

AHEAD = 4
"""Bound on the batches in flight when nothing else is done, as in training."""


class Done(Protocol):
    """Point in a stream, as torch's events are."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Gpu(Protocol):
    """Device, as the measurement uses it; tests have another one."""

    def synchronize(self) -> None: ...

    def step(self, batch: Any, products: int) -> Done:
        """Begin to use `batch`, then `products` matrix products; return the point after them."""


class Device:
    """The current device of torch."""

    def __init__(self, size: int = 4096) -> None:
        import torch

        self._torch = torch
        kind = torch.accelerator.current_accelerator()
        self._matrix = torch.randn(size, size, device=kind, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._matrix)

    def synchronize(self) -> None:
        self._torch.accelerator.synchronize()

    def step(self, batch: Any, products: int) -> Done:
        for part in batch if isinstance(batch, list) else [batch] * (batch is not None):
            part.view(-1)[::65536].sum()
        for _ in range(products):
            self._torch.mm(self._matrix, self._matrix, out=self._out)
        done: Done = self._torch.accelerator.current_stream().record_event()
        return done


def each(batches: Iterator[Any], gpu: Gpu, seconds: float, clock: Clock) -> float:
    """Return the seconds of a batch, until the device has them all, when nothing else is done."""
    gpu.synchronize()
    start = clock()
    count = 0
    in_flight: deque[Done] = deque()
    while count < AHEAD or clock() - start < seconds:
        in_flight.append(gpu.step(next(batches), 0))
        count += 1
        if len(in_flight) > AHEAD:
            in_flight.popleft().synchronize()
    gpu.synchronize()
    return (clock() - start) / count


def stepping(
    batches: Iterator[Any], gpu: Gpu, products: int, steps: int, clock: Clock
) -> tuple[float, list[float], list[float]]:
    """Do steps, each on another batch, while the training thread watches the clock.

    One step is queued while another runs. Otherwise the device would stand still while the thread takes
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
