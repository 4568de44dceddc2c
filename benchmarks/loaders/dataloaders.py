"""torch's `DataLoader`, and hybridloader's in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch.utils.data

from benchmarks.case import CannotDo
from benchmarks.loaders.work import PREFETCH, Opener, Running, Work
from benchmarks.names import DATALOADERS, FEW_PROCESSES, SEEDED, TORCH_ANY_ORDER, TORCH_FORKSERVER


class Loader:
    """torch's loader, or one like it, running.

    Parameters
    ----------
    partial
        True if its batches come in any order, so that they are not compared.
    """

    def __init__(self, loader: Any, partial: bool = False) -> None:
        self._loader = loader
        self.partial = partial
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
        "collate_fn": list if work.uncollated else None,
        "num_workers": work.workers,
        "persistent_workers": work.keep and work.workers > 0,
        # Not said where it is what all take by default: a loader of ours that is told reads no further.
        "prefetch_factor": work.prefetch if work.workers and work.prefetch != PREFETCH else None,
    }


def open_torch(work: Work, **more: Any) -> Running:
    """Torch's loader; `more` are further arguments of it."""
    context = work.start_method if work.workers else None
    return Loader(
        torch.utils.data.DataLoader(
            work.dataset, multiprocessing_context=context, **_options(work), **more
        ),
        partial=not more.get("in_order", True),
    )


def open_torch_forkserver(work: Work) -> Running:
    """Torch's loader with workers that a server forks. The server outlives the loader."""
    return open_torch(replace(work, start_method="forkserver"))


def _backend(name: str) -> Any:
    """The backend that a loader of ours is called after: ``"kind"`` or ``"kind (option)"``."""
    from hybridloader import SharedMemory, Spawn

    started: dict[str, Any] = {
        "spawn (preload=False)": Spawn(preload=False),
        "shared-memory (loky)": SharedMemory(start_method="loky"),
        "shared-memory (forkserver)": SharedMemory(start_method="forkserver"),
    }
    return started.get(name, name)


def open_ours(name: str, work: Work, **more: Any) -> Running:
    """hybridloader's loader with the backend `name`; `more` are further arguments of it."""
    import hybridloader

    options = _options(work)
    if name == "inline":
        options |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    if name == "fork" and work.start_method != "fork":
        raise CannotDo("it forks")
    backend = _backend(name) if options["num_workers"] else None
    return Loader(hybridloader.DataLoader(work.dataset, backend=backend, **options, **more))


def _few_processes(work: Work) -> Running:
    """Forked workers of 4 threads each, as many threads in all as `work` has workers."""
    workers = max(1, work.workers // 4)
    return open_ours("fork", replace(work, workers=workers), threads_per_worker=4)


DATALOADER_OPENERS: dict[str, Opener] = {
    "torch": open_torch,
    TORCH_FORKSERVER: open_torch_forkserver,
    TORCH_ANY_ORDER: partial(open_torch, in_order=False),
    **{name: partial(open_ours, name) for name in DATALOADERS},
    SEEDED: partial(open_ours, "fork", seeding="sample"),
    FEW_PROCESSES: _few_processes,
}
