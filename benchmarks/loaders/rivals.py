"""The other loaders, used as their documentation says. Each is imported when it is opened.

- torchdata 0.11: "Migrating to torchdata.nodes from torch.utils.data": Batcher, ParallelMapper over a
  function that fetches and collates a batch, Prefetcher, Loader.
- SPDL 0.8: `PipelineBuilder` in threads; the same in a subprocess (which is kept from one epoch to the
  next) with a pool of shared memory; `get_pytorch_dataloader`, its look-alike of torch's.
- Grain 0.2: `MapDataset`, batched, then read by threads (`ReadOptions`) or processes (`mp_prefetch`). It
  carries numpy, so tensors are given to it as arrays and come out as tensors, both without a copy.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.utils.data

from benchmarks.loaders.dataloaders import PREFETCH, CannotDo, Running, Work

PACKAGES = {"torchdata": "torchdata", "SPDL": "spdl-core", "Grain": "grain"}
"""First word of a rival's name -> what to install."""


class Fetch:
    """From a list of indices to a batch; can be pickled."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(indices) if many else [self.dataset[index] for index in indices]
        return torch.utils.data.default_collate(samples)


def _batches(work: Work) -> Any:
    """Lists of indices, lazily; may be iterated again."""
    return torch.utils.data.BatchSampler(work.sampler(), work.batch, False)


class Nodes:
    """torchdata.nodes, running. Nothing there has a close(): what is let go of ends."""

    def __init__(self, work: Work, method: Any) -> None:
        from torchdata.nodes import Batcher, ParallelMapper, Prefetcher, SamplerWrapper
        from torchdata.nodes import Loader as NodesLoader

        if work.workers == 0:
            raise CannotDo("measured with workers only")
        node: Any = SamplerWrapper(work.sampler())
        node = Batcher(node, batch_size=work.batch, drop_last=False)
        node = ParallelMapper(
            node,
            map_fn=Fetch(work.dataset),
            num_workers=work.workers,
            in_order=True,
            method=method,
            multiprocessing_context=work.start_method if method == "process" else None,
        )
        node = Prefetcher(node, prefetch_factor=PREFETCH * work.workers)
        self._loader: Any = NodesLoader(node)

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None
        gc.collect()


class Pipelines:
    """SPDL's pipeline in threads, running: a new pipeline for each epoch, as its own DataLoader does."""

    def __init__(self, work: Work) -> None:
        if work.workers == 0:
            raise CannotDo("measured with workers only")
        self._work = work
        self._epoch: Any = None

    def epoch(self) -> Iterator[Any]:
        self.close()
        self._epoch = self._iterate()
        epoch: Iterator[Any] = self._epoch
        return epoch

    def _iterate(self) -> Iterator[Any]:
        work = self._work
        pipeline = _builder(work).build(num_threads=work.workers)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    def close(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None


def _builder(work: Work) -> Any:
    from spdl.pipeline import PipelineBuilder

    return (
        PipelineBuilder()
        .add_source(_batches(work))
        .pipe(Fetch(work.dataset), concurrency=work.workers, output_order="input")
        .add_sink(PREFETCH * work.workers)
    )


class Subprocess:
    """SPDL's pipeline of threads in one subprocess, batches through its pool of shared memory."""

    def __init__(self, work: Work) -> None:
        from spdl.pipeline import SharedMemorySegmentPool, run_pipeline_in_subprocess

        if work.workers == 0:
            raise CannotDo("measured with workers only")
        # Full are: what is buffered, one under way on either side and those the consumer holds.
        count = PREFETCH * work.workers + 4
        arena = None
        if work.start_method == "fork":  # its pool has a lock of the default start method's kind
            arena = SharedMemorySegmentPool(segment_size=work.batch_bytes + 65536, count=count)
        self._source: Any = run_pipeline_in_subprocess(
            _builder(work).get_config(),
            num_threads=work.workers,
            mp_context=work.start_method,
            buffer_size=PREFETCH * work.workers,
            arena=arena,
        )

    def epoch(self) -> Iterator[Any]:
        return iter(self._source)

    def close(self) -> None:
        self._source = None
        gc.collect()


class LookAlike:
    """SPDL's look-alike of torch's loader, running: worker processes from a ProcessPoolExecutor."""

    def __init__(self, work: Work) -> None:
        from spdl.dataloader import get_pytorch_dataloader

        if work.workers == 0:
            raise CannotDo("measured with workers only")
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
        self._epoch: Any = None

    def epoch(self) -> Iterator[Any]:
        self._end()
        self._epoch = iter(self._loader)
        epoch: Iterator[Any] = self._epoch
        return epoch

    def _end(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None

    def close(self) -> None:
        self._end()
        if self._loader is not None:
            self._loader._shmem.close()
            self._loader._shmem.unlink()
            self._loader = None


class Arrays:
    """A source for Grain: a dataset in the order of a sampler, its tensors as arrays."""

    def __init__(self, work: Work) -> None:
        self._dataset = work.dataset
        self._order = list(work.sampler()) if work.shuffled else None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return _as_arrays(self._dataset[int(index) if self._order is None else self._order[index]])


def _as_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, tuple):
        return tuple(map(_as_arrays, value))
    return value


def as_tensors(value: Any) -> Any:
    """What Grain carried, as `default_collate` gives it."""
    if isinstance(value, tuple | list):
        return [as_tensors(item) for item in value]
    return torch.from_numpy(value)


class Grains:
    """Grain, running. An epoch ends by closing its iterator: with it go its workers."""

    def __init__(self, work: Work, method: str) -> None:
        import grain

        logging.getLogger("absl").setLevel(logging.ERROR)
        if work.workers == 0:
            raise CannotDo("measured with workers only")
        processes = method == "process"
        if processes and work.keep:
            raise CannotDo("has no workers that stay from one epoch to the next")
        ahead = PREFETCH * work.workers
        read = grain.ReadOptions(
            num_threads=0 if processes else work.workers,
            prefetch_buffer_size=0 if processes else ahead,
        )
        batched = grain.MapDataset.source(Arrays(work)).batch(work.batch)
        self._dataset: Any = batched.to_iter_dataset(read)
        if processes:
            self._dataset = self._dataset.mp_prefetch(
                grain.multiprocessing.MultiprocessingOptions(
                    num_workers=work.workers, per_worker_buffer_size=PREFETCH
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


RIVALS: dict[str, Callable[[Work], Running]] = {
    "torchdata threads": lambda work: Nodes(work, "thread"),
    "torchdata processes": lambda work: Nodes(work, "process"),
    "SPDL threads": Pipelines,
    "SPDL subprocess": Subprocess,
    "SPDL processes": LookAlike,
    "Grain threads": lambda work: Grains(work, "thread"),
    "Grain processes": lambda work: Grains(work, "process"),
}


def open_rival(
    name: str, work: Work, others: Mapping[str, Callable[[Work], Running]] = MappingProxyType({})
) -> Running:
    """Open a rival; `CannotDo` if it is not installed. What `others` has goes first."""
    package = PACKAGES[name.split(" ")[0]]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise CannotDo(f"not installed: pip install {package}") from None
    return (others.get(name) or RIVALS[name])(work)
