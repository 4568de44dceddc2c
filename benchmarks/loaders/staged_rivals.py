"""The rivals at the work of case P4, each in the forms that its own documentation offers for it.

- torchdata.nodes: whole samples on threads; or the three steps as a `ParallelMapper` each, two of them
  on threads and the last in processes ("stages").
- SPDL: the same two forms, `PipelineBuilder.pipe` with a `ProcessPoolExecutor` for what holds the GIL,
  as its guide on parallelism has it.
- Grain: read threads; or worker processes, in each of which read threads share the waiting (its
  default).

What is not here opens as in `rivals`: workers that fetch whole batches. Where workers are threads, there
are as many as our pipeline has to read with, however many processes the variant allows.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch.utils.data

from benchmarks.loaders.dataloaders import PREFETCH, Running, Work
from benchmarks.loaders.pipelines import READERS
from benchmarks.loaders.rivals import Arrays, as_tensors

_AHEAD = 2
"""Tasks for each process: one to work on, one to follow it."""


class Staged:
    """torchdata.nodes, running.

    Parameters
    ----------
    steps
        The function, the workers and the method of each `ParallelMapper`.
    """

    def __init__(self, work: Work, steps: list[tuple[Callable[[Any], Any], int, Any]]) -> None:
        from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher
        from torchdata.nodes import SamplerWrapper as Sampled

        node: Any = Sampled(work.sampler())
        for function, workers, method in steps:
            node = ParallelMapper(
                node,
                map_fn=function,
                num_workers=workers,
                in_order=True,
                method=method,
                multiprocessing_context=work.start_method if method == "process" else None,
            )
        node = Batcher(node, batch_size=work.batch, drop_last=False)
        node = Mapper(node, torch.utils.data.default_collate)
        self._loader: Any = Loader(Prefetcher(node, prefetch_factor=PREFETCH))

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None
        gc.collect()


def _nodes_threads(work: Work) -> Running:
    return Staged(work, [(work.dataset.__getitem__, READERS, "thread")])


def _nodes_stages(work: Work) -> Running:
    dataset = work.dataset
    steps: list[tuple[Callable[[Any], Any], int, Any]] = [
        (dataset.read, READERS, "thread"),
        (dataset.decode, work.cores, "thread"),
        (dataset.augment, work.workers, "process"),
    ]
    return Staged(work, steps)


class Builder:
    """SPDL's pipeline, running: a new one for each epoch, and a new pool of processes.

    Parameters
    ----------
    staged
        Whether the three steps are stages of their own, the last of them in processes.
    """

    def __init__(self, work: Work, staged: bool) -> None:
        self._work, self._staged = work, staged
        self._epoch: Any = None

    def epoch(self) -> Iterator[Any]:
        self.close()
        self._epoch = self._iterate()
        epoch: Iterator[Any] = self._epoch
        return epoch

    def _iterate(self) -> Iterator[Any]:
        work = self._work
        if not self._staged:
            yield from self._run(None)
            return
        context = multiprocessing.get_context(work.start_method)
        pool = ProcessPoolExecutor(work.workers, mp_context=context)
        try:
            yield from self._run(pool)
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(self, pool: ProcessPoolExecutor | None) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        work, dataset = self._work, self._work.dataset
        builder = PipelineBuilder().add_source(work.sampler())
        if pool is None:
            builder.pipe(dataset.__getitem__, concurrency=READERS, output_order="input")
        else:
            builder.pipe(dataset.read, concurrency=READERS, output_order="input")
            builder.pipe(dataset.decode, concurrency=work.cores, output_order="input")
            builder.pipe(
                dataset.augment,
                executor=pool,
                concurrency=_AHEAD * work.workers,
                output_order="input",
            )
        builder.aggregate(work.batch).pipe(torch.utils.data.default_collate).add_sink(PREFETCH)
        pipeline = builder.build(num_threads=READERS + work.cores + 1)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    def close(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None


class Grains:
    """Grain, running: samples are read one by one, on threads, and batched then.

    Parameters
    ----------
    processes
        How many do this; 0: this one.
    """

    def __init__(self, work: Work, processes: int) -> None:
        import grain

        logging.getLogger("absl").setLevel(logging.ERROR)
        threads = max(1, READERS // processes) if processes else READERS
        read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=PREFETCH * threads)
        samples = grain.MapDataset.source(Arrays(work)).to_iter_dataset(read)
        self._dataset: Any = samples.batch(work.batch)
        if processes:
            self._dataset = self._dataset.mp_prefetch(
                grain.multiprocessing.MultiprocessingOptions(
                    num_workers=processes, per_worker_buffer_size=PREFETCH
                )
            )
        self._iterator: Any = None

    def epoch(self) -> Iterator[Any]:
        self.close()
        self._iterator = iter(self._dataset)
        return map(as_tensors, self._iterator)

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


STAGED: dict[str, Callable[[Work], Running]] = {
    "torchdata threads": _nodes_threads,
    "torchdata stages": _nodes_stages,
    "SPDL threads": lambda work: Builder(work, staged=False),
    "SPDL stages": lambda work: Builder(work, staged=True),
    "Grain threads": lambda work: Grains(work, 0),
    "Grain processes": lambda work: Grains(work, work.workers),
}
