"""States of loaders whose order is told late, or comes from more than one place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from hybridloader import DataLoader, StatefulDataLoader
from hybridloader.sampling import DistributedShuffleSampler, ShuffleSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*has no state_dict"),
]


def flat(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch]


# -- samplers ----------------------------------------------------------------------------------------


def test_an_epoch_is_told_to_the_pass_that_only_its_state_was_asked_of() -> None:
    order: Any = ShuffleSampler(12, seed=0)
    data: Any = range(12)
    loader = StatefulDataLoader(data, 3, sampler=order, num_workers=2, backend="threads")
    loader.state_dict()
    loader.set_epoch(3)
    assert flat(loader) == [ShuffleSampler(12, seed=0, epoch=3).order()[k] for k in range(12)]


# -- passes that do not go as they should ------------------------------------------------------------


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


class Flaky(torch.utils.data.IterableDataset[int]):
    """Samples of which one can't be collated."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def refuse_three(samples: list[int]) -> list[int]:
    if 3 in samples:
        raise ValueError("a three")
    return samples


def test_a_batch_that_had_failed_before_the_state_is_passed_over() -> None:
    loader = DataLoader(Flaky(), 2, collate_fn=refuse_three)
    assert next(iter(loader)) == [0, 1]
    state = loader.state_dict()
    state["_num_yielded"] = 3  # somebody says that two more were given: the first of them raised
    other = DataLoader(Flaky(), 2, collate_fn=refuse_three)
    other.load_state_dict(state)
    assert flat(other) == [6, 7, 8, 9, 10, 11]
