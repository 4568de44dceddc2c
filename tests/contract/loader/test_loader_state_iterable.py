"""The state of a loader whose dataset is iterable, and of datasets with a state of their own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.once import forget_warnings
from support.state_cases import Plain, Walk, Walks, place
from torch.utils.data import IterableDataset

from hybridloader import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.* so each worker reads its part of it again"),
]


def flat(batches: Any) -> list[Any]:
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in batches]


def test_a_worker_that_dies_goes_on_behind_its_start() -> None:
    options: dict[str, Any] = {"num_workers": 2, "backend": "threads", "on_worker_death": "restart"}
    loader = DataLoader(Long(), 2, num_workers=2, backend="threads")
    whole = flat(loader)
    iterator = iter(loader)
    taken = flat([next(iterator), next(iterator)])
    state = loader.state_dict()
    iterator.close()
    LongDying.left = [5]
    other = DataLoader(LongDying(), 2, **options)
    other.load_state_dict(state)
    assert taken + flat(other) == whole
    assert not LongDying.left


class Long(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        worker, _ = place()
        return iter([worker * 100 + n for n in range(8)])


class LongDying(Long):
    left: list[int] = []  # noqa: RUF012  # shared by the copies of two threads

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number == 105 and self.left:
                self.left.pop()
                raise SystemExit
            yield number


# -- what is read again ----------------------------------------------------------------------------


def test_reading_again_is_told_once_and_how_far_it_is() -> None:
    def left() -> DataLoader:
        loader = DataLoader(Plain(), 2, num_workers=3, backend="threads")
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        state = loader.state_dict()
        other = DataLoader(Plain(), 2, num_workers=3, backend="threads")
        other.load_state_dict(state)
        return other

    forget_warnings()
    loader = left()
    assert loader.resuming is None
    with pytest.warns(
        UserWarning, match=r"Plain has no state_dict\(\).*reads its part of it again"
    ):
        iterator = iter(loader)
    assert loader.resuming == (0, 8)
    next(iterator)
    assert loader.resuming == (2, 8)
    for _ in iterator:
        pass
    assert loader.resuming is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(left())


@pytest.mark.parametrize("options", [{}, {"seeding": "sample"}])
def test_a_state_is_gone_on_from_without_reading_again(
    options: Any, every: Callable[[int], None]
) -> None:
    every(1)  # on a busy machine, too

    class Told(Walk):
        asked = 0

        def __next__(self) -> int:
            Told.asked += 1
            return super().__next__()

    class Tellers(IterableDataset[int]):
        def __iter__(self) -> Walk:
            return Told()

    loader = DataLoader(Tellers(), 2, **options)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    other = DataLoader(Tellers(), 2, **options)
    other.load_state_dict(loader.state_dict())
    Told.asked = 0
    assert flat(other) == [[8]]
    assert Told.asked == 2


# -- what can't be ---------------------------------------------------------------------------------


class Locked(Walks):
    def state_dict(self) -> dict[str, Any]:
        return {"at": 3, "lock": threading.Lock()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("where", [(0, "inline"), (1, "fork")], ids=str)
def test_a_state_that_cannot_be_pickled_fails_who_asks_for_it_alone(where: tuple[int, str]) -> None:
    workers, backend = where
    loader = DataLoader(Locked(), 4, num_workers=workers, backend=backend)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"Locked\).*can't be pickled, because of 'lock'"):
        loader.state_dict()
    assert flat(iterator)
