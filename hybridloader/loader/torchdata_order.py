"""Order of torchdata's loaders: the samplers of a `StatefulDataLoader`.

They draw the same permutations at the same times as torchdata's samplers, number by number. Their
states have the same keys. This module does not need torchdata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from hybridloader._support.states import is_stateful
from hybridloader.errors import StateError


class RandomOrder(RandomSampler):
    """Random permutations, drawn from the sampler's generator.

    Parameters
    ----------
    data_source
        The dataset; only its length is used.
    generator
        Generator to draw from. None makes one, and draws its seed from torch's default generator now.
    """

    generator: torch.Generator

    def __init__(self, data_source: Sized, generator: torch.Generator | None = None) -> None:
        if generator is None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
            generator = torch.Generator().manual_seed(int(drawn.item()))
        super().__init__(data_source, generator=generator)

    def __iter__(self) -> Iterator[int]:
        return _Permutation(self.generator, len(self.data_source))


class _Permutation(Iterator[int]):
    """One permutation, drawn at once. Its state is a count, and the generator's before the draw."""

    def __init__(self, generator: torch.Generator, length: int) -> None:
        self._generator, self._length = generator, length
        self._draw()

    def _draw(self) -> None:
        self._given = 0
        self._before = self._generator.get_state()
        self._order: list[int] = torch.randperm(
            self._length, generator=self._generator, device="cpu"
        ).tolist()

    def __next__(self) -> int:
        if self._given == self._length:
            raise StopIteration
        self._given += 1
        return self._order[self._given - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self._given, "generator": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        given = state["yielded"]
        if not 0 <= given <= self._length:
            raise StateError(
                f"yielded is {given} in the state, and the sampler has {self._length} indices"
            )
        self._generator.set_state(state["generator"])
        self._draw()
        self._given = given


class BatchOrder(BatchSampler):
    """Batches of a sampler. If the sampler's iterator has a state, so has the iterator over batches."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = iter(self.sampler)  # here, not with the first batch
        if is_stateful(samples):
            return _Batches(samples, self.batch_size, drop_last=self.drop_last)
        return iter(BatchSampler(samples, self.batch_size, self.drop_last))


class _Batches(Iterator[list[int]]):
    def __init__(self, samples: Any, size: int, *, drop_last: bool) -> None:
        self._samples, self._size, self._drop_last = samples, size, drop_last
        self._given = 0

    def __next__(self) -> list[int]:
        batch: list[int] = []
        for sample in self._samples:
            batch.append(sample)
            if len(batch) == self._size:
                break
        self._given += len(batch)
        if not batch or (self._drop_last and len(batch) < self._size):
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"samples_yielded": self._given, "sampler_iter_state": self._samples.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._given = state["samples_yielded"]
        self._samples.load_state_dict(state["sampler_iter_state"])


def makes_fresh_states(iterator: Any) -> bool:
    """Return True if each state of `iterator` is a new dict that does not change later."""
    samples = iterator._samples if type(iterator) is _Batches else iterator
    return type(samples) is _Permutation


def is_plain(batches: Any) -> bool:
    """Return True if a batch sampler draws nothing ahead of its batches, as torch's does."""
    return type(batches) is BatchSampler or type(batches) is BatchOrder
