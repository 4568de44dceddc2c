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
    from hybridloader.buffers.memory import Memory
    from hybridloader.contract import Backend, Crew
    from hybridloader.conversion import from_torch
    from hybridloader.dataloader import DataLoader
    from hybridloader.devices.pinning import Transfer
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
    from hybridloader.faults.losses import Skipped
    from hybridloader.faults.on_error import Replace, Retry, Skip
    from hybridloader.faults.restart import RestartPolicy
    from hybridloader.installation import install, uninstall
    from hybridloader.operators.base import Operator
    from hybridloader.pipeline import Pipeline
    from hybridloader.records.shared_dict import SharedDict
    from hybridloader.records.shared_list import SharedList
    from hybridloader.registry import backend_names, get_backend
    from hybridloader.sampling import (
        BucketBatchSampler,
        DistributedShuffleSampler,
        ShuffleSampler,
        TokenBudgetBatchSampler,
        WeightedSampler,
    )
    from hybridloader.seeds.sample_generators import rng
    from hybridloader.seeds.sample_seeds import SampleSeeding
    from hybridloader.stateful_dataloader import StatefulDataLoader
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
    "Memory": "buffers.memory",
    "NotReady": "errors",
    "Operator": "operators.base",
    "Pipeline": "pipeline",
    "Replace": "faults.on_error",
    "RestartPolicy": "faults.restart",
    "ResultNotSendable": "errors",
    "SampleSeeding": "seeds.sample_seeds",
    "Retry": "faults.on_error",
    "ShardLost": "errors",
    "SharedDict": "records.shared_dict",
    "SharedList": "records.shared_list",
    "SharedMemory": "backends.shared_memory",
    "ShippingError": "errors",
    "ShuffleSampler": "sampling",
    "Skip": "faults.on_error",
    "Skipped": "faults.losses",
    "Spawn": "backends.spawn",
    "StateError": "errors",
    "StatefulDataLoader": "stateful_dataloader",
    "TaskTimeout": "errors",
    "Threads": "backends.threads",
    "TokenBudgetBatchSampler": "sampling",
    "TooManyErrors": "errors",
    "Transfer": "devices.pinning",
    "WeightedSampler": "sampling",
    "WorkerDied": "errors",
    "WorkerTimeout": "errors",
    "backend_names": "registry",
    "from_torch": "conversion",
    "get_backend": "registry",
    "get_worker_info": "worker_info",
    "install": "installation",
    "rng": "seeds.sample_generators",
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
    "StatefulDataLoader",
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
