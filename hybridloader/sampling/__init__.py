"""Samplers for huge datasets, shuffling by block, many weights, batches by length, and resuming.

Names are imported when they are first used; `Permutation` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily

if TYPE_CHECKING:
    from hybridloader.sampling.batching import TokenBudgetBatchSampler as TokenBudgetBatchSampler
    from hybridloader.sampling.permutation import Permutation as Permutation
    from hybridloader.sampling.resumable import ResumableSampler as ResumableSampler
    from hybridloader.sampling.shuffle import BlockShuffleSampler as BlockShuffleSampler
    from hybridloader.sampling.shuffle import DistributedShuffleSampler as DistributedShuffleSampler
    from hybridloader.sampling.shuffle import ShuffleSampler as ShuffleSampler
    from hybridloader.sampling.weighted import WeightedSampler as WeightedSampler

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "batching": "TokenBudgetBatchSampler",
        "permutation": "Permutation",
        "resumable": "ResumableSampler",
        "shuffle": "BlockShuffleSampler DistributedShuffleSampler ShuffleSampler",
        "weighted": "WeightedSampler",
    },
)
