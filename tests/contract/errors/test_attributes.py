"""Objects whose ``__getattr__`` raises something else than `AttributeError`, wherever users put them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from hybridloader import DataLoader, Pipeline


class Config(dict[str, Any]):
    """Many projects have one like this."""

    __getattr__ = dict.__getitem__

    if sys.version_info < (3, 11):  # there pickle asks __getattr__ for it, as no object has it

        def __getstate__(self) -> None:
            pass


class Raising:
    """As hostile as can be."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # else it could not even be pickled
            raise AttributeError(name)
        raise ValueError(f"what is {name}?")


class Items(Raising, Dataset[Any]):
    def __init__(self) -> None:
        self.config = Config(scale=2.0)
        self.parts = [Config(), Raising()]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return Config(x=torch.tensor(index * self.config.scale))


class Stream(Raising, IterableDataset[Any]):
    def __init__(self) -> None:
        self.config = Config(scale=2.0)

    def __iter__(self) -> Iterator[Any]:
        return iter([Config(x=torch.tensor(1.0))])


class Order(Raising, Sampler[int]):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Collate(Raising):
    def __call__(self, samples: list[Any]) -> Any:
        return Config(x=torch.stack([sample.x for sample in samples]))


@pytest.mark.parametrize(
    "backend", ["inline", "threads", "fork", pytest.param("spawn", marks=pytest.mark.full)]
)
def test_every_part_of_a_loader_may_be_one(backend: str) -> None:
    loader = DataLoader(
        Items(),
        2,
        sampler=Order(),
        collate_fn=Collate(),
        num_workers=1,
        backend=backend,
        persistent_workers=backend != "inline",
    )
    for _ in range(2):
        assert [batch.x.tolist() for batch in loader] == [[0, 2], [4, 6]]
    next(iter(loader))
    assert isinstance(loader.state_dict(), dict)
    if backend != "spawn":
        stream = DataLoader(Stream(), None, num_workers=1, backend=backend)
        assert [item.x.item() for item in stream] == [1]


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_every_part_of_a_pipeline_may_be_one(backend: str) -> None:
    pipeline = (
        Pipeline.from_dataset(Items(), sampler=Order())
        .batch(2, collate_fn=Collate())
        .map(Times(), backend=backend, num_workers=1)
    )
    assert [batch.x.tolist() for batch in pipeline] == [[0, 20], [40, 60]]


class Times(Raising):
    def __call__(self, batch: Any) -> Any:
        return Config(x=batch.x * 10)
