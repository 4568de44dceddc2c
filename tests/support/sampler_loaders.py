"""Loaders over one small dataset with every kind of sampler, for the tests of their state."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hybridloader import DataLoader
from hybridloader.sampling import ShuffleSampler, TokenBudgetBatchSampler

LENGTH, BATCH = 23, 4
BATCHES = 6

NUMBERS = TensorDataset(torch.arange(LENGTH))

Made = Callable[[], dict[str, Any]]


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class InIter(Sampler[int]):
    """Draws from torch's default generator as soon as ``iter`` is called."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())


SAMPLERS: dict[str, Made] = {
    "sequential": lambda: {"batch_size": BATCH},
    "shuffle": lambda: {"batch_size": BATCH, "shuffle": True},
    "generator": lambda: {"batch_size": BATCH, "shuffle": True, "generator": seeded()},
    "own generator": lambda: {
        "batch_size": BATCH,
        "sampler": RandomSampler(NUMBERS, generator=seeded()),
    },
    "replacement": lambda: {
        "batch_size": BATCH,
        "sampler": RandomSampler(NUMBERS, replacement=True, generator=seeded()),
    },
    "subset": lambda: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(LENGTH))},
    "weighted": lambda: {
        "batch_size": BATCH,
        "sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH),
    },
    "in iter": lambda: {"batch_size": BATCH, "sampler": InIter()},
    "dropping": lambda: {"batch_size": BATCH, "shuffle": True, "drop_last": True},
    "samples": lambda: {"batch_size": None, "sampler": RandomSampler(NUMBERS, num_samples=6)},
    "ours": lambda: {"batch_size": BATCH, "sampler": ShuffleSampler(LENGTH, seed=1)},
    "ours, dropping": lambda: {
        "batch_size": BATCH,
        "sampler": ShuffleSampler(LENGTH, seed=1),
        "drop_last": True,
    },
    "our batches": lambda: {
        "batch_sampler": TokenBudgetBatchSampler(
            [n % 7 + 1 for n in range(LENGTH)], 2**30, max_size=BATCH, seed=1
        )
    },
    "batches": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(NUMBERS, generator=seeded()), BATCH, False)
    },
    "distributed": lambda: {
        "batch_size": BATCH,
        "sampler": DistributedSampler(NUMBERS, num_replicas=1, rank=0),
    },
}


def listed(batches: Any) -> list[Any]:
    """Batches of numbers as lists; all others as they are."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def flat(batches: Any) -> list[Any]:
    return [numbers[0].tolist() for numbers in batches]


def make(sampler: str, workers: int = 0, backend: str = "inline", **more: Any) -> DataLoader:
    return DataLoader(NUMBERS, num_workers=workers, backend=backend, **SAMPLERS[sampler](), **more)


def left_after(loader: DataLoader, count: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the first batches, and the state after them."""
    iterator = iter(loader)
    taken = [next(iterator)[0].tolist() for _ in range(count)]
    return taken, loader.state_dict()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load a checkpoint, with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def epochs_of(loader: Any, count: int, seed: int = 0) -> list[list[Any]]:
    torch.manual_seed(seed)
    return [flat(loader) for _ in range(count)]


class Every:
    """Cadence that is due at the first step and then every `steps` steps."""

    def __init__(self, steps: int) -> None:
        self._steps, self._count = steps, 0

    def due(self) -> bool:
        self._count += 1
        return (self._count - 1) % self._steps == 0

    def go_on(self, since: int) -> None:
        """Do nothing: steps are counted from the first."""

    def taken(self) -> None:
        pass


def pace(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Have states taken at the first step and then every `steps` steps; by itself their cost decides."""
    for module in ("engine.dataset_state", "loader.samplers", "pipeline.sources"):
        patch.setattr(f"hybridloader.{module}.Cadence", lambda **_: Every(steps))


def time_states(patch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Measure by this clock how many seconds it takes to take a state."""
    patch.setattr("hybridloader._support.states.Cadence.__init__.__defaults__", (clock,))
