"""Batches that are taken as fast as they come, and steps that use them, on a device.

In both, the training thread is a step ahead of the device, as in training. With steps, it watches the
clock meanwhile and records how late it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Clock = Callable[[], float]

TICK = 1e-4
"""Seconds of one turn of the loop in which the training thread records how late it is."""

AHEAD = 4
"""Bound on the batches in flight when nothing else is done, as in training."""


class Device:
    """The current device of torch, as a loop uses it."""

    def __init__(self, size: int = 4096) -> None:
        import torch

        self._torch = torch
        kind = torch.accelerator.current_accelerator()
        self._matrix = torch.randn(size, size, device=kind, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._matrix)

    def synchronize(self) -> None:
        self._torch.accelerator.synchronize()

    def step(self, batch: Any, products: int) -> Any:
        """Begin to use `batch`, then `products` matrix products; return the event after them."""
        for part in batch if isinstance(batch, list) else [batch] * (batch is not None):
            part.view(-1)[::65536].sum()
        for _ in range(products):
            self._torch.mm(self._matrix, self._matrix, out=self._out)
        return self._torch.accelerator.current_stream().record_event()


def each(batches: Iterator[Any], gpu: Any, seconds: float, clock: Clock) -> float:
    """Return the seconds of a batch, until the device has them all, when nothing else is done."""
    gpu.synchronize()
    start = clock()
    count = 0
    in_flight: deque[Any] = deque()
    while count < AHEAD or clock() - start < seconds:
        in_flight.append(gpu.step(next(batches), 0))
        count += 1
        if len(in_flight) > AHEAD:
            in_flight.popleft().synchronize()
    gpu.synchronize()
    return (clock() - start) / count


def stepping(
    batches: Iterator[Any], gpu: Any, products: int, steps: int, clock: Clock
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
    before: Any = None
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


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of `values` do not pass; 0 if there are none."""
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0
