"""States of loaders whose order is told late, or whose sampler fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.state_cases import LENGTH, Ordered
from torch.utils.data import Dataset

from hybridloader import DataLoader, Retry, StateError, StatefulDataLoader
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


NUMBERS: Any = range(LENGTH)


class Untold(Ordered):
    """Sampler with both methods, whose `state_dict` raises."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not on this day")


class Locked(Ordered):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


@pytest.mark.parametrize(
    ("sampler", "why"), [(Untold, "RuntimeError: not on this day"), (Locked, "cannot pickle")]
)
def test_a_sampler_that_cannot_tell_its_state_fails_who_asks_for_it_alone(
    sampler: type[Ordered], why: str
) -> None:
    loader = DataLoader(NUMBERS, 4, sampler=sampler(), num_workers=2, backend="threads")
    iterator = iter(loader)
    batches = [next(iterator)]
    with pytest.raises(StateError, match=rf"the sampler \({sampler.__name__}\) could not.*{why}"):
        loader.state_dict()
    assert len([*batches, *iterator]) == 6


class Shrunk(Ordered):
    def __iter__(self) -> Iterator[int]:
        return iter(self.order[self.at : 13])


def test_a_sampler_that_gives_less_than_it_gave_is_found_out(every: Callable[[int], None]) -> None:
    every(9)
    loader = DataLoader(NUMBERS, 4, sampler=Ordered())
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    other = DataLoader(NUMBERS, 4, sampler=Shrunk())
    state = loader.state_dict()
    state["_hybridloader"]["samplers"][1] = "Shrunk"
    other.load_state_dict(state)
    with pytest.raises(StateError, match="returned 3 of the 4 items between"):
        iter(other)


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


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "backend": "threads"}], ids=str)
@pytest.mark.parametrize("on_error", [None, Retry(2, 0, OSError)])
def test_a_batch_whose_error_was_raised_is_not_made_again_after_a_resume(
    on_error: Any, options: dict[str, Any]
) -> None:
    def make() -> DataLoader:
        return DataLoader(NUMBERS, 2, collate_fn=refuse_three, on_error=on_error, **options)

    loader = make()
    batches = iter(loader)
    assert next(batches) == [0, 1]
    with pytest.raises(ValueError, match="a three"):
        next(batches)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert flat(other) == list(range(4, LENGTH))
