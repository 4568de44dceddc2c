"""hybridloader: a data-loading executor for PyTorch.

Public names load when they are first used: ``import hybridloader`` imports neither torch nor loky.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridloader._version import __version__

if TYPE_CHECKING:
    from hybridloader.backends.fork import Fork
    from hybridloader.backends.inline import Inline
    from hybridloader.backends.shared_memory import SharedMemory
    from hybridloader.backends.spawn import Spawn
    from hybridloader.backends.threads import Threads
    from hybridloader.contract import Backend, Crew
    from hybridloader.conversion import from_torch
    from hybridloader.dataloader import DataLoader
    from hybridloader.errors import (
        BackendUnavailable,
        CacheError,
        DamagedMessage,
        HybridLoaderError,
        IteratorClosed,
        NotReady,
        ResultNotSendable,
        ShardLost,
        ShippingError,
        StateError,
        TaskTimeout,
        TooManyErrors,
        WorkerDied,
        WorkerTimeout,
    )
    from hybridloader.installation import install, uninstall
    from hybridloader.losses import Skipped
    from hybridloader.memory import Memory
    from hybridloader.on_error import Replace, Retry, Skip
    from hybridloader.operators.base import Operator
    from hybridloader.pinning import Transfer
    from hybridloader.pipeline import Pipeline
    from hybridloader.registry import backend_names, get_backend
    from hybridloader.restart import RestartPolicy
    from hybridloader.sample_generators import rng
    from hybridloader.sample_seeds import SampleSeeding
    from hybridloader.sampling import (
        BucketBatchSampler,
        DistributedShuffleSampler,
        ShuffleSampler,
        TokenBudgetBatchSampler,
        WeightedSampler,
    )
    from hybridloader.shared_dict import SharedDict
    from hybridloader.shared_list import SharedList
    from hybridloader.worker_info import get_worker_info

_HOMES = {
    "Backend": "contract",
    "BackendUnavailable": "errors",
    "BucketBatchSampler": "sampling",
    "CacheError": "errors",
    "Crew": "contract",
    "DataLoader": "dataloader",
    "DamagedMessage": "errors",
    "DistributedShuffleSampler": "sampling",
    "Fork": "backends.fork",
    "HybridLoaderError": "errors",
    "Inline": "backends.inline",
    "IteratorClosed": "errors",
    "Memory": "memory",
    "NotReady": "errors",
    "Operator": "operators.base",
    "Pipeline": "pipeline",
    "Replace": "on_error",
    "RestartPolicy": "restart",
    "ResultNotSendable": "errors",
    "SampleSeeding": "sample_seeds",
    "Retry": "on_error",
    "ShardLost": "errors",
    "SharedDict": "shared_dict",
    "SharedList": "shared_list",
    "SharedMemory": "backends.shared_memory",
    "ShippingError": "errors",
    "ShuffleSampler": "sampling",
    "Skip": "on_error",
    "Skipped": "losses",
    "Spawn": "backends.spawn",
    "StateError": "errors",
    "TaskTimeout": "errors",
    "Threads": "backends.threads",
    "TokenBudgetBatchSampler": "sampling",
    "TooManyErrors": "errors",
    "Transfer": "pinning",
    "WeightedSampler": "sampling",
    "WorkerDied": "errors",
    "WorkerTimeout": "errors",
    "backend_names": "registry",
    "from_torch": "conversion",
    "get_backend": "registry",
    "get_worker_info": "worker_info",
    "install": "installation",
    "rng": "sample_generators",
    "uninstall": "installation",
}

__all__ = [
    "Backend",
    "BackendUnavailable",
    "BucketBatchSampler",
    "CacheError",
    "Crew",
    "DamagedMessage",
    "DataLoader",
    "DistributedShuffleSampler",
    "Fork",
    "HybridLoaderError",
    "Inline",
    "IteratorClosed",
    "Memory",
    "NotReady",
    "Operator",
    "Pipeline",
    "Replace",
    "RestartPolicy",
    "ResultNotSendable",
    "Retry",
    "SampleSeeding",
    "ShardLost",
    "SharedDict",
    "SharedList",
    "SharedMemory",
    "ShippingError",
    "ShuffleSampler",
    "Skip",
    "Skipped",
    "Spawn",
    "StateError",
    "TaskTimeout",
    "Threads",
    "TokenBudgetBatchSampler",
    "TooManyErrors",
    "Transfer",
    "WeightedSampler",
    "WorkerDied",
    "WorkerTimeout",
    "__version__",
    "backend_names",
    "from_torch",
    "get_backend",
    "get_worker_info",
    "install",
    "rng",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
