"""Behavior beside the rows: `set_epoch` and persistent workers, batches of threads, objects sent."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.compat import Numbers, flat, keep, often
from support.platforms import needs_fork
from torch.utils.data import ConcatDataset, StackDataset, Subset

from hybridloader import DataLoader, Threads


class Plain(Numbers):
    """Dataset whose epoch is an attribute."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


class Reordered(Numbers):
    """Dataset whose order is a new array each epoch; the array before must not be seen."""

    def __init__(self, length: int = 8) -> None:
        super().__init__(length)
        self.set_epoch(-1)

    def set_epoch(self, epoch: int) -> None:
        self.order = np.full(self.length, epoch)
        self.parts = {"names": [epoch]}

    def __getitem__(self, index: int) -> int:
        assert self.parts["names"] == [self.order[index]]
        return int(self.order[index])


class Wrapper:
    """Wrapper of a dataset that is no `Dataset` itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def stacked() -> tuple[Any, list[Any]]:
    """Dataset that holds others in all the ways above; only one of these is spawned."""
    leaves: list[Any] = [Plain(4), Reordered(4), Plain(4), Plain(2), Reordered(2)]
    plain, reordered, in_subset, *in_concat = leaves
    subset = Subset(Subset(in_subset, [3, 2, 1, 0]), [0, 1, 2, 3])
    whole = StackDataset(plain, reordered, subset, ConcatDataset(in_concat))
    return Wrapper(whole), leaves


@often
def test_set_epoch_in_the_parent_is_seen_by_all_persistent_workers(backend: str) -> None:
    dataset, leaves = stacked()
    loader = DataLoader(
        dataset, num_workers=2, backend=backend, collate_fn=keep, persistent_workers=True
    )
    for epoch in range(3):
        for leaf in leaves:
            leaf.set_epoch(epoch)
        assert [batch[0] for batch in loader] == [(epoch,) * 4] * 4


class Locked(Plain):
    """Dataset that makes a lock for each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.lock, self.epoch = threading.Lock(), epoch


class Shaped(Wrapper):
    shape: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> Any:
        return self.shape, self.inner[index]


@needs_fork
def test_what_can_not_be_sent_of_a_new_epoch_stays_as_it_was_with_a_warning() -> None:
    dataset = Shaped(Locked(1))
    loader = DataLoader(
        dataset, num_workers=1, backend="fork", collate_fn=keep, persistent_workers=True
    )
    assert list(loader) == [[((), -1)]]
    dataset.inner.set_epoch(4)
    dataset.shape = 3, 3
    words = (
        r"attribute 'inner.lock' of the dataset was rebound, but .* \(.*lock.*\), so the persistent"
    )
    with pytest.warns(UserWarning, match=words):
        assert list(loader) == [[((3, 3), 4)]]


def test_what_lies_within_an_object_that_was_attached_later_is_left_out() -> None:
    """The copy was made without it: as with torch, it does not see it."""
    dataset: Any = Plain(1)
    copies = Threads(copy_dataset=True)
    loader = DataLoader(dataset, None, num_workers=1, backend=copies, persistent_workers=True)
    assert list(loader) == [-1]
    dataset.other = Plain(1)
    dataset.set_epoch(3)
    dataset.other.set_epoch(4)
    assert list(loader) == [3]


@pytest.mark.parametrize("backend", ["inline", "threads", "fork", Threads(copy_dataset=True)])
def test_set_epoch_is_seen_when_an_epoch_is_begun_twice(backend: Any) -> None:
    """Two loops over the loader, of which the first is left before its first batch."""
    dataset = Plain(4)
    loader = DataLoader(dataset, num_workers=2, backend=backend, persistent_workers=True)
    assert flat(loader) == [-1] * 4
    dataset.set_epoch(5)
    iter(loader)
    assert flat(iter(loader)) == [5] * 4
