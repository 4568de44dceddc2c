"""Batches of datasets that lie in memory as tensors, made by one indexing operation per tensor.

`torch.utils.data.TensorDataset`, and `Subset`, `StackDataset` and `ConcatDataset` of such, give the same
values, types and structure with default collation. Only exactly these classes are gathered: a subclass
may do something else in `__getitem__`. An odd batch (an index out of range, tensors that require grad)
is left to the ordinary way, so that its result or its error is torch's.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridloader.fetching.collate import is_default_collate, slot_for
from hybridloader.memory.slots import OWN

Gather = Callable[[Any], Any]  # makes a batch of a tensor of indices


class NotGatherable(Exception):
    """The batch can't be gathered, and must be made the ordinary way."""


def gatherer(dataset: Any, collate_fn: Any) -> Callable[[Sequence[int]], Any] | None:
    """Return the function that makes a batch of `dataset` from a list of indices.

    None if the dataset can't be gathered. The function raises `NotGatherable` for a batch that can't be.
    """
    torch = sys.modules.get("torch")
    if torch is None or not is_default_collate(collate_fn):
        return None
    gather = _gather_of(dataset)
    if gather is None or not _as_torch_ships():
        return None

    def fetch(indices: Sequence[int]) -> Any:
        if type(indices) is not list or {*map(type, indices)} != {int}:
            raise NotGatherable
        try:  # through an array: torch.tensor takes five times as long for a list
            index = torch.frombuffer(array("q", indices), dtype=torch.int64)
            return gather(index)
        except (IndexError, OverflowError, RuntimeError, ValueError):
            raise NotGatherable from None

    return fetch


def _as_torch_ships() -> bool:
    """Return True if default collation and the datasets' methods are as torch defines them.

    `default_collate_fn_map` may be changed in place, as its docstring shows, and a test may replace a
    method.
    """
    from torch import Tensor
    from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
    from torch.utils.data._utils import collate

    functions: Any = collate.default_collate_fn_map
    if functions.get(Tensor) is not collate.collate_tensor_fn:
        return False
    empties: tuple[Any, ...] = (), [], {}
    if any(isinstance(empty, known) for empty in empties for known in functions):
        return False
    kinds: tuple[Any, ...] = (TensorDataset, Subset, StackDataset, ConcatDataset)
    methods = (vars(kind).get(name) for kind in kinds for name in ("__getitem__", "__getitems__"))
    torchs = TensorDataset.__init__.__code__.co_filename
    return all(
        method is None or getattr(getattr(method, "__code__", None), "co_filename", None) == torchs
        for method in methods
    )


def _gather_of(dataset: Any) -> Gather | None:
    from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

    makers: dict[type, Callable[[Any], Gather | None]] = {
        TensorDataset: _of_tensor_dataset,
        Subset: _of_subset,
        StackDataset: _of_stack,
        ConcatDataset: _of_concat,
    }
    make = makers.get(type(dataset))
    if make is None or "__getitems__" in vars(dataset):  # torch asks the object, not its class
        return None
    return make(dataset)


def _while_same(gather: Gather, read: Callable[[], Iterable[Any]]) -> Gather:
    """Return `gather` for as long as `read` finds the objects that it finds now.

    A dataset may be given others in the middle of an epoch.
    """
    found = [*read()]
    identities = [*map(id, found)]

    def gather_if_same(index: Any) -> Any:
        if [*map(id, read())] != identities:
            raise NotGatherable
        return gather(index)

    return gather_if_same


def _of_tensor_dataset(dataset: Any) -> Gather | None:
    tensors = dataset.tensors
    gather = _of_tensors(tensors)
    if gather is None:
        return None

    def gather_if_same(index: Any) -> Any:
        if dataset.tensors is not tensors:
            raise NotGatherable
        return gather(index)

    return gather_if_same


def _of_tensors(tensors: Sequence[Any]) -> Gather | None:
    import torch

    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        if tensor.device.type != "cpu" or tensor.is_quantized or tensor.requires_grad:
            return None
    rows = [tensor[:1].nbytes for tensor in tensors]  # bytes of one sample

    def gather(index: Any) -> Any:
        count, found = index.numel(), []  # len() of a tensor takes 5 us
        for tensor, row in zip(tensors, rows, strict=True):
            if tensor.requires_grad:  # it may have changed after the check above
                raise NotGatherable
            large = row * count >= OWN
            out = slot_for((count, *tensor.shape[1:]), tensor.dtype) if large else None
            found.append(torch.index_select(tensor, 0, index, out=out))
        return found

    return gather


def _of_subset(dataset: Any) -> Gather | None:
    import torch

    whole = dataset.dataset
    inner = _gather_of(whole)
    if inner is None:
        return None

    def gather(index: Any) -> Any:
        if dataset.dataset is not whole:  # checked in this function: another call takes 0.4 us
            raise NotGatherable
        # Index by index: the list may have changed, and it may be a range.
        places = dataset.indices
        chosen = [places[i] for i in index.tolist()]
        if {*map(type, chosen)} != {int}:
            raise NotGatherable
        return inner(torch.frombuffer(array("q", chosen), dtype=torch.int64))

    return gather


def _of_stack(dataset: Any) -> Gather | None:
    datasets = dataset.datasets
    if isinstance(datasets, dict):
        parts = {key: _gather_of(part) for key, part in datasets.items()}
        if any(part is None for part in parts.values()):
            return None
        return _while_same(
            lambda index: {key: part(index) for key, part in parts.items() if part},
            lambda: (dataset.datasets, *datasets, *datasets.values()),
        )
    columns = [_gather_of(part) for part in datasets]
    if any(part is None for part in columns):
        return None
    return _while_same(
        lambda index: [part(index) for part in columns if part],
        lambda: (dataset.datasets, *datasets),
    )


def _of_concat(dataset: Any) -> Gather | None:
    """Return the gather of tensor datasets whose tensors agree in dtype and shape of a sample."""
    import torch
    from torch.utils.data import TensorDataset

    if any(type(part) is not TensorDataset for part in dataset.datasets):
        return None
    columns = list(zip(*(part.tensors for part in dataset.datasets), strict=False))
    if len({len(part.tensors) for part in dataset.datasets}) != 1:
        return None
    for column in columns:
        if _of_tensors(column) is None:
            return None
        if len({(tensor.dtype, tensor.shape[1:]) for tensor in column}) != 1:
            return None
    ends = torch.tensor(dataset.cumulative_sizes, device="cpu")
    starts = [0, *dataset.cumulative_sizes]

    def gather(index: Any) -> Any:
        low, high = torch.aminmax(index)
        if low < 0 or high >= starts[-1]:
            raise NotGatherable
        part_of = torch.bucketize(index, ends, right=True)
        found = []
        for column in columns:
            shape = (index.numel(), *column[0].shape[1:])
            dtype = column[0].dtype
            out = slot_for(shape, dtype)
            found.append(torch.empty(shape, dtype=dtype, device="cpu") if out is None else out)
        for part in sorted(set(part_of.tolist())):
            rows = (part_of == part).nonzero()[:, 0]
            local = index[rows] - starts[part]
            for batch, column in zip(found, columns, strict=True):
                batch[rows] = column[part][local]
        return found

    def read() -> Iterable[Any]:
        parts = dataset.datasets
        return (parts, dataset.cumulative_sizes, *parts, *(part.tensors for part in parts))

    return _while_same(gather, read)
