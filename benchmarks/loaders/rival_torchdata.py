"""torchdata.nodes 0.11, as its "Migrating to torchdata.nodes from torch.utils.data" has it.

Batches: a `ParallelMapper` over a function that fetches and collates a batch. Three stages: whole
samples on threads; or ("stages") a `ParallelMapper` for each, two on threads, the last in processes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.utils.data

from benchmarks.loaders.work import PREFETCH, READERS, Dropping, Fetch, Opener, Running, Work


def _parallel(
    node: Any, function: Callable[[Any], Any], workers: int, method: Any, work: Work
) -> Any:
    from torchdata.nodes import ParallelMapper

    return ParallelMapper(
        node,
        map_fn=function,
        num_workers=workers,
        in_order=True,
        method=method,
        multiprocessing_context=work.start_method if method == "process" else None,
    )


def _batches(method: str, work: Work) -> Running:
    from torchdata.nodes import Batcher, Loader, Prefetcher, SamplerWrapper

    node: Any = Batcher(SamplerWrapper(work.sampler()), batch_size=work.batch, drop_last=False)
    node = _parallel(node, Fetch(work), work.workers, method, work)
    return Dropping(Loader(Prefetcher(node, prefetch_factor=PREFETCH * work.workers)))


def _samples(staged: bool, work: Work, threads: int = READERS, ahead: int = PREFETCH) -> Running:
    from torchdata.nodes import Batcher, Loader, Mapper, Prefetcher, SamplerWrapper

    node: Any = SamplerWrapper(work.sampler())
    if staged:
        node = _parallel(node, work.dataset.read, READERS, "thread", work)
        node = _parallel(node, work.dataset.decode, work.cores, "thread", work)
        node = _parallel(node, work.dataset.augment, work.workers, "process", work)
    else:
        node = _parallel(node, work.dataset.__getitem__, threads, "thread", work)
    node = Batcher(node, batch_size=work.batch, drop_last=False)
    node = Mapper(node, torch.utils.data.default_collate)
    return Dropping(Loader(Prefetcher(node, prefetch_factor=ahead)))


def _one_by_one(work: Work) -> Running:
    """Samples by as many threads as there are workers, and batches of them."""
    return _samples(False, work, work.workers, PREFETCH * work.workers)


BATCH_OPENERS: dict[str, Opener] = {
    "torchdata threads": partial(_batches, "thread"),
    "torchdata processes": partial(_batches, "process"),
    "torchdata threads by samples": _one_by_one,
}
STAGE_OPENERS: dict[str, Opener] = {
    "torchdata threads": partial(_samples, False),
    "torchdata stages": partial(_samples, True),
}
