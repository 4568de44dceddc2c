"""Datasets and functions that draw from everything there is, for the tests of ``seeding="sample"``."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from random import choice, gauss
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import hybridloader

LENGTH = 23


def drawn() -> list[Any]:
    """Numbers from all generators, by functions of each kind."""
    own = hybridloader.rng()
    return [
        random.random(),
        gauss(0, 1),  # keeps the second of a pair
        choice(range(1000)),
        random.getrandbits(40),
        float(np.random.rand()),
        float(np.random.randn()),  # so does this
        int(np.random.randint(1000)),
        torch.rand(2).tolist(),
        torch.empty(2).normal_().tolist(),
        torch.randperm(5).tolist(),
        torch.rand_like(torch.zeros(2)).tolist(),
        torch.nn.init.uniform_(torch.empty(1)).tolist(),
        own.python.random(),
        float(own.numpy.random()),
        torch.rand(1, generator=own.torch).tolist(),
    ]


class Drawing(Dataset[Any]):
    """Each sample is what it drew."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, drawn()


class DrawingWhole(Drawing):
    """Asked for whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, drawn()) for index in indices]


class DrawingStream(IterableDataset[Any]):
    """Each worker reads every n-th sample; `iter()` draws, too."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        opened = random.random()
        for index in range(worker, LENGTH, workers):
            yield index, opened, drawn()


class Dying(Drawing):
    """Kills its process once, at sample 7."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __getitem__(self, index: int) -> Any:
        random.random()
        if index == 7 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Failing(Drawing):
    """Raises, after it has drawn, for every fifth sample."""

    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        if index % 5 == 2:
            raise ValueError(f"sample {index}")
        return found


def collate(samples: list[Any]) -> Any:
    """Collate the samples; draws from all generators, too."""
    return samples, random.random(), float(np.random.rand()), torch.rand(1).tolist()


def replacement(index: Any, error: Exception) -> Any:
    return index, drawn()


def digest(found: Any) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()


def states() -> bytes:
    """Return the states of all global generators of this process."""
    own = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
    return pickle.dumps(own)


# -- for pipelines -----------------------------------------------------------------------------------


def add(item: Any) -> Any:
    return item, drawn()


def add_again(item: Any) -> Any:
    return item, random.random(), float(np.random.rand()), torch.rand(1).tolist()


def often(item: Any) -> bool:
    return random.random() < 0.7


def several(item: Any) -> Iterator[Any]:
    for number in range(1 + random.randrange(3)):
        yield number, item, random.random(), torch.rand(1).tolist()


def fails_at_times(item: Any) -> Any:
    if random.random() < 0.3:
        raise ValueError("by chance")
    return item, random.random()
