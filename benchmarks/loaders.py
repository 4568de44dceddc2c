"""Loaders by name, opened for the same work: torch's, hybridloader's by backend, and the rivals'.

All have the same workers and prefetch two batches for each. The rivals are used as their documentation
recommends. A name begins with the project, and ends with its form: "SPDL subprocess".
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import logging
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.utils.data
from torch.utils.data import BatchSampler, SequentialSampler, default_collate

PREFETCH = 2
"""Batches that each worker makes ahead: torch's default."""

READERS = 32
"""Threads that wait for a server: at 20 ms a sample they read 1,600 samples a second."""

PACKAGES = {
    "torchdata": "torchdata",
    "SPDL": "spdl-core",
    "Grain": "grain",
    "webdataset": "webdataset",
    "litdata": "litdata",
    "pyarrow": "pyarrow",
}
"""First word of a rival's name -> the package to install."""


def project(loader: str) -> str:
    """Return the first word of a loader's name."""
    return re.split("[ ,]", loader)[0]


def is_rival(loader: str) -> bool:
    """Return True if `loader` is neither torch's nor ours."""
    return project(loader) in PACKAGES


def missing(loader: str) -> str:
    """Return the package that `loader` needs and that is not installed, or ""."""
    package = PACKAGES.get(project(loader), "")
    try:
        importlib.metadata.version(package or "torch")
    except importlib.metadata.PackageNotFoundError:
        return package
    return ""


@dataclass(frozen=True)
class Work:
    """Batches to deliver in order, by workers of a start method, kept from epoch to epoch or not."""

    dataset: Any
    batch: int
    workers: int
    start: str = "fork"
    keep: bool = False

    @property
    def indices(self) -> BatchSampler:
        return BatchSampler(SequentialSampler(self.dataset), self.batch, drop_last=False)


