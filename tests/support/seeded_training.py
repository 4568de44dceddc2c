"""A short, seeded run of a small network: its losses tell whether two loaders gave the same batches.

The loss of each step depends on all batches before it, bit for bit, so two runs that agree saw the same
samples in the same order with the same random draws in the workers. Knows no framework.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

SAMPLES = 20
WORKERS = 2

LIKE_TORCHS_PROCESSES: list[str | None] = [None, "fork", "shared-memory", "inline"]
"""Backends whose workers draw the random numbers that torch's worker processes draw.

``"spawn"`` is one of them; its workers take a second to start, so it has tests of its own.
"""


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with noise from both generators that torch seeds in a worker.

    Sample k is ``(features, target)``: float32 of shape (3,), and float32 of shape ().
    """

    def __init__(self, length: int = SAMPLES, noise: float = 0.1) -> None:
        self.length, self.noise = length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randn(3) + float(np.random.standard_normal()) if self.noise else 0.0
        features = torch.tensor([1.0, index / self.length, (index / self.length) ** 2])
        return features + self.noise * drawn, torch.tensor(index % 5 / 5)


class Regression:
    """A linear model that takes plain gradient steps, made the same each time.

    Leaves torch's default generator alone, from which shuffling draws, and torch's optimizers, the first
    of which takes a second to import what it may need.
    """

    def __init__(self) -> None:
        self.model: torch.nn.Module = torch.nn.utils.skip_init(torch.nn.Linear, 3, 1)
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), (0.3, 0.0), strict=True):
                parameter.fill_(value)

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer for frameworks that want one; `step` does not use it."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, batch: Any) -> float:
        features, target = batch
        loss = torch.nn.functional.mse_loss(self.model(features).squeeze(1), target)
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        return loss.item()


def losses(
    loader: Iterable[Any], epochs: int = 2, step: Callable[[Any], float] | None = None
) -> list[float]:
    """The loss of each step of a plain loop."""
    one_step = step or Regression().step
    return [one_step(batch) for _ in range(epochs) for batch in loader]


def torch_loader(dataset: Any, *args: Any, **options: Any) -> TorchLoader[Any]:
    """torch's own loader of these arguments."""
    return TorchLoader(dataset, *args, **options)
