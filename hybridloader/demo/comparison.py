"""Images per second of every backend and of torch's own loader.

Only loading is measured: batches are dropped as they come.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.utils.data

import hybridloader
from hybridloader.demo.images import Photographs

ROUNDS = 3
IMAGES = 960
"""Per round and backend: about a second on one core, so that six rows take half a minute."""


@dataclass
class Contender:
    """Row of the comparison: a loader, and the times measured with it."""

    name: str
    workers: int
    make: Callable[[], Iterable[Any]]
    in_process: bool = False
    first_batch: float = 0.0  # seconds from `iter` to it, with the start of the workers
    rates: list[float] = field(default_factory=list)  # images per second of whole epochs
    skipped: str = ""  # reason why it can't run here

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def contenders(dataset: Photographs, batch_size: int, workers: int) -> list[Contender]:
    """Return torch's own loader and all backends; without workers, those that need none."""
    common: dict[str, Any] = {"batch_size": batch_size, "shuffle": False}
    busy = common | {"num_workers": workers, "persistent_workers": True} if workers else common
    torchs = functools.partial(torch.utils.data.DataLoader, dataset, **busy)
    rows = [Contender("torch DataLoader", workers, torchs)]
    for name in hybridloader.engine.backend_names():
        backend = hybridloader.engine.get_backend(name)
        if backend.in_caller or workers:
            options = common if backend.in_caller else busy
            ours = functools.partial(hybridloader.DataLoader, dataset, backend=backend, **options)
            used = 0 if backend.in_caller else workers
            rows.append(Contender(name, used, ours, backend.in_process))
    return rows


def measure(
    rows: list[Contender], images: int, report: Callable[[int], None], rounds: int = ROUNDS
) -> None:
    """Measure all `rows` in turn, `rounds` times, so that other load on the machine meets them all.

    A first turn starts the workers and is timed up to its first batch. The workers keep running (idle
    ones cost nothing), and each later turn is an epoch of `images`, timed as a whole. `report` is
    called after each batch with its number of images.
    """
    loaders: dict[str, Iterable[Any]] = {}
    # Threads last: forking a process in which threads run is unsafe.
    for row in sorted(rows, key=lambda row: row.in_process):
        try:
            loaders[row.name] = row.make()
            row.first_batch = _epoch(loaders[row.name], report)[0]
        except hybridloader.errors.BackendUnavailable as error:
            loaders.pop(row.name, None)
            row.skipped = str(error)
            report(images * (rounds + 1))
    for _ in range(rounds):
        for row in rows:
            if row.name in loaders:
                row.rates.append(images / _epoch(loaders[row.name], report)[1])


def _epoch(loader: Iterable[Any], report: Callable[[int], None]) -> tuple[float, float]:
    """Return the seconds to the first batch and to the end."""
    start = time.perf_counter()
    first = 0.0
    for _, labels in loader:
        first = first or time.perf_counter() - start
        report(len(labels))
    return first, time.perf_counter() - start
