"""torch loaders whose samples name the process that made them."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import get_worker_info

from support.failing_datasets import Samples


def origin(index: int) -> tuple[str, int]:
    """Return the kind of the worker and the process that make the sample."""
    info: Any = get_worker_info()
    # torch's own workers have no `worker_method` before torch 2.12.
    method = getattr(info, "worker_method", "multiprocessing") if info else "caller"
    return method, os.getpid()


ORIGINS: Any = Samples(origin, 4)


def origins(loader: Any) -> set[tuple[str, bool]]:
    """Return the kinds of workers, and whether they were in this process."""
    return {(how, pid == os.getpid()) for how, pid in loader}


def origin_loader(workers: int = 2, **more: Any) -> Any:
    return TorchLoader(ORIGINS, batch_size=None, num_workers=workers, **more)


THREAD = {("thread", True)}
PROCESS = {("multiprocessing", False)}
