"""SPDL 0.8: its pipeline in threads, the same in a subprocess, and its look-alike of torch's loader.

The subprocess is kept from one epoch to the next, with a pool of shared memory. At three stages:
whole samples on threads; or ("stages") a stage for each, with a `ProcessPoolExecutor` for the one that
holds the GIL, as its guide on parallelism has it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from typing import Any

import torch.utils.data

from benchmarks.case import CannotDo
from benchmarks.loaders.work import (
    PREFETCH,
    READERS,
    Closing,
    Dropping,
    Fetch,
    Opener,
    Running,
    Work,
)

_TASKS_PER_PROCESS = 2
"""One to work on, one to follow it."""


def _batches(work: Work) -> Any:
    from spdl.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder()
    builder.add_source(work.batch_sampler())
    return builder.pipe(Fetch(work), concurrency=work.workers, output_order="input")


def _items(builder: Any, threads: int) -> Generator[Any]:
    pipeline = builder.build(num_threads=threads)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def _in_threads(work: Work) -> Running:
    """A new pipeline for each epoch, as its own DataLoader makes one."""
    return Closing(lambda: _items(_batches(work).add_sink(PREFETCH * work.workers), work.workers))


def _in_subprocess(work: Work) -> Running:
    from spdl.pipeline import SharedMemorySegmentPool, run_pipeline_in_subprocess

    # Segments in use: those buffered, one under way on either side, and those the consumer holds.
    count = PREFETCH * work.workers + 4
    arena = None
    if work.start_method == "fork":  # its pool has a lock of the default start method's kind
        arena = SharedMemorySegmentPool(segment_size=work.batch_bytes + 65536, count=count)
    source: Any = run_pipeline_in_subprocess(
        _batches(work).add_sink(PREFETCH * work.workers).get_config(),
        num_threads=work.workers,
        mp_context=work.start_method,
        buffer_size=PREFETCH * work.workers,
        arena=arena,
    )
    return Dropping(source)


class LookAlike(Closing):
    """Its look-alike of torch's loader: worker processes from a ProcessPoolExecutor."""

    def __init__(self, work: Work) -> None:
        from spdl.dataloader import get_pytorch_dataloader

        if work.keep:
            raise CannotDo("`persistent_workers` is not supported (its own message)")
        self._loader: Any = get_pytorch_dataloader(
            work.dataset,
            batch_size=work.batch,
            sampler=work.sampler(),
            num_workers=work.workers,
            prefetch_factor=PREFETCH,
            multiprocessing_context=work.start_method,
            in_order=True,
        )
        super().__init__(lambda: iter(self._loader))

    def close(self) -> None:
        super().close()
        if self._loader is not None:
            self._loader._shmem.close()
            self._loader._shmem.unlink()
            self._loader = None


def _samples(staged: bool, work: Work) -> Iterator[Any]:
    if not staged:
        yield from _items(_stages(work, None), READERS + work.cores + 1)
        return
    context = multiprocessing.get_context(work.start_method)
    pool = ProcessPoolExecutor(work.workers, mp_context=context)
    try:
        yield from _items(_stages(work, pool), READERS + work.cores + 1)
    finally:
        pool.shutdown(cancel_futures=True)


def _stages(work: Work, pool: Executor | None) -> Any:
    from spdl.pipeline import PipelineBuilder

    dataset = work.dataset
    builder: Any = PipelineBuilder()
    builder.add_source(work.sampler())
    if pool is None:
        builder.pipe(dataset.__getitem__, concurrency=READERS, output_order="input")
    else:
        concurrency = _TASKS_PER_PROCESS * work.workers
        builder.pipe(dataset.read, concurrency=READERS, output_order="input")
        builder.pipe(dataset.decode, concurrency=work.cores, output_order="input")
        builder.pipe(dataset.augment, executor=pool, concurrency=concurrency, output_order="input")
    builder.aggregate(work.batch).pipe(torch.utils.data.default_collate).add_sink(PREFETCH)
    return builder


def _one_by_one(work: Work) -> Generator[Any]:
    """Samples by as many threads as there are workers, and batches of them."""
    from spdl.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder()
    builder.add_source(work.sampler())
    builder.pipe(work.dataset.__getitem__, concurrency=work.workers, output_order="input")
    builder.aggregate(work.batch).pipe(torch.utils.data.default_collate)
    return _items(builder.add_sink(PREFETCH * work.workers), work.workers + 1)


BATCH_OPENERS: dict[str, Opener] = {
    "SPDL threads": _in_threads,
    "SPDL subprocess": _in_subprocess,
    "SPDL processes": LookAlike,
    "SPDL threads by samples": lambda work: Closing(partial(_one_by_one, work)),
}
STAGE_OPENERS: dict[str, Opener] = {
    "SPDL threads": lambda work: Closing(partial(_samples, False, work)),
    "SPDL stages": lambda work: Closing(partial(_samples, True, work)),
}
