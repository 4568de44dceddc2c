"""hybridloader: a data-loading executor for PyTorch.

This module holds the names that most programs import. Others are in its public modules: `errors`,
`sampling`, `sources`, `records`, `pipeline`, `observe`, `tuning`, `engine` and `testing`. Names and
modules load when they are first used: ``import hybridloader`` imports neither torch nor loky.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily
from hybridloader._version import __version__ as __version__

if TYPE_CHECKING:
    from hybridloader import engine as engine
    from hybridloader import errors as errors
    from hybridloader import observe as observe
    from hybridloader import pipeline as pipeline
    from hybridloader import records as records
    from hybridloader import sampling as sampling
    from hybridloader import sources as sources
    from hybridloader import testing as testing
    from hybridloader import tuning as tuning
    from hybridloader.backends.process.backend import Fork as Fork
    from hybridloader.backends.process.backend import SharedMemory as SharedMemory
    from hybridloader.backends.process.backend import Spawn as Spawn
    from hybridloader.backends.ray import Ray as Ray
    from hybridloader.backends.threads import Inline as Inline
    from hybridloader.backends.threads import Threads as Threads
    from hybridloader.compat.torch_loaders import from_torch as from_torch
    from hybridloader.compat.torch_loaders import install as install
    from hybridloader.compat.torch_loaders import uninstall as uninstall
    from hybridloader.devices.pinning import Transfer as Transfer
    from hybridloader.engine.stage import RestartPolicy as RestartPolicy
    from hybridloader.engine.worker import get_worker_info as get_worker_info
    from hybridloader.errors import HybridLoaderError as HybridLoaderError
    from hybridloader.errors import StateError as StateError
    from hybridloader.errors import TooManyErrors as TooManyErrors
    from hybridloader.errors import WorkerDied as WorkerDied
    from hybridloader.errors import WorkerTimeout as WorkerTimeout
    from hybridloader.fetching.on_error import Replace as Replace
    from hybridloader.fetching.on_error import Retry as Retry
    from hybridloader.fetching.on_error import Skip as Skip
    from hybridloader.loader.dataloader import DataLoader as DataLoader
    from hybridloader.loader.stateful_dataloader import StatefulDataLoader as StatefulDataLoader
    from hybridloader.memory.limits import Memory as Memory
    from hybridloader.pipeline.pipeline import Pipeline as Pipeline
    from hybridloader.running.run import PipelineLoader as PipelineLoader
    from hybridloader.seeding.sample_rng import SampleSeeding as SampleSeeding
    from hybridloader.seeding.sample_rng import rng as rng
    from hybridloader.tuning.tune import tune as tune

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "errors": "HybridLoaderError StateError TooManyErrors WorkerDied WorkerTimeout",
        "backends.process.backend": "Fork SharedMemory Spawn",
        "backends.ray": "Ray",
        "backends.threads": "Inline Threads",
        "compat.torch_loaders": "from_torch install uninstall",
        "devices.pinning": "Transfer",
        "engine.stage": "RestartPolicy",
        "engine.worker": "get_worker_info",
        "fetching.on_error": "Replace Retry Skip",
        "loader.dataloader": "DataLoader",
        "loader.stateful_dataloader": "StatefulDataLoader",
        "memory.limits": "Memory",
        "pipeline.pipeline": "Pipeline",
        "running.run": "PipelineLoader",
        "seeding.sample_rng": "SampleSeeding rng",
        "tuning.tune": "tune",
    },
    modules="engine errors observe pipeline records sampling sources testing tuning",
)
