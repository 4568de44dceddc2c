"""hybridloader: a data-loading executor for PyTorch.

Public names load when they are first used: ``import hybridloader`` imports neither torch nor loky.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._version import __version__ as __version__
from hybridloader.lazily import lazily

if TYPE_CHECKING:
    from hybridloader.backends.fork import Fork as Fork
    from hybridloader.backends.inline import Inline as Inline
    from hybridloader.backends.shared_memory import SharedMemory as SharedMemory
    from hybridloader.backends.spawn import Spawn as Spawn
    from hybridloader.backends.threads import Threads as Threads
    from hybridloader.buffers.memory import Memory as Memory
    from hybridloader.contract import Backend as Backend
    from hybridloader.contract import Crew as Crew
    from hybridloader.conversion import from_torch as from_torch
    from hybridloader.dataloader import DataLoader as DataLoader
    from hybridloader.devices.pinning import Transfer as Transfer
    from hybridloader.errors import BackendUnavailable as BackendUnavailable
    from hybridloader.errors import CacheError as CacheError
    from hybridloader.errors import DamagedMessage as DamagedMessage
    from hybridloader.errors import HybridLoaderError as HybridLoaderError
    from hybridloader.errors import IteratorClosed as IteratorClosed
    from hybridloader.errors import NotReady as NotReady
    from hybridloader.errors import ResultNotSendable as ResultNotSendable
    from hybridloader.errors import ShardLost as ShardLost
    from hybridloader.errors import ShippingError as ShippingError
    from hybridloader.errors import StateError as StateError
    from hybridloader.errors import TaskTimeout as TaskTimeout
    from hybridloader.errors import TooManyErrors as TooManyErrors
    from hybridloader.errors import WorkerDied as WorkerDied
    from hybridloader.errors import WorkerTimeout as WorkerTimeout
    from hybridloader.faults.losses import Skipped as Skipped
    from hybridloader.faults.on_error import Replace as Replace
    from hybridloader.faults.on_error import Retry as Retry
    from hybridloader.faults.on_error import Skip as Skip
    from hybridloader.faults.restart import RestartPolicy as RestartPolicy
    from hybridloader.installation import install as install
    from hybridloader.installation import uninstall as uninstall
    from hybridloader.operators.base import Operator as Operator
    from hybridloader.pipeline import Pipeline as Pipeline
    from hybridloader.records.shared_dict import SharedDict as SharedDict
    from hybridloader.records.shared_list import SharedList as SharedList
    from hybridloader.registry import backend_names as backend_names
    from hybridloader.registry import get_backend as get_backend
    from hybridloader.sampling import BucketBatchSampler as BucketBatchSampler
    from hybridloader.sampling import DistributedShuffleSampler as DistributedShuffleSampler
    from hybridloader.sampling import ShuffleSampler as ShuffleSampler
    from hybridloader.sampling import TokenBudgetBatchSampler as TokenBudgetBatchSampler
    from hybridloader.sampling import WeightedSampler as WeightedSampler
    from hybridloader.seeds.sample_generators import rng as rng
    from hybridloader.seeds.sample_seeds import SampleSeeding as SampleSeeding
    from hybridloader.stateful_dataloader import StatefulDataLoader as StatefulDataLoader
    from hybridloader.worker_info import get_worker_info as get_worker_info

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "backends.fork": "Fork",
        "backends.inline": "Inline",
        "backends.shared_memory": "SharedMemory",
        "backends.spawn": "Spawn",
        "backends.threads": "Threads",
        "buffers.memory": "Memory",
        "contract": "Backend Crew",
        "conversion": "from_torch",
        "dataloader": "DataLoader",
        "devices.pinning": "Transfer",
        "errors": "BackendUnavailable CacheError DamagedMessage HybridLoaderError IteratorClosed "
        "NotReady ResultNotSendable ShardLost ShippingError StateError TaskTimeout "
        "TooManyErrors WorkerDied WorkerTimeout",
        "faults.losses": "Skipped",
        "faults.on_error": "Replace Retry Skip",
        "faults.restart": "RestartPolicy",
        "installation": "install uninstall",
        "operators.base": "Operator",
        "pipeline": "Pipeline",
        "records.shared_dict": "SharedDict",
        "records.shared_list": "SharedList",
        "registry": "backend_names get_backend",
        "sampling": "BucketBatchSampler DistributedShuffleSampler ShuffleSampler "
        "TokenBudgetBatchSampler WeightedSampler",
        "seeds.sample_generators": "rng",
        "seeds.sample_seeds": "SampleSeeding",
        "stateful_dataloader": "StatefulDataLoader",
        "worker_info": "get_worker_info",
    },
)
