"""Changes of a dataset between epochs, as the workers' copies take them."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import Dataset

from hybridloader.engine.dataset_state import DatasetChanges, apply


class Part(Dataset[int]):
    def __init__(self, number: int) -> None:
        self.number = number


class Whole(Dataset[int]):
    def __init__(self) -> None:
        self.parts = [Part(0)]
        self.epoch = 0


def test_what_lies_within_an_object_that_was_attached_later_is_left_out() -> None:
    """The copy was made without it: as with torch, it does not see it. All else arrives."""
    dataset = Whole()
    theirs = copy.deepcopy(dataset)
    watch = DatasetChanges(dataset)
    attached: Any = dataset
    attached.other = Part(7)
    dataset.parts.append(Part(8))
    dataset.parts[0].number = 5
    dataset.epoch = 3
    apply(theirs, watch.changes())
    assert (theirs.epoch, theirs.parts[0].number, len(theirs.parts)) == (3, 5, 1)
    assert not hasattr(theirs, "other")
