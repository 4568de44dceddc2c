"""Pipelines as loaders of the seeded regression, for the tests of frameworks."""

from __future__ import annotations

from typing import Any

import torch

from hybridloader import Pipeline, PipelineLoader
from support.seeded_training import Augmented

BATCH = 4
SEED = 3
PLACES: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"backend": "threads", "num_workers": 2},
    "fork": {"backend": "fork", "num_workers": 2},
}


def kept(sample: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Drop every fifth sample, and so all of whose number the length can't know."""
    return bool(sample[1] > 0)


def counted(place: str = "threads") -> PipelineLoader:
    """Five batches of an epoch, and a length."""
    data = Augmented(noise=0)
    pipe = Pipeline.from_dataset(data, shuffle=True, **PLACES[place])
    return PipelineLoader(pipe.batch(BATCH), seed=SEED)


def uncounted(place: str = "threads") -> PipelineLoader:
    """Four batches of an epoch, and no length."""
    pipe = Pipeline.from_dataset(Augmented(noise=0), shuffle=True).filter(kept, **PLACES[place])
    return PipelineLoader(pipe.shuffle(3).batch(BATCH), seed=SEED)


def numbers(batch: Any) -> list[float]:
    """Return the numbers of the samples of a batch."""
    return list((20 * batch[0][:, 1]).round().tolist())


def whole(loader: PipelineLoader, epochs: int) -> list[list[float]]:
    """Return the numbers of all batches of the first epochs, which no framework has asked for."""
    with loader:
        return [numbers(batch) for _ in range(epochs) for batch in loader]
