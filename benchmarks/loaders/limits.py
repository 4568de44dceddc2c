"""The plain loop without a loader: the time that no loader can go below."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.utils.data

from benchmarks.datasets.plain import ENDLESS
from benchmarks.loaders.work import PREFETCH, Work


class Limit:
    """The plain loop, in this process, on one thread.

    Parameters
    ----------
    recycled
        True to stack into memory that was used before, as many buffers as a loader prefetches into.
    together
        True if forks of this process do the same meanwhile, as many as it takes to make one for
        each worker: they share the memory's bandwidth and the cores' caches, as workers do.
    """

    def __init__(self, work: Work, recycled: bool, together: bool = False) -> None:
        torch.set_num_threads(1)
        if hasattr(work.dataset, "without_waiting"):  # a process that waits could do something else
            work = replace(work, dataset=work.dataset.without_waiting())
        self._work, self._recycled, self._together = work, recycled, together
        self._companions: list[int] = []

    def epoch(self) -> Iterator[Any]:
        make = self._stacked if self._recycled else self._plain
        while self._together and len(self._companions) < self._work.workers - 1:
            pid = os.fork()
            if pid == 0:
                try:
                    self._work.dataset.length = ENDLESS  # it goes on until it is killed
                    while os.getppid() != 1:
                        for _ in make():
                            pass
                finally:
                    os._exit(0)
            self._companions.append(pid)
        return make()

    def _plain(self) -> Iterator[Any]:
        work = self._work
        for indices in work.batch_sampler():
            yield work.collate([work.dataset[i] for i in indices])

    def _stacked(self) -> Iterator[Any]:
        work, sample = self._work, self._work.dataset[0]
        shape = (work.batch, *sample.shape)
        buffers = [torch.zeros(shape, dtype=sample.dtype) for _ in range(PREFETCH * work.workers)]
        for number, indices in enumerate(work.batch_sampler()):
            out = buffers[number % len(buffers)]
            yield torch.stack([work.dataset[i] for i in indices], out=out)

    def close(self) -> None:
        for pid in self._companions:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._companions.clear()


LIMIT_OPENERS = {
    "limit": lambda work: Limit(work, recycled=False),
    "limit (recycled)": lambda work: Limit(work, recycled=True),
    "together": lambda work: Limit(work, recycled=False, together=True),
    "together (recycled)": lambda work: Limit(work, recycled=True, together=True),
}
