"""Samplers for what torch's fall short of: huge, resumable, weighted, and by length.

Public names load when they are first used; `Permutation` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridloader.sampling.bucket import BucketBatchSampler
    from hybridloader.sampling.budget import TokenBudgetBatchSampler
    from hybridloader.sampling.distributed import DistributedShuffleSampler
    from hybridloader.sampling.permutation import Permutation
    from hybridloader.sampling.resumable import ResumableSampler
    from hybridloader.sampling.shuffle import ShuffleSampler
    from hybridloader.sampling.weighted import WeightedSampler

_HOMES = {
    "BucketBatchSampler": "bucket",
    "DistributedShuffleSampler": "distributed",
    "Permutation": "permutation",
    "ResumableSampler": "resumable",
    "ShuffleSampler": "shuffle",
    "TokenBudgetBatchSampler": "budget",
    "WeightedSampler": "weighted",
}

__all__ = [
    "BucketBatchSampler",
    "DistributedShuffleSampler",
    "Permutation",
    "ResumableSampler",
    "ShuffleSampler",
    "TokenBudgetBatchSampler",
    "WeightedSampler",
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
