"""Data pipes of torch: their graph allows one thread at a time. Imports no torch by itself."""

from __future__ import annotations

import sys
import threading
from typing import Any

from hybridloader._support import system


def is_datapipe(dataset: Any) -> bool:
    """Return True if `dataset` is one of torch's data pipes.

    torch finds the parts of a pipe by pickling it. Meanwhile it keeps a hook on the class
    (torch/utils/data/graph.py, 2.13). A pipe that another thread walks or pickles at that moment
    becomes ``'STUB'``.
    """
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(dataset, (data.IterDataPipe, data.MapDataPipe))


_walking = threading.Lock()


def _fresh_lock() -> None:
    global _walking
    _walking = threading.Lock()  # a copy from the parent may stay locked forever


system.at_fork(after_in_child=_fresh_lock)


def seed_datapipe(dataset: Any, shared_seed: int) -> Any:
    """Seed the shufflers of an `IterDataPipe` from the seed that all its workers share."""
    import torch
    from torch.utils.data.graph_settings import apply_random_seed

    with _walking:
        return apply_random_seed(dataset, torch.Generator().manual_seed(shared_seed))
