"""The hint at large containers that every worker would copy: how they are found, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridloader.records import SharedList, large
from hybridloader.records.large import hint_at_large_container, largest_container


class Trap:
    """Whose code must not be run."""

    __slots__ = ("__dict__", "slot", "unset")

    def __init__(self) -> None:
        self.slot: Any = None

    @property
    def prop(self) -> Any:
        raise AssertionError("a property was read")

    def __len__(self) -> int:
        raise AssertionError("len was called")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("getattr was called")

    def __iter__(self) -> Any:
        raise AssertionError("it was iterated")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise AssertionError("repr was called")


class Odd(list[Any]):
    """A user's own kind of list."""

    def __len__(self) -> int:
        raise AssertionError("len was called")


def holding(**attributes: Any) -> Any:
    trap = Trap()
    for name, value in attributes.items():
        setattr(trap, name, value)
    return trap


BIG, BIGGER = [0] * 20, [0] * 30


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: holding(samples=BIG), ("dataset.samples", "list", 20)),
        (lambda: holding(slot=BIG), ("dataset.slot", "list", 20)),
        (lambda: holding(a=BIG, b=tuple(BIGGER)), ("dataset.b", "tuple", 30)),
        (lambda: holding(a=BIGGER, b=BIG), ("dataset.a", "list", 30)),
        (lambda: holding(a=dict(enumerate(BIG))), ("dataset.a", "dict", 20)),
        (lambda: holding(a=holding(a=BIG)), None),
        (lambda: holding(a=[0] * 10, b=range(100), c=np.zeros(100), d=Odd(BIG), e="x" * 100), None),
        (lambda: holding(a=SharedList(BIG)), None),
        (lambda: BIG, ("dataset", "list", 20)),
        (lambda: Trap, None),
        (lambda: 7, None),
    ],
)
def test_the_largest_container_is_found_without_running_code(
    make: Callable[[], Any], wanted: tuple[str, str, int] | None
) -> None:
    dataset = make()
    assert largest_container(dataset, limit=19) == wanted
    assert largest_container(dataset, limit=30) is None


def test_the_hint_comes_once_and_points_at_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_hinted", False)
    hint_at_large_container(holding(a=BIG))  # small: nothing is said, and the hint is still to come
    dataset = SimpleNamespace(samples=[None] * 1_200_000)
    with pytest.warns(UserWarning, match="a list of") as caught:
        hint_at_large_container(dataset)
    assert str(caught[0].message) == (
        "dataset.samples is a list of 1,200,000 entries; each worker process will copy it piece by "
        "piece (counting references writes to it). "
        "hybridloader.records.SharedList(...) keeps one copy for all."
        "\nSee: hybridloader explain large-container"
    )
    assert caught[0].filename == __file__
    hint_at_large_container(dataset)  # warnings are errors


def test_the_hint_for_a_dict_names_the_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_hinted", False)
    dataset = SimpleNamespace(labels=dict.fromkeys(range(1_000_001)))
    with pytest.warns(UserWarning, match=r"dataset.labels is a dict of 1,000,001.*\.SharedDict\("):
        hint_at_large_container(dataset)
