"""Loaders whose workers are actors of a Ray cluster of this machine: ours, Ray Data, and bare calls.

The cluster is started once in each runner process, and ends with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from benchmarks.case import check_installed
from benchmarks.loaders.dataloaders import open_ours
from benchmarks.loaders.work import Dropping, Fetch, Opener, Running, Work
from benchmarks.names import BARE_CALLS, RAY, RAY_DATA

_STORE = 2 << 30
"""Bytes of the object store: the batches in work are some hundred MB."""


def _connected(work: Work) -> Any:
    """Return ray, with a cluster that has a CPU for each worker, and two for what Ray Data runs."""
    check_installed(RAY_DATA)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if not ray.is_initialized():
        ray.init(
            "local",
            num_cpus=work.workers + 2,
            object_store_memory=_STORE,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
        )
    return ray


def _ours(work: Work) -> Running:
    _connected(work)
    return open_ours(RAY, work)


class _Batches:
    """Function of Ray Data's: a batch by its number, as one row."""

    def __init__(self, work: Work) -> None:
        self._fetch, self._batch = Fetch(work), work.batch

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {"item": self._fetch(rows["id"].tolist()).numpy()}


def _ray_data(work: Work) -> Running:
    """Batches by actors that stay, in order, as torch tensors; prefetched as deep as elsewhere."""
    ray = _connected(work)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False

    class Epochs:
        def __iter__(self) -> Iterator[Any]:
            rows = ray.data.range(len(work.dataset), override_num_blocks=work.workers)
            made = rows.map_batches(
                _Batches,
                fn_constructor_args=(work,),
                batch_size=work.batch,
                concurrency=work.workers,
                num_cpus=1,
            )
            batches = made.iter_torch_batches(
                batch_size=work.batch, prefetch_batches=work.prefetch * work.workers
            )
            return (batch["item"] for batch in batches)

    return Dropping(Epochs())


class _BareCalls:
    """One actor, a call for each batch, and a wait for what it returns."""

    def __init__(self, work: Work) -> None:
        ray = _connected(work)
        self._ray, self._work = ray, work
        self._actor = ray.remote(num_cpus=1)(_Fetcher).remote(work)

    def epoch(self) -> Iterator[Any]:
        for indices in self._work.batch_sampler():
            yield self._ray.get(self._actor.fetch.remote(indices))

    def close(self) -> None:
        self._ray.kill(self._actor)


class _Fetcher:
    def __init__(self, work: Work) -> None:
        self._fetch = Fetch(work)

    def fetch(self, indices: list[int]) -> Any:
        return self._fetch(indices).numpy()


BATCH_OPENERS: dict[str, Opener] = {
    RAY: _ours,
    RAY_DATA: _ray_data,
    BARE_CALLS: _BareCalls,
}
