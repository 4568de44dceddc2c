"""How to open each loader for the same work: torch's, ours, and through `rivals` the others.

All get the same number of workers and prefetch two batches a worker.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.utils.data

PREFETCH = 2
"""Batches a worker makes ahead: torch's default."""


class CannotDo(Exception):
    """This loader can't do this work; the message says why."""


@dataclass(frozen=True)
class Work:
    """What a loader is to do.

    Attributes
    ----------
    shuffled
        Whether in a random order, which is the same for all loaders: `sampler` makes it.
    start_method
        How worker processes start, where they can choose.
    keep
        Whether workers are kept from one epoch to the next.
    batch_bytes
        An upper bound of a batch's size, for those who want to know beforehand.
    stages
        0: loaders are compared. 1: ours is a `Pipeline` of one stage. 3: everybody's best form of
        three stages; see `pipelines`.
    cores
        Workers that can work at the same time, for those whose stages have numbers of their own.
    """

    dataset: Any
    batch: int
    workers: int
    shuffled: bool = False
    keep: bool = False
    start_method: str = "fork"
    batch_bytes: int = 1 << 20
    stages: int = 0
    cores: int = 2

    def sampler(self) -> torch.utils.data.Sampler[int]:
        """A new sampler; a shuffled one begins with the same seed."""
        if not self.shuffled:
            return torch.utils.data.SequentialSampler(self.dataset)
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.RandomSampler(self.dataset, generator=generator)


class Running(Protocol):
    """An opened loader."""

    def epoch(self) -> Iterator[Any]:
        """Begin an epoch, which may end the one before."""

    def close(self) -> None:
        """End all workers."""


class Loader:
    """torch's loader, or one like it, running."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Any = None

    def epoch(self) -> Iterator[Any]:
        if not self._loader.persistent_workers:
            self.close()
        self._iterator = iter(self._loader)
        iterator: Iterator[Any] = self._iterator
        return iterator

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator._shutdown_workers() if self._loader.num_workers else None
            self._iterator = self._loader._iterator = None


def _options(work: Work) -> dict[str, Any]:
    return {
        "batch_size": work.batch,
        "sampler": work.sampler(),
        "num_workers": work.workers,
        "persistent_workers": work.keep and work.workers > 0,
        "prefetch_factor": PREFETCH if work.workers else None,
    }


def _torch(work: Work) -> Running:
    context = work.start_method if work.workers else None
    return Loader(
        torch.utils.data.DataLoader(work.dataset, multiprocessing_context=context, **_options(work))
    )


def _ours(name: str) -> Callable[[Work], Running]:
    def open_ours(work: Work) -> Running:
        import hybridloader

        options = _options(work)
        if name == "inline":
            options |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        if name == "fork" and work.start_method != "fork":
            raise CannotDo("it forks")
        if name == "shared-memory (loky)":
            backend: Any = hybridloader.SharedMemory(start_method="loky")
        else:
            backend = name if options["num_workers"] else None
        return Loader(hybridloader.DataLoader(work.dataset, backend=backend, **options))

    return open_ours


class Limit:
    """What the case can't go below: the plain loop, in this process, on one thread.

    Parameters
    ----------
    together
        Whether forks of this process do the same meanwhile, as many as it takes to make one for
        each worker: they share the memory's bandwidth and the cores' caches, as workers do.
    """

    def __init__(self, work: Work, recycled: bool, together: bool = False) -> None:
        torch.set_num_threads(1)
        if hasattr(work.dataset, "without_waiting"):  # whoever waits could do something else
            work = replace(work, dataset=work.dataset.without_waiting())
        self._work, self._recycled, self._together = work, recycled, together
        self._companions: list[int] = []

    def epoch(self) -> Iterator[Any]:
        make = self._stacked if self._recycled else self._plain
        while self._together and len(self._companions) < self._work.workers - 1:
            pid = os.fork()
            if pid == 0:
                try:
                    while os.getppid() != 1:
                        for _ in make():
                            pass
                finally:
                    os._exit(0)
            self._companions.append(pid)
        return make()

    def _plain(self) -> Iterator[Any]:
        work = self._work
        for indices in torch.utils.data.BatchSampler(work.sampler(), work.batch, False):
            yield torch.utils.data.default_collate([work.dataset[i] for i in indices])

    def _stacked(self) -> Iterator[Any]:
        """``torch.stack`` into memory used before: as many buffers as a loader prefetches into."""
        work, sample = self._work, self._work.dataset[0]
        shape = (work.batch, *sample.shape)
        buffers = [torch.zeros(shape, dtype=sample.dtype) for _ in range(PREFETCH * work.workers)]
        sampler = torch.utils.data.BatchSampler(work.sampler(), work.batch, False)
        for number, indices in enumerate(sampler):
            out = buffers[number % len(buffers)]
            yield torch.stack([work.dataset[i] for i in indices], out=out)

    def close(self) -> None:
        for pid in self._companions:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._companions.clear()


OPENERS: dict[str, Callable[[Work], Running]] = {
    "limit": lambda work: Limit(work, recycled=False),
    "limit (recycled)": lambda work: Limit(work, recycled=True),
    "together": lambda work: Limit(work, recycled=False, together=True),
    "together (recycled)": lambda work: Limit(work, recycled=True, together=True),
    "torch": _torch,
    **{
        name: _ours(name)
        for name in ("inline", "threads", "fork", "shared-memory", "shared-memory (loky)", "spawn")
    },
}


def open_loader(name: str, work: Work) -> Running:
    """Open the loader called `name`.

    Raises
    ------
    CannotDo
        It can't do this work, or is not installed.
    """
    if work.stages:
        from benchmarks.loaders.pipelines import open_pipeline

        return open_pipeline(name, work)
    if name in OPENERS:
        return OPENERS[name](work)
    from benchmarks.loaders.rivals import open_rival

    return open_rival(name, work)
