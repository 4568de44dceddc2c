"""The work that every loader is opened for, and the two ways in which an opened loader is closed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch.utils.data

PREFETCH = 2
"""Batches that a worker makes ahead, where a variant does not tell: torch's default."""

READERS = 32
"""Threads that wait for answers of a server: at 20 ms each they read 1,600 samples a second."""


@dataclass(frozen=True)
class Work:
    """Batches that a loader is to deliver.

    Attributes
    ----------
    shuffled
        True for a random order, which is the same for all loaders: `sampler` makes it.
    start_method
        Start method of worker processes, where a loader lets one choose.
    keep
        True if workers are kept from one epoch to the next.
    batch_bytes
        Upper bound of a batch's size in bytes, for loaders that need one beforehand.
    stages
        0: loaders are compared. 1: ours is a `Pipeline` of one stage. 3: the best form of three
        stages of each project.
    uncollated
        True for batches that are lists of the samples.
    cores
        Workers that can work at the same time, for loaders whose stages have numbers of their own.
    prefetch
        Batches that a worker makes ahead, for the loaders whose variants differ in it.
    """

    dataset: Any
    batch: int
    workers: int
    shuffled: bool = False
    keep: bool = False
    start_method: str = "fork"
    batch_bytes: int = 1 << 20
    stages: int = 0
    uncollated: bool = False
    cores: int = 2
    prefetch: int = PREFETCH

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Function that makes a batch of samples; can be pickled."""
        return list if self.uncollated else torch.utils.data.default_collate

    def sampler(self) -> torch.utils.data.Sampler[int]:
        """A new sampler; a shuffled one begins with the same seed."""
        if not self.shuffled:
            return torch.utils.data.SequentialSampler(self.dataset)
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.RandomSampler(self.dataset, generator=generator)

    def batch_sampler(self) -> torch.utils.data.BatchSampler:
        """Lists of indices, made lazily; may be iterated again."""
        return torch.utils.data.BatchSampler(self.sampler(), self.batch, drop_last=False)


class Fetch:
    """Function from a list of indices to a batch; can be pickled."""

    def __init__(self, work: Work) -> None:
        self.dataset, self._collate = work.dataset, work.collate

    def __call__(self, indices: list[int]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(indices) if many else [self.dataset[index] for index in indices]
        return self._collate(samples)


class Running(Protocol):
    """An opened loader."""

    def epoch(self) -> Iterator[Any]:
        """Begin an epoch, which may end the one before."""

    def close(self) -> None:
        """End all workers."""


Opener = Callable[[Work], Running]


class Closing:
    """An opened loader whose epochs have a `close()`; each ends before the next one begins.

    Parameters
    ----------
    begin
        Makes the iterator of an epoch.
    """

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._epoch: Any = None

    def epoch(self) -> Iterator[Any]:
        Closing.close(self)
        self._epoch = self._begin()
        epoch: Iterator[Any] = self._epoch
        return epoch

    def close(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None


class Dropping:
    """An opened loader without a `close()`: its workers end when nothing refers to it."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader: Iterable[Any] | None = loader

    def epoch(self) -> Iterator[Any]:
        assert self._loader is not None
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None
        gc.collect()
