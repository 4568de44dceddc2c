"""Grain's pipelines with the options that its picker, `pick_performance_config`, returns.

The picker takes five elements of a pipeline to learn their size. It measures no time, and returns:

- a process for each CPU. There are fewer if the memory does not hold an element for each, unless the
  pipeline has fewer than five elements;
- a buffer for each process, of as many samples as the memory holds, up to 1000;
- the number of threads that is the default of `ReadOptions`.

This module imports Grain: import it after `check_installed`.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grain
from grain.experimental import InterleaveIterDataset, PerformanceConfig, pick_performance_config

from benchmarks.datasets.tuned import Shards
from benchmarks.loaders.rival_grain import Arrays, as_tensors

CYCLE = 4
"""Shards that each process reads at the same time: the number in Grain's documentation."""

PATIENCE = 30.0
"""Seconds in which the threads of the picker must end."""


@dataclass(frozen=True)
class Picked:
    """A pipeline of Grain and the options that its picker returned.

    Attributes
    ----------
    processes
        Number of worker processes.
    plan
        Text for a table: processes, threads in each, samples buffered in each.
    ahead
        Bound on the batches that the pipeline makes before the loop asks for them.
    dataset
        The pipeline.
    """

    processes: int
    plan: str
    ahead: int
    dataset: Any

    @contextmanager
    def batches(self) -> Iterator[Iterator[Any]]:
        """Iterate over the pipeline's batches, and end its processes afterwards."""
        iterator = iter(self.dataset)
        try:
            yield map(as_tensors, iterator)
        finally:
            iterator.close()


def pick(dataset: Any, batch: int, memory: int) -> Picked:
    """Ask the picker about `dataset`, and open a pipeline with its answer.

    Parameters
    ----------
    memory
        Bytes for the picker, which has no default for them.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    shards = isinstance(dataset, Shards)
    samples = _of_shards(dataset) if shards else _of_samples(dataset)
    with _threads_ended():
        config: PerformanceConfig = pick_performance_config(
            samples(grain.ReadOptions()).batch(batch),
            ram_budget_mb=memory >> 20,
            max_workers=None,
            max_buffer_size=None,
        )
    processes, read = config.multiprocessing_options, config.read_options
    opened = samples(read).batch(batch)
    if processes.num_workers:
        opened = opened.mp_prefetch(processes)
    if shards:
        inside, buffered = f"{CYCLE} shards", 1
    else:
        # A thread without a place in the buffer waits.
        threads = min(read.num_threads, read.prefetch_buffer_size)
        inside, buffered = f"{threads} threads", read.prefetch_buffer_size // batch
    return Picked(
        processes.num_workers,
        f"{processes.num_workers} x {inside}",
        # Those of the buffer, one that is finished and one that is in the pipe, for each process.
        max(1, processes.num_workers) * (buffered + processes.per_worker_buffer_size + 1),
        opened,
    )


@contextmanager
def _threads_ended() -> Iterator[None]:
    """Wait for the threads that were started meanwhile.

    The picker closes none of its iterators, so their threads still read samples when it returns. A
    fork copies the file lock that such a thread holds, and the workers of torch's loader wait forever.
    """
    before = set(threading.enumerate())
    yield
    gc.collect()  # ends the iterators
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        if thread.is_alive():
            raise RuntimeError(
                f"{thread.name} of Grain's picker still reads after {PATIENCE:.0f} s"
            )


def _of_samples(dataset: Any) -> Callable[[Any], Any]:
    source = grain.MapDataset.source(Arrays(dataset))
    return lambda read: source.to_iter_dataset(read)


def _of_shards(dataset: Shards) -> Callable[[Any], Any]:
    """Shards have no step that takes `ReadOptions`: each is read on one thread."""
    shards = grain.MapDataset.range(len(dataset.sizes)).map(lambda shard: Shard(dataset, shard))
    return lambda read: InterleaveIterDataset(shards, cycle_length=CYCLE)


class Shard(grain.IterDataset[Any]):
    """One shard, which can only be read from its beginning."""

    def __init__(self, dataset: Shards, number: int) -> None:
        super().__init__()
        self._dataset, self._number = dataset, number

    def __iter__(self) -> grain.DatasetIterator[Any]:
        return _ShardIterator(self._dataset.shard(self._number))


class _ShardIterator(grain.DatasetIterator[Any]):
    def __init__(self, samples: Iterator[Any]) -> None:
        super().__init__()
        self._samples, self._read = samples, 0

    def __next__(self) -> Any:
        sample = next(self._samples)
        self._read += 1
        return sample

    def get_state(self) -> dict[str, int]:
        return {"read": self._read}

    def set_state(self, state: dict[str, int]) -> None:
        for _ in range(state["read"] - self._read):
            next(self)
