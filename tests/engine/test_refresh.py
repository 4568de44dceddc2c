"""Changes of a dataset between epochs, as the workers' copies take them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from hybridloader import DataLoader, Threads


class Part(Dataset[int]):
    def __init__(self, number: int) -> None:
        self.number = number


class Whole(Dataset[Any]):
    """Dataset whose one sample is what it finds in itself."""

    def __init__(self) -> None:
        self.parts, self.epoch = [Part(0)], 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self.epoch, self.parts[0].number, len(self.parts), hasattr(self, "other")


def test_what_lies_within_an_object_that_was_attached_later_is_left_out() -> None:
    """The copy was made without it: as with torch, it does not see it. All else arrives."""
    dataset: Any = Whole()
    where: Any = {"num_workers": 1, "backend": Threads(copy_dataset=True)}
    loader = DataLoader(dataset, None, persistent_workers=True, **where)
    assert list(loader) == [[0, 0, 1, False]]
    dataset.other = Part(7)
    dataset.parts.append(Part(8))
    dataset.parts[0].number, dataset.epoch = 5, 3
    assert list(loader) == [[3, 5, 1, False]]