class Opened:
    """Opened loader: `begin` makes the iterator of an epoch. The one before ends first, unless kept."""

    def __init__(self, begin: Callable[[], Any], keep: bool = False) -> None:
        self._begin: Callable[[], Any] | None = begin
        self._keep, self._iterator = keep, None

    def epoch(self) -> Iterator[Any]:
        if not self._keep:
            self._end()
        assert self._begin is not None
        self._iterator = self._begin()
        return self._iterator

    def close(self) -> None:
        self._end()
        self._begin = None
        gc.collect()  # torchdata and SPDL end their workers when nothing refers to them

    def _end(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()
        elif hasattr(self._iterator, "_shutdown_workers"):
            # One in ten of torch 2.13's fresh workers aborts as it exits, which is its RuntimeError.
            with contextlib.suppress(RuntimeError):
                self._iterator._shutdown_workers()
        self._iterator = None


def _fetch(dataset: Any, indices: list[int]) -> Any:
    return default_collate([dataset[index] for index in indices])


# -- torch and hybridloader --------------------------------------------------------------------------


def _options(work: Work) -> dict[str, Any]:
    keep = work.keep and work.workers > 0
    return {"batch_size": work.batch, "num_workers": work.workers, "persistent_workers": keep}


def _torch(work: Work, **more: Any) -> Opened:
    loader: Any = torch.utils.data.DataLoader(
        work.dataset, multiprocessing_context=work.start, **_options(work), **more
    )
    return Opened(partial(iter, loader), work.keep)


def _ours(backend: str, work: Work) -> Opened:
    import hybridloader

    loader = hybridloader.DataLoader(work.dataset, backend=backend, **_options(work))
    return Opened(partial(iter, loader), work.keep)


def _pipeline(work: Work) -> Opened:
    """Samples on threads, one task each, and batches of them."""
    from hybridloader import Pipeline

    workers: dict[str, Any] = {"backend": "threads", "num_workers": work.workers}
    pipe = Pipeline.from_dataset(work.dataset, **workers).batch(work.batch)
    return Opened(partial(iter, pipe))


def _stages(work: Work) -> Opened:
    """Read and decode on threads, augment in processes."""
    from hybridloader import Pipeline

    dataset = work.dataset
    pipe = (
        Pipeline.from_iterable(range(len(dataset)))
        .map(dataset.read, backend="threads", num_workers=READERS)
        .map(dataset.decode, backend="threads", num_workers=work.workers)
        .map(dataset.augment, backend="shared-memory", num_workers=work.workers)
        .batch(work.batch)
    )
    return Opened(partial(iter, pipe))


def _threads_in_processes(work: Work) -> Opened:
    """Whole samples in processes, in each of which threads share the waiting."""
    from hybridloader import Pipeline

    pipe = Pipeline.from_iterable(range(len(work.dataset))).map(
        work.dataset.__getitem__,
        backend="shared-memory",
        num_workers=work.workers,
        threads_per_worker=READERS // work.workers,
    )
    return Opened(partial(iter, pipe.batch(work.batch)))


# -- torchdata.nodes, as its "Migrating to torchdata.nodes from torch.utils.data" has it ---------------


def _mapped(
    node: Any, function: Callable[[Any], Any], workers: int, method: str, work: Work
) -> Any:
    from torchdata.nodes import ParallelMapper

    context = work.start if method == "process" else None
    return ParallelMapper(
        node, function, workers, in_order=True, method=method, multiprocessing_context=context
    )


def _nodes(method: str, work: Work) -> Opened:
    from torchdata.nodes import Batcher, Loader, Prefetcher, SamplerWrapper

    node: Any = Batcher(
        SamplerWrapper(SequentialSampler(work.dataset)), work.batch, drop_last=False
    )
    node = _mapped(node, partial(_fetch, work.dataset), work.workers, method, work)
    return Opened(partial(iter, Loader(Prefetcher(node, PREFETCH * work.workers))))


def _nodes_stages(work: Work) -> Opened:
    from torchdata.nodes import Batcher, Loader, Mapper, Prefetcher, SamplerWrapper

    node: Any = SamplerWrapper(SequentialSampler(work.dataset))
    node = _mapped(node, work.dataset.read, READERS, "thread", work)
    node = _mapped(node, work.dataset.decode, work.workers, "thread", work)
    node = _mapped(node, work.dataset.augment, work.workers, "process", work)
    node = Mapper(Batcher(node, work.batch, drop_last=False), default_collate)
    return Opened(partial(iter, Loader(Prefetcher(node, PREFETCH * work.workers))))


# -- SPDL --------------------------------------------------------------------------------------------


def _items(builder: Any, threads: int) -> Iterator[Any]:
    pipeline = builder.build(num_threads=threads)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def _spdl_batches(work: Work) -> Any:
    from spdl.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder().add_source(work.indices)
    builder.pipe(partial(_fetch, work.dataset), concurrency=work.workers, output_order="input")
    return builder.add_sink(PREFETCH * work.workers)


def _spdl_threads(work: Work) -> Opened:
    """A new pipeline for each epoch, as its own DataLoader makes one."""
    return Opened(lambda: _items(_spdl_batches(work), work.workers))


def _spdl_subprocess(work: Work) -> Opened:
    """The same in a subprocess that is kept, with a pool of shared memory for batches up to 40 MB."""
    from spdl.pipeline import SharedMemorySegmentPool, run_pipeline_in_subprocess

    ahead = PREFETCH * work.workers
    arena = None
    if work.start == "fork":  # its pool has a lock of the default start method's kind
        # Those buffered, one in flight on either side, and those that the loop holds.
        arena = SharedMemorySegmentPool(segment_size=40_000_000, count=ahead + 4)
    source: Any = run_pipeline_in_subprocess(
        _spdl_batches(work).get_config(),
        num_threads=work.workers,
        mp_context=work.start,
        buffer_size=ahead,
        arena=arena,
    )
    return Opened(partial(iter, source))


def _spdl_stages(work: Work) -> Iterator[Any]:
    """Read and decode on threads, augment in a `ProcessPoolExecutor`, as its guide has it."""
    from spdl.pipeline import PipelineBuilder

    dataset, tasks = work.dataset, 2 * work.workers  # one to work on, and one to follow it
    pool = ProcessPoolExecutor(work.workers, multiprocessing.get_context(work.start))
    builder: Any = PipelineBuilder().add_source(SequentialSampler(dataset))
    builder.pipe(dataset.read, concurrency=READERS, output_order="input")
    builder.pipe(dataset.decode, concurrency=work.workers, output_order="input")
    builder.pipe(dataset.augment, executor=pool, concurrency=tasks, output_order="input")
    builder.aggregate(work.batch).pipe(default_collate).add_sink(PREFETCH * work.workers)
    try:
        yield from _items(builder, READERS + 3)
    finally:
        pool.shutdown(cancel_futures=True)


# -- Grain, which carries numpy: tensors go in and come out without a copy -----------------------------


class _Arrays:
    """Source for Grain: the samples of a dataset, tensors as arrays."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        sample = self._dataset[int(index)]
        return sample.numpy() if isinstance(sample, torch.Tensor) else sample


def grain_dataset(work: Work, processes: int, threads: int, *, samples: bool = False) -> Any:
    """Return a dataset of Grain: batches by threads, by processes, or samples by threads."""
    import grain

    logging.getLogger("absl").setLevel(logging.ERROR)
    ahead = PREFETCH * threads * (work.batch if samples else 1)
    read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    source = grain.MapDataset.source(_Arrays(work.dataset))
    if samples:
        return source.to_iter_dataset(read).batch(work.batch)
    dataset = source.batch(work.batch).to_iter_dataset(read)
    if not processes:
        return dataset
    options = grain.multiprocessing.MultiprocessingOptions(processes, PREFETCH)
    return dataset.mp_prefetch(options)


def _grain(processes: int, threads: int, work: Work, *, samples: bool = False) -> Opened:
    dataset = grain_dataset(work, processes, threads, samples=samples)

    def epoch() -> Iterator[Any]:
        iterator = iter(dataset)
        try:
            yield from map(torch.from_numpy, iterator)
        finally:
            iterator.close()

    return Opened(epoch)


LOADERS: dict[str, Callable[[Work], Opened]] = {
    "torch": _torch,
    "torch, any order": partial(_torch, in_order=False),
    **{name: partial(_ours, name) for name in ("threads", "fork", "shared-memory", "spawn")},
    "pipeline": _pipeline,
    "pipeline, 3 stages": _stages,
    "pipeline, threads in processes": _threads_in_processes,
    "torchdata threads": partial(_nodes, "thread"),
    "torchdata processes": partial(_nodes, "process"),
    "torchdata 3 stages": _nodes_stages,
    "SPDL threads": _spdl_threads,
    "SPDL subprocess": _spdl_subprocess,
    "SPDL 3 stages": lambda work: Opened(partial(_spdl_stages, work)),
    "Grain threads": lambda work: _grain(0, work.workers, work),
    "Grain processes": lambda work: _grain(work.workers, 0, work),
    "Grain by samples": lambda work: _grain(0, work.workers, work, samples=True),
    "Grain, threads in processes": lambda work: _grain(work.workers, READERS // work.workers, work),
}
