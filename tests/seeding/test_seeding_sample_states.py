"""States of iterable datasets and their iterators under ``seeding="sample"``: they can be loaded."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hybridloader import DataLoader, StatefulDataLoader


def sample(at: int) -> list[float]:
    """A sample that nobody can make again without its seed."""
    info = get_worker_info()
    worker = 0 if info is None else info.id
    return [worker * 100 + at, random.random(), float(np.random.rand()), float(torch.rand(()))]


class Walk:
    """An iterator with a state, which reads nothing again."""

    read = 0

    def __init__(self, size: int = 7, bad: tuple[int, ...] = ()) -> None:
        self.at, self.size, self.bad = 0, size, bad
        self.offset = random.random()  # drawn as it is made

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> list[float]:
        if self.at >= self.size:
            raise StopIteration
        Walk.read += 1
        self.at += 1
        if self.at - 1 in self.bad:
            raise ValueError(f"sample {self.at - 1}")
        return [*sample(self.at - 1), self.offset]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.offset = state["at"], state["offset"]


class Walks(IterableDataset[Any]):
    bad: tuple[int, ...] = ()

    def __iter__(self) -> Walk:
        return Walk(bad=self.bad)


class Failing(Walks):
    bad = (2, 5)


class Stateful(IterableDataset[Any]):
    """A dataset with its place as state, as in torchdata's examples; its iterator is a generator."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[list[float]]:
        while self.at < 7:
            self.at += 1
            yield sample(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Itself(Walk, IterableDataset[Any]):
    """A dataset that is its own iterator."""

    def __init__(self) -> None:
        Walk.__init__(self)
        self.offset = 0.0

    def __iter__(self) -> Itself:
        self.at = self.at % self.size
        return self


class Rows:
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> list[float]:
        return [index, *sample(index)[1:]]  # any thread may make a sample of a task that takes long


DATASETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "iterator": (Walks, {}),
    "iterator, skipped": (Failing, {"on_error": "skip"}),
    "dataset": (Stateful, {}),
    "dataset, skipped": (Stateful, {"on_error": "skip"}),
    "itself": (Itself, {}),
    "samples": (Walks, {"batch_size": None}),
    "map-style": (Rows, {"shuffle": True}),
}
PLACES = [(0, "inline"), (2, "inline"), (2, "threads"), (2, "fork")]
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (DataLoader, {}),
    (StatefulDataLoader, {}),
    (StatefulDataLoader, {"snapshot_every_n_steps": 3}),
]


def made(kind: Any, case: str, place: tuple[int, str], **more: Any) -> Any:
    dataset, options = DATASETS[case]
    workers, backend = place
    options = {"batch_size": 2, "collate_fn": list, **options, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(
            dataset(), num_workers=workers, backend=backend, seeding="sample",
            generator=torch.Generator().manual_seed(5), **options,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("place", "case", "kind", "more"),
    [
        pytest.param(place, case, *kind, marks=() if (one + two) % 3 == at else pytest.mark.full)
        for one, place in enumerate(PLACES)
        for two, case in enumerate(DATASETS)
        for at, kind in enumerate(KINDS)
    ],
)
def test_what_is_resumed_gives_the_numbers_of_the_uninterrupted_run(
    kind: Any, more: dict[str, Any], case: str, place: tuple[int, str]
) -> None:
    whole = list(made(kind, case, place, **more))
    for count in range(len(whole) + 1) if place[1] != "fork" else (3,):
        loader = made(kind, case, place, **more)
        run = iter(loader)
        taken = [next(run) for _ in range(count)]
        state = copy.deepcopy(loader.state_dict())
        del run
        resumed = made(kind, case, place, **more)
        resumed.load_state_dict(state)
        assert taken + list(resumed) == whole


def test_a_loaded_iterator_reads_nothing_again() -> None:
    loader = made(StatefulDataLoader, "iterator", (0, "inline"), snapshot_every_n_steps=1)
    run = iter(loader)
    for _ in range(3):
        next(run)
    state = loader.state_dict()
    resumed = made(StatefulDataLoader, "iterator", (0, "inline"), snapshot_every_n_steps=1)
    resumed.load_state_dict(state)
    before = Walk.read
    assert len(list(resumed)) == 1
    assert Walk.read == before + 1
