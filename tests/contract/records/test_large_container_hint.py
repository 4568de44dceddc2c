"""The hint at large containers that every worker would copy: how they are found, and what it says."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest

from hybridloader import DataLoader
from hybridloader.records import SharedList

MANY = 1_000_001
BIG = [0] * MANY


class Trap:
    """A dataset whose other code must not be run while its containers are looked at."""

    __slots__ = ("__dict__", "slot", "unset")

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index

    @property
    def prop(self) -> Any:
        raise AssertionError("a property was read")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        assert name in ("__getitems__", "set_epoch", "state_dict"), "getattr was called"
        raise AttributeError(name)

    def __iter__(self) -> Any:
        raise AssertionError("it was iterated")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise AssertionError("repr was called")


@pytest.fixture(autouse=True)
def _not_yet_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridloader.records.large._hinted", False)


def told(dataset: Any) -> list[tuple[str, str]]:
    """Return the warnings, each with the file that it points at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        assert len(list(DataLoader(dataset, None, sampler=[0], num_workers=1, backend="fork"))) == 1
    return [(str(one.message), one.filename) for one in caught]


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        (Trap(samples=BIG), r"dataset.samples is a list of 1,000,001 entries; each worker process"),
        (Trap(slot=BIG), r"dataset.slot is a list"),
        (Trap(a=BIG, b=(*BIG, 1)), r"dataset.b is a tuple of 1,000,002"),
        (Trap(a=dict.fromkeys(range(MANY))), r"dataset.a is a dict.*\.SharedDict\("),
        (BIG, r"dataset is a list.*\.SharedList\("),
        (Trap(a=[BIG]), None),
        (Trap(a=BIG[1:], b=range(MANY), c=np.zeros(MANY), e="x" * MANY), None),
        (Trap(a=SharedList(range(MANY))), None),
    ],
    ids=lambda wanted: wanted if isinstance(wanted, str) else "",
)
def test_the_largest_container_is_told_once_to_the_caller(dataset: Any, wanted: str | None) -> None:
    caught = told(dataset)
    assert len(caught) == (wanted is not None)
    for message, file in caught:
        assert re.search(str(wanted), message)
        assert file == __file__
    assert told(dataset) == []
