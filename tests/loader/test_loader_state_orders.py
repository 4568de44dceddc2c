"""States of loaders whose order is told late, or comes from more than one place."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.state_cases import Bad
from torch.utils.data import BatchSampler, Dataset, Sampler

from hybridloader import DataLoader, Skip, StatefulDataLoader, TooManyErrors
from hybridloader.sampling import DistributedShuffleSampler, ShuffleSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*has no state_dict"),
]


def flat(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch]


def left_after(loader: Any, count: int) -> tuple[list[int], dict[str, Any]]:
    """Take `count` batches of a pass, and the state after them; then leave it."""
    batches = iter(loader)
    taken = flat(next(batches) for _ in range(count))
    return taken, loader.state_dict()


# -- samplers ----------------------------------------------------------------------------------------


class Walk:
    """Iterator with a state."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.at = epoch, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> list[int]:
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return [100 * self.epoch + self.at]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Epochs:
    """Sampler of batches that has the epoch as its state, and the place in that of its iterator."""

    epoch = -1

    def __iter__(self) -> Any:
        self.epoch += 1
        return Walk(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Named:
    """Dataset of which every index is a sample."""

    def __getitem__(self, index: int) -> int:
        return index


def test_a_state_within_the_epoch_after_a_resumed_end_has_the_place_of_the_iterator() -> None:
    def make() -> Any:
        return DataLoader(Named(), batch_sampler=Epochs())  # type: ignore[arg-type]

    loader = make()
    flat(loader)
    second = make()
    second.load_state_dict(loader.state_dict())
    taken, state = left_after(second, 2)
    third = make()
    third.load_state_dict(state)
    rest = flat(third)
    assert len(taken) == 2
    assert taken + rest == [rest[-1] - 5 + k for k in range(6)], "one whole epoch, each batch once"


class Pairs(Sampler[list[int]]):
    """Sampler of batches without a state, over one of ours."""

    def __init__(self, sampler: ShuffleSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.sampler, 2, drop_last=False))


@pytest.mark.parametrize("count", [0, 2])
def test_the_same_loader_is_taken_back_within_an_epoch(count: int) -> None:
    loader = DataLoader(range(12), batch_sampler=Pairs(ShuffleSampler(12, seed=0)))  # type: ignore[arg-type]
    whole = [ShuffleSampler(12, seed=0).order()[k] for k in range(12)]
    batches = iter(loader)
    taken = flat(next(batches) for _ in range(count))
    state = loader.state_dict()
    flat(next(batches) for _ in range(3))  # these are to be given again
    loader.load_state_dict(state)
    assert taken + flat(loader) == whole


def test_an_epoch_is_told_to_the_pass_that_only_its_state_was_asked_of() -> None:
    order: Any = ShuffleSampler(12, seed=0)
    data: Any = range(12)
    loader = StatefulDataLoader(data, 3, sampler=order, num_workers=2, backend="threads")
    loader.state_dict()
    loader.set_epoch(3)
    assert flat(loader) == [ShuffleSampler(12, seed=0, epoch=3).order()[k] for k in range(12)]


# -- passes that do not go as they should ------------------------------------------------------------


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
    assert raised == 3
    loader = make()
    iterator, taken = iter(loader), []
    with pytest.raises(TooManyErrors):
        taken.extend(batch.tolist() for batch in iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    other = DataLoader(Bad(), 4, on_error="skip")
    other.load_state_dict(state)
    assert taken + [batch.tolist() for batch in other] == whole


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
