"""State of a loader that skips samples, or whose batches come in any order."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from hybridloader import DataLoader, SampleSeeding, Skip, TooManyErrors, get_worker_info
from hybridloader.sampling import DistributedShuffleSampler, ShuffleSampler

LENGTH = 29

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.* so each worker reads its part of it again"),
]


class Bad(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index % 5 == 2:
            raise ValueError(f"sample {index}")
        return index


def shuffled() -> dict[str, Any]:
    return {"shuffle": True, "generator": torch.Generator().manual_seed(3)}


def ours() -> dict[str, Any]:
    return {"sampler": ShuffleSampler(LENGTH, seed=1)}


def flat(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize(
    ("sampler", "drop_last", "where"),
    [
        (ours, True, (0, "inline")),
        (shuffled, True, (2, "threads")),
        (ours, False, (2, "fork")),
    ],
)
def test_samples_that_wait_are_fetched_first_and_wait_again(
    sampler: Any, drop_last: bool, where: tuple[int, str]
) -> None:
    def make(workers: int, backend: str) -> DataLoader:
        return DataLoader(
            Bad(),
            4,
            num_workers=workers,
            backend=backend,
            on_error="skip",
            drop_last=drop_last,
            **sampler(),
        )

    whole = flat(make(0, "inline"))
    for count in range(len(whole) + 1):
        loader = make(*where)
        iterator = iter(loader)
        taken = flat(next(iterator) for _ in range(count))
        state = loader.state_dict()
        loader = make(3, "threads")
        loader.load_state_dict(state)
        iterator = iter(loader)
        begun = loader.state_dict()
        assert begun["_hybridloader"]["apart"] == state["_hybridloader"]["apart"]
        if count < len(whole):
            taken += flat([next(iterator)])
        state = loader.state_dict()
        loader = make(0, "inline")
        loader.load_state_dict(state)
        assert taken + flat(loader) == whole


def with_a_draw(samples: list[int]) -> list[Any]:
    return [*samples, random.random()]


@pytest.mark.parametrize(
    "made",
    [
        lambda: {"dataset": Bad(), "on_error": "skip"},
        lambda: {"dataset": Halves(), "shard_remainders": "join"},
    ],
    ids=["filled up", "joined"],
)
def test_collation_of_what_waited_draws_what_it_would_have_drawn(made: Any) -> None:
    def make(backend: str) -> DataLoader:
        options = {"num_workers": 2, "backend": backend, "seeding": SampleSeeding(7)}
        return DataLoader(**made(), batch_size=4, collate_fn=with_a_draw, **options)

    whole = list(make("inline"))
    for count in range(len(whole)):
        loader = make("inline")
        iterator = iter(loader)
        taken = [next(iterator) for _ in range(count)]
        other = make("threads")
        other.load_state_dict(loader.state_dict())
        assert taken + list(other) == whole


class Halves(IterableDataset[int]):
    """Seven samples for each of two workers: a batch of 4, and 3 that wait for the other's."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(10 * info.id, 10 * info.id + 7))


def test_a_batch_that_an_error_came_before_is_not_lost() -> None:
    def make() -> DataLoader:
        return DataLoader(Bad(), 4, on_error=Skip(max_failures=2))

    whole = []
    iterator, raised = iter(make()), 0
    while True:
        try:
            whole.append(next(iterator).tolist())
        except StopIteration:
            break
        except TooManyErrors:
            raised += 1
    assert raised == 4
    loader = make()
    iterator, taken = iter(loader), []
    with pytest.raises(TooManyErrors):
        taken.extend(batch.tolist() for batch in iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    other = DataLoader(Bad(), 4, on_error="skip")
    other.load_state_dict(state)
    assert taken + flat(other) == whole


class Held(Dataset[int]):
    """Dataset whose first sample comes when it is allowed."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == 0:
            self.free.wait(30)
        return index


@pytest.mark.parametrize(
    "sampler",
    [
        dict,
        lambda: {
            "sampler": DistributedShuffleSampler(24, 0, num_replicas=1, rank=0, shuffle=False)
        },
    ],
)
def test_out_of_order_nothing_is_lost_and_nothing_comes_twice(sampler: Any) -> None:
    dataset = Held()
    loader = DataLoader(
        dataset, 2, num_workers=2, backend="threads", in_order=False, prefetch_factor=4, **sampler()
    )
    iterator = iter(loader)
    taken = [sample for _ in range(3) for sample in next(iterator).tolist()]
    assert 0 not in taken
    state = loader.state_dict()
    assert [0, 1] in state["_hybridloader"]["whole"]
    dataset.free.set()
    iterator.close()  # type: ignore[attr-defined]
    other = DataLoader(dataset, 2, **sampler())
    other.load_state_dict(state)
    assert sorted([*taken, *(sample for batch in other for sample in batch.tolist())]) == list(
        range(24)
    )
