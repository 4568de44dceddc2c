"""Grain 0.2: a `MapDataset`, read by threads (`ReadOptions`) or processes (`mp_prefetch`).

It carries numpy, so tensors are given to it as arrays and come out as tensors, both without a copy.
Batches: one index is a batch. Three stages: samples are read one by one on threads and batched then.
In processes each of several threads makes whole batches: by samples, a process would batch every nth
sample, which is another order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.case import CannotDo
from benchmarks.datasets.small_tensors import Texts
from benchmarks.loaders.work import PREFETCH, READERS, Closing, Opener, Running, Work


class Arrays:
    """A source for Grain: a dataset, in its own order or in `order`, its tensors as arrays."""

    def __init__(self, dataset: Any, order: list[int] | None = None) -> None:
        self._dataset, self._order = dataset, order

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return _as_arrays(self._dataset[int(index) if self._order is None else self._order[index]])


def _as_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_as_arrays, value))
    return value


def as_tensors(value: Any) -> Any:
    """Arrays as `default_collate` gives them."""
    if isinstance(value, dict):
        return {key: as_tensors(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_tensors(item) for item in value]
    return torch.from_numpy(value)


def _open(work: Work, processes: int, threads: int, *, samples: bool, ahead: int = 1) -> Running:
    """Grain, running. An epoch ends by closing its iterator: with it go its workers.

    Parameters
    ----------
    ahead
        Samples that a thread reads ahead, for each batch that it is to be ahead by.
    """
    import grain

    if isinstance(work.dataset, Texts):
        raise CannotDo("stacks strings into arrays")
    logging.getLogger("absl").setLevel(logging.ERROR)
    read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=PREFETCH * threads * ahead)
    order = list(work.sampler()) if work.shuffled else None
    source = grain.MapDataset.source(Arrays(work.dataset, order))
    if samples:
        dataset: Any = source.to_iter_dataset(read).batch(work.batch)
    else:
        together = {"batch_fn": list} if work.uncollated else {}
        dataset = source.batch(work.batch, **together).to_iter_dataset(read)
    if processes:
        dataset = dataset.mp_prefetch(
            grain.multiprocessing.MultiprocessingOptions(
                num_workers=processes, per_worker_buffer_size=PREFETCH
            )
        )

    def epoch() -> Iterator[Any]:
        iterator = iter(dataset)
        try:
            yield from map(as_tensors, iterator)
        finally:
            iterator.close()

    return Closing(epoch)


def _processes(work: Work) -> Running:
    if work.keep:
        raise CannotDo("has no workers that stay from one epoch to the next")
    return _open(work, work.workers, 0, samples=False)


def _processes_of_threads(work: Work) -> Running:
    return _open(work, work.workers, max(1, READERS // work.workers), samples=False)


BATCH_OPENERS: dict[str, Opener] = {
    "Grain threads": lambda work: _open(work, 0, work.workers, samples=False),
    "Grain processes": _processes,
    "Grain threads by samples": lambda work: _open(
        work, 0, work.workers, samples=True, ahead=work.batch
    ),
}
STAGE_OPENERS: dict[str, Opener] = {
    "Grain threads": lambda work: _open(work, 0, READERS, samples=True),
    "Grain processes": _processes_of_threads,
}
