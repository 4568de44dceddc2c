"""hybridloader: a data-loading executor for PyTorch.

Public names load when they are first used: ``import hybridloader`` imports neither torch nor loky.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily
from hybridloader._version import __version__ as __version__

if TYPE_CHECKING:
    from hybridloader._support.errors import BackendUnavailable as BackendUnavailable
    from hybridloader._support.errors import CacheError as CacheError
    from hybridloader._support.errors import DamagedMessage as DamagedMessage
    from hybridloader._support.errors import HybridLoaderError as HybridLoaderError
    from hybridloader._support.errors import IteratorClosed as IteratorClosed
    from hybridloader._support.errors import NotReady as NotReady
    from hybridloader._support.errors import ResultPicklingError as ResultPicklingError
    from hybridloader._support.errors import ShardLost as ShardLost
    from hybridloader._support.errors import SourceError as SourceError
    from hybridloader._support.errors import StateError as StateError
    from hybridloader._support.errors import StoreError as StoreError
    from hybridloader._support.errors import TaskTimeout as TaskTimeout
    from hybridloader._support.errors import TooManyErrors as TooManyErrors
    from hybridloader._support.errors import WorkerDied as WorkerDied
    from hybridloader._support.errors import WorkerPicklingError as WorkerPicklingError
    from hybridloader._support.errors import WorkerTimeout as WorkerTimeout
    from hybridloader.backends.inline import Inline as Inline
    from hybridloader.backends.process.backend import Fork as Fork
    from hybridloader.backends.process.backend import SharedMemory as SharedMemory
    from hybridloader.backends.process.backend import Spawn as Spawn
    from hybridloader.backends.ray import Ray as Ray
    from hybridloader.backends.threads import Threads as Threads
    from hybridloader.compat.from_torch import from_torch as from_torch
    from hybridloader.compat.install import install as install
    from hybridloader.compat.install import uninstall as uninstall
    from hybridloader.devices.pinning import Transfer as Transfer
    from hybridloader.engine.contract import Backend as Backend
    from hybridloader.engine.contract import Crew as Crew
    from hybridloader.engine.registry import backend_names as backend_names
    from hybridloader.engine.registry import get_backend as get_backend
    from hybridloader.engine.restart import RestartPolicy as RestartPolicy
    from hybridloader.engine.worker_info import get_worker_info as get_worker_info
    from hybridloader.fetching.on_error.error_budget import Skipped as Skipped
    from hybridloader.fetching.on_error.policies import Replace as Replace
    from hybridloader.fetching.on_error.policies import Retry as Retry
    from hybridloader.fetching.on_error.policies import Skip as Skip
    from hybridloader.loader.dataloader import DataLoader as DataLoader
    from hybridloader.loader.stateful_dataloader import StatefulDataLoader as StatefulDataLoader
    from hybridloader.memory.limits import Memory as Memory
    from hybridloader.observe.comparing import compare as compare
    from hybridloader.observe.headroom import headroom as headroom
    from hybridloader.observe.reporting import Observe as Observe
    from hybridloader.observe.stats import Stats as Stats
    from hybridloader.observe.tracing import trace as trace
    from hybridloader.pipeline.operators.padding import Pad as Pad
    from hybridloader.pipeline.pipeline import Pipeline as Pipeline
    from hybridloader.records.shared_dict import SharedDict as SharedDict
    from hybridloader.records.shared_list import SharedList as SharedList
    from hybridloader.running.epochs import PipelineLoader as PipelineLoader
    from hybridloader.running.operator import Operator as Operator
    from hybridloader.sampling import BlockShuffleSampler as BlockShuffleSampler
    from hybridloader.sampling import BucketBatchSampler as BucketBatchSampler
    from hybridloader.sampling import DistributedShuffleSampler as DistributedShuffleSampler
    from hybridloader.sampling import ShuffleSampler as ShuffleSampler
    from hybridloader.sampling import TokenBudgetBatchSampler as TokenBudgetBatchSampler
    from hybridloader.sampling import WeightedSampler as WeightedSampler
    from hybridloader.seeding.sample_generators import rng as rng
    from hybridloader.seeding.sample_seeds import SampleSeeding as SampleSeeding
    from hybridloader.tuning.tune import tune as tune
    from hybridloader.tuning.tuning import Tuning as Tuning

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "_support.errors": "BackendUnavailable CacheError DamagedMessage HybridLoaderError "
        "IteratorClosed NotReady ResultPicklingError ShardLost SourceError StateError StoreError "
        "TaskTimeout TooManyErrors WorkerDied WorkerPicklingError WorkerTimeout",
        "backends.inline": "Inline",
        "backends.process.backend": "Fork SharedMemory Spawn",
        "backends.ray": "Ray",
        "backends.threads": "Threads",
        "compat.from_torch": "from_torch",
        "compat.install": "install uninstall",
        "devices.pinning": "Transfer",
        "engine.contract": "Backend Crew",
        "engine.registry": "backend_names get_backend",
        "engine.restart": "RestartPolicy",
        "engine.worker_info": "get_worker_info",
        "fetching.on_error.error_budget": "Skipped",
        "fetching.on_error.policies": "Replace Retry Skip",
        "loader.dataloader": "DataLoader",
        "loader.stateful_dataloader": "StatefulDataLoader",
        "memory.limits": "Memory",
        "observe.comparing": "compare",
        "observe.headroom": "headroom",
        "observe.reporting": "Observe",
        "observe.stats": "Stats",
        "observe.tracing": "trace",
        "running.operator": "Operator",
        "pipeline.operators.padding": "Pad",
        "pipeline.pipeline": "Pipeline",
        "running.epochs": "PipelineLoader",
        "records.shared_dict": "SharedDict",
        "records.shared_list": "SharedList",
        "seeding.sample_generators": "rng",
        "seeding.sample_seeds": "SampleSeeding",
        "sampling": "BlockShuffleSampler BucketBatchSampler DistributedShuffleSampler ShuffleSampler "
        "TokenBudgetBatchSampler WeightedSampler",
        "tuning.tune": "tune",
        "tuning.tuning": "Tuning",
    },
)
