"""Datasets in memory are gathered by batch; torch's loader, sample by sample, is the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison import same
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

import hybridloader

TENSORS = {
    "floats": torch.randn(23, 4),
    "labels": torch.arange(23),
    "bools": torch.arange(23) % 3 == 0,
    "halves": torch.randn(23, 2, 3).bfloat16(),
    "complex": torch.randn(23, dtype=torch.complex64),
    "strided": torch.randn(4, 23).T,
    "scalars in rows": torch.randn(23, 1),
    "large": torch.arange(23 * 60_000, dtype=torch.float32).reshape(23, 60_000),
}


def datasets() -> dict[str, Any]:
    pair = TensorDataset(TENSORS["floats"], TENSORS["labels"])
    subset = Subset(pair, [5, 3, 22, 0, 7, 7, 1])
    return {
        **{name: TensorDataset(tensor) for name, tensor in TENSORS.items()},
        "pair": pair,
        "subset": subset,
        "subset of a subset": Subset(subset, range(1, 6)),
        "subset by tensor": Subset(pair, torch.tensor([2, 4, 6])),  # type: ignore[arg-type]
        "subset from the end": Subset(pair, [-1, -2, 4]),
        "stack": StackDataset(pair, TensorDataset(TENSORS["halves"])),
        "concat": ConcatDataset([pair, pair]),
    }


def outcome(loader: Any) -> Any:
    try:
        return list(loader)
    except Exception as error:
        return type(error)


CASES = [(name, True, 0) for name in datasets()] + [("pair", False, 0), ("pair", True, 2)]


@pytest.mark.parametrize(("name", "shuffle", "workers"), CASES)
def test_batches_are_those_of_torch(name: str, shuffle: bool, workers: int) -> None:
    def loader(module: Any, **more: Any) -> Any:
        torch.manual_seed(1)
        return outcome(module.DataLoader(datasets()[name], 5, shuffle=shuffle, **more))

    theirs = loader(torch.utils.data)
    ours = loader(hybridloader, num_workers=workers, backend="threads" if workers else None)
    same([theirs], [ours])


def samples_asked_for(data: Any, **options: Any) -> int:
    """How many samples a loader over `data` asks a `TensorDataset` for, one by one."""
    calls, code = 0, TensorDataset.__getitem__.__code__

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is code

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        list(hybridloader.DataLoader(data, 23, **options))
    finally:
        sys.setprofile(before)
    return calls


class Mine(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)


def test_samples_are_fetched_one_by_one_only_where_a_class_or_a_function_is_the_users() -> None:
    """Speed: the dataset itself is not indexed."""
    mine = Mine(TENSORS["labels"])
    assert samples_asked_for(datasets()["pair"]) == 0
    assert samples_asked_for(datasets()["pair"], collate_fn=list) == 23
    assert samples_asked_for(mine) == 23
    assert samples_asked_for(Subset(mine, [1])) == 1


def test_odd_indices_do_what_they_do_with_torch() -> None:
    data = datasets()["pair"]
    odd: list[Any] = [[0, 23], [0, -1], [True, False], [1.0], ["a"], [[1, 2]], [2**70], [0, None]]
    for indices in odd:
        theirs = outcome(torch.utils.data.DataLoader(data, batch_sampler=[indices]))
        ours = outcome(hybridloader.DataLoader(data, batch_sampler=[indices]))
        same([theirs], [ours])


def test_tensors_that_require_grad_keep_their_graph() -> None:
    weight = torch.ones(6, requires_grad=True)
    ((batch,),) = hybridloader.DataLoader(TensorDataset(weight), 6)
    batch.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0] * 6


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(-5, 24), max_size=9), max_size=4),
    st.sampled_from(["pair", "subset"]),
)
def test_any_batches_of_indices(batches: list[list[int]], name: str) -> None:
    data: Dataset[Any] = datasets()[name]
    theirs = outcome(torch.utils.data.DataLoader(data, batch_sampler=batches))
    ours = outcome(hybridloader.DataLoader(data, batch_sampler=batches))
    same([theirs], [ours])


class Padded(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pair", tuple),
        ("pair", (dict, tuple)),
        *((name, torch.Tensor) for name in ("pair", "subset")),
    ],
)
def test_a_collate_function_that_was_added_to_torchs_map_is_called(
    name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(batch: Any, *, collate_fn_map: Any = None) -> str:
        return "mine"

    monkeypatch.setitem(default_collate_fn_map, kind, mine)
    data = datasets()[name]
    theirs = outcome(torch.utils.data.DataLoader(data, 4))
    ours = outcome(hybridloader.DataLoader(data, 4))
    assert "mine" in str(theirs)
    same([theirs], [ours])


@runtime_checkable
class Named(Protocol):
    name: str


@pytest.mark.parametrize("kind", [Padded, Named])
def test_a_collate_function_of_another_class_changes_nothing(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions: Any = default_collate_fn_map
    monkeypatch.setitem(functions, kind, functions[float])
    assert samples_asked_for(datasets()["pair"]) == 0
    assert next(iter(hybridloader.DataLoader([1, 2], 2))).tolist() == [1, 2]


def constant(value: float) -> TensorDataset:
    return TensorDataset(torch.full((4,), value))


CHANGES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (lambda: Subset(constant(0), range(4)), lambda data: setattr(data, "dataset", constant(1))),
    (
        lambda: Subset(TensorDataset(torch.arange(4)), range(4)),
        lambda data: setattr(data, "indices", [0, 1, 3, 2]),
    ),
    (lambda: constant(0), lambda data: setattr(data, "tensors", (torch.ones(4),))),
    (lambda: constant(0), lambda data: data.tensors[0].add_(1)),
]


@pytest.mark.parametrize(("make", "change"), CHANGES)
@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}], ids=str)
def test_parts_that_are_replaced_between_batches_are_seen_as_torch_sees_them(
    make: Callable[[], Any], change: Callable[[Any], None], options: Any
) -> None:
    found = []
    for kind, more in ((torch.utils.data.DataLoader, {}), (hybridloader.DataLoader, options)):
        data = make()
        it = iter(kind(data, 2, **more))
        batches = [next(it)]
        change(data)
        found.append([*batches, next(it)])
    same([found[0]], [found[1]])
    first, second = found[1]
    assert repr(first) != repr(second)


def test_getitems_of_one_object_is_asked() -> None:
    data: Any = TensorDataset(torch.zeros(4))
    data.__getitems__ = lambda indices: [(torch.tensor(index),) for index in indices]
    theirs, ours = (
        outcome(kind(data, 2)) for kind in (torch.utils.data.DataLoader, hybridloader.DataLoader)
    )
    same([theirs], [ours])
    assert next(iter(hybridloader.DataLoader(data, 2)))[0].tolist() == [0, 1]
