"""Datasets and comparisons for the tests of the compatibility rows."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset, Sampler, get_worker_info

QUICK = ("inline", "threads", "fork")
EVERY = ("inline", "threads", "fork", "spawn", "shared-memory")

_FRESH = pytest.param("spawn", marks=pytest.mark.full)

quick = pytest.mark.parametrize("backend", QUICK)
often = pytest.mark.parametrize("backend", [*(name for name in EVERY if name != "spawn"), _FRESH])
"""Every backend; fresh processes, which take seconds to import torch, in a full run only."""


class Numbers(Dataset[int]):
    def __init__(self, length: int = 8) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Noted(Sampler[int]):
    """Counts how often it is asked to begin, and what it gave where."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.begun = 0
        self.given: list[int] = []
        self.places: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return self._walk()

    def _walk(self) -> Iterator[int]:
        for index in range(self.length):
            self.given.append(index)
            self.places.add((os.getpid(), threading.get_ident()))
            yield index


def is_ours(iterator: Any) -> bool:
    """Return whether hybridloader made this iterator of a loader, whose class may be torch's."""
    return type(iterator).__module__.startswith("hybridloader.")


def keep(samples: Any) -> Any:
    return samples


def do_nothing(worker: int) -> None:
    pass


def flat(loader: Any) -> list[Any]:
    """All samples of one epoch."""
    return [item for batch in loader for item in (batch.tolist() if batch.dim() else [batch])]


def public(loader: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


def seen_by_workers(index: Any) -> Any:
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers, info.worker_method)


class Watched(Numbers):
    """Samples that tell who made them."""

    def __getitem__(self, index: int) -> Any:
        return seen_by_workers(index)


class Randomized(Numbers):
    """A dataset of MONAI, whose transforms get their seed from the init function."""

    state = -1

    def __getitem__(self, index: int) -> int:
        return self.state


def set_state(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.state = worker
