"""Collation: torch's own, made to write large batches into slots; and one for workers without torch.

torch's `default_collate` stacks tensors by `collate_tensor_fn`. That function gets another body, which
stacks into a slot of the worker that runs it; on a thread without slots it works as before. A user's own
collate function gains too, if it calls one of these two functions or passes `default_collate_fn_map` on.
`collate_int_fn` and `collate_float_fn` get one that takes a third of the time.

A worker process that has not imported torch collates plain numbers and numpy's arrays itself, to arrive
as the tensor that torch would have made, the former without numpy. Anything else makes it import torch,
so that odd cases and errors are torch's own.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from types import FunctionType
from typing import Any

from hybridloader._support.torch_env import when_imported
from hybridloader.engine.worker import get_worker_info
from hybridloader.memory.packing import Arriving, AsTensor, tensor_over
from hybridloader.memory.slots import OWN, on_this_thread, when_slots_are_used


def slot_for(
    shape: tuple[int, ...], dtype: Any, over: Callable[[Any, Any, Any], Any] = tensor_over
) -> Any | None:
    """Return an uninitialized tensor over a slot of this thread; None if it is not worth one."""
    slots, size = on_this_thread.slots, dtype.itemsize * prod(shape)
    buffer = None if slots is None or size < OWN else slots.empty(size)
    return None if buffer is None else over(buffer, dtype, shape)


def teach_torch() -> None:
    """Replace the bodies of torch's functions that collate tensors and numbers. Once per process.

    Another entry in `default_collate_fn_map` would not reach code that calls such a function itself, as
    MONAI's collation does.
    """
    import torch
    from torch.utils.data._utils import collate

    functions: Any = collate

    def body(batch: Any, *, collate_fn_map: Any = None, _ours: Any = None) -> Any:
        return _ours(batch, collate_fn_map=collate_fn_map)

    for function, ours in (
        (functions.collate_tensor_fn, _stack),
        (functions.collate_int_fn, partial(_line_up, "q", torch.int64)),
        (functions.collate_float_fn, partial(_line_up, "d", torch.float64)),
    ):
        if "_ours" not in (function.__kwdefaults__ or ()):
            before = FunctionType(function.__code__, function.__globals__, function.__name__)
            before.__kwdefaults__ = function.__kwdefaults__
            # The defaults come first: another thread may be about to call the function.
            function.__kwdefaults__ = {"collate_fn_map": None, "_ours": partial(ours, before)}
            function.__code__ = body.__code__


when_slots_are_used(partial(when_imported, "torch", teach_torch))


def _line_up(
    code: str,
    dtype: Any,
    torchs: Callable[..., Any],
    batch: Any,
    *,
    collate_fn_map: Any = None,
) -> Any:
    """Return the tensor that `torchs` makes of numbers; by way of an array, in a third of the time.

    It is a copy, so that its memory is torch's. A tensor over the array itself would take the GIL once
    more when it is freed, which a consumer of threads waits for. `torch.tensor` lets the GIL go here.
    """
    import torch

    if type(batch) in (list, tuple) and batch and type(batch[0]) is not bool:
        try:
            return torch.asarray(array(code, batch), dtype=dtype, copy=True)
        except Exception:
            pass  # torch raises the error
    return torchs(batch, collate_fn_map=collate_fn_map)


def _stack(torchs: Callable[..., Any], batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Stack as `torchs` does, but into a slot if there is one."""
    import torch

    if on_this_thread.slots is not None:
        elem = batch[0]
        kind = type(elem)
        if (
            (kind is torch.Tensor or _is_subclass(kind))
            and not elem.is_nested
            and elem.layout is torch.strided
            and elem.nbytes * len(batch) >= OWN
            and elem.device.type == "cpu"
            and not elem.is_quantized
            and {*map(type, batch)} == {kind}
            and {t.dtype for t in batch} == {elem.dtype}
        ):
            out = slot_for((len(batch), *elem.shape), elem.dtype)
            if out is not None:
                try:
                    return torch.stack(
                        batch, 0, out=out if kind is torch.Tensor else _as(elem, out)
                    )
                except Exception:
                    pass  # different shapes, or one requires grad: torch decides
    return torchs(batch, collate_fn_map=collate_fn_map)


def _is_subclass(kind: type) -> bool:
    """Return True if torch's workers stack tensors of this class into memory that they provide."""
    import torch

    return (
        issubclass(kind, torch.Tensor)
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and get_worker_info() is not None  # without workers they don't, and the class may notice
    )


def _as(elem: Any, plain: Any) -> Any:
    """Return a tensor of the subclass of `elem` over new memory, made as torch's workers make it."""
    import torch

    whole = plain.untyped_storage()
    typed: Any = torch.TypedStorage
    storage = typed(wrap_storage=whole, dtype=elem.dtype, _internal=True)
    return elem.new(storage).resize_(plain.shape)


# -- without torch -------------------------------------------------------------------------------


class WithoutTorch:
    """`default_collate` or `default_convert` (the `name`) as it is sent to a worker process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function: Callable[[Any], Any] | None = None

    def __call__(self, data: Any) -> Any:
        if self._function is None and "torch" not in sys.modules:
            try:
                return _collate(data) if self.name == "default_collate" else _convert(data)
            except _NeedsTorch:
                pass
        if self._function is None:
            import torch.utils.data

            self._function = getattr(torch.utils.data, self.name)
        return self._function(data)

    def __reduce__(self) -> Any:
        return WithoutTorch, (self.name,)


def without_torch(function: Any) -> Any:
    """Return what to send to a worker process instead of `function`."""
    torch = sys.modules.get("torch")
    if torch is not None:
        for name in ("default_collate", "default_convert"):
            if function is getattr(torch.utils.data, name):
                return WithoutTorch(name)
    return function


def _enter(function: Any, entries: dict[Any, Any]) -> Any:
    from torch.utils.data._utils.collate import default_collate_fn_map

    for kind, collate_fn in entries.items():
        now = default_collate_fn_map.get(kind)
        if now is None or _is_torchs(kind, now):  # otherwise an import has made the entry there
            default_collate_fn_map[kind] = collate_fn
    return function


def with_entries(function: Any) -> Any:
    """Return the object to send to a fresh process instead of `function`, which arrives there.

    The program's entries of torch's map arrive before it: they are only in the process that made them.
    """
    if "torch.utils.data" not in sys.modules:  # then it has no entries yet
        return function
    from torch.utils.data._utils.collate import default_collate_fn_map

    entries = {k: f for k, f in default_collate_fn_map.items() if not _is_torchs(k, f)}
    return Arriving(_enter, function, entries) if entries else function


def _is_torchs(kind: Any, collate_fn: Any) -> bool:
    """Return True if torch itself has made this entry."""
    things = (collate_fn, *(kind if type(kind) is tuple else (kind,)))
    homes = {str(getattr(thing, "__module__", "")).partition(".")[0] for thing in things}
    return homes <= {"torch", "numpy", "builtins"}


def is_default_collate(function: Any) -> bool:
    """Return True if `function` is torch's `default_collate`, or a `WithoutTorch` for it."""
    if isinstance(function, WithoutTorch):
        return function.name == "default_collate"
    torch = sys.modules.get("torch")
    return torch is not None and function is torch.utils.data.default_collate


class _NeedsTorch(Exception):
    pass


_DTYPES = frozenset(
    ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
)


def _collate(batch: Any) -> Any:
    """Collate samples that are all of one plain kind as `default_collate` does."""
    kind = type(batch[0])
    if kind is dict:
        keys = batch[0].keys()
        if all(type(sample) is dict for sample in batch):
            return {key: _collate([sample[key] for sample in batch]) for key in keys}
        raise _NeedsTorch
    if any(type(sample) is not kind for sample in batch):
        raise _NeedsTorch
    if kind in (str, bytes):
        return batch
    if kind in (list, tuple):
        if any(len(sample) != len(batch[0]) for sample in batch):
            raise _NeedsTorch
        columns = zip(*batch, strict=True)
        return [_collate(column) for column in columns]
    return _numbers(batch, kind)


def _numbers(batch: Sequence[Any], kind: type) -> Any:
    """Return numbers or arrays of one type as one array that arrives as a tensor."""
    count = (len(batch),)
    if kind is float:
        return AsTensor(array("d", batch), "float64", count)
    if kind is bool:
        return AsTensor(bytearray(batch), "bool", count)
    if kind is int:
        try:
            return AsTensor(array("q", batch), "int64", count)
        except OverflowError:
            raise _NeedsTorch from None
    if kind.__module__ != "numpy":
        raise _NeedsTorch
    import numpy as np

    if kind is np.ndarray:
        first = batch[0]
        if any(a.dtype != first.dtype or a.shape != first.shape for a in batch):
            raise _NeedsTorch
        if first.dtype.name not in _DTYPES or not first.dtype.isnative:
            raise _NeedsTorch
        if any(min(a.strides, default=0) < 0 for a in batch):
            raise _NeedsTorch
        shape, dtype = (len(batch), *first.shape), first.dtype
        out = slot_for(shape, dtype, lambda buffer, *_: np.frombuffer(buffer, dtype).reshape(shape))
        return _as_tensor(np.stack(batch, out=np.empty(shape, dtype) if out is None else out))
    if issubclass(kind, (np.bool_, np.number)) and np.dtype(kind).name in _DTYPES:
        return _as_tensor(np.array(batch))
    raise _NeedsTorch


def _as_tensor(numpys: Any) -> AsTensor:
    """Return an array of numpy's, C-contiguous and of a dtype that torch has, to arrive as a tensor."""
    return AsTensor(numpys, numpys.dtype.name, numpys.shape)


def _convert(data: Any) -> Any:
    """Convert one plain sample as `default_convert` does."""
    kind = type(data)
    if kind in (str, bytes, int, float, bool, type(None)):
        return data
    if kind is dict:
        return {key: _convert(value) for key, value in data.items()}
    if kind in (list, tuple):
        return [_convert(value) for value in data]
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        plain = data.dtype.name in _DTYPES and data.dtype.isnative
        if plain and data.flags.c_contiguous and data.flags.writeable:
            return _as_tensor(data)
    raise _NeedsTorch


# -- batches of datasets that lie in memory as tensors, made by one indexing operation per tensor
#
# `torch.utils.data.TensorDataset`, and `Subset` of one, give the same values, types and structure with
# default collation. Only exactly these classes are gathered: a subclass may do something else in
# `__getitem__`. An odd batch (an index out of range, tensors that require grad) is left to the ordinary
# way, so that its result or its error is torch's.

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
    if gather is None or not _collates_as_torch():
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


def _collates_as_torch() -> bool:
    """Return True if `default_collate_fn_map`, which programs change in place, has torch's functions for
    tensors and lists."""
    from torch import Tensor
    from torch.utils.data._utils import collate

    functions: Any = collate.default_collate_fn_map
    empties: tuple[Any, ...] = (), [], {}
    return functions.get(Tensor) is collate.collate_tensor_fn and not any(
        isinstance(empty, known) for empty in empties for known in functions
    )


def _gather_of(dataset: Any) -> Gather | None:
    from torch.utils.data import Subset, TensorDataset

    kind = type(dataset)
    # torch asks the object, not its class.
    if kind not in (TensorDataset, Subset) or "__getitems__" in vars(dataset):
        return None
    return _of_subset(dataset) if kind is Subset else _of_tensor_dataset(dataset)


def _of_tensor_dataset(dataset: Any) -> Gather | None:
    import torch

    tensors = dataset.tensors
    if not _are_plain(tensors):
        return None
    rows = [tensor[:1].nbytes for tensor in tensors]  # bytes of one sample

    def gather(index: Any) -> Any:
        if dataset.tensors is not tensors:
            raise NotGatherable
        count, found = index.numel(), []  # len() of a tensor takes 5 us
        for tensor, row in zip(tensors, rows, strict=True):
            if tensor.requires_grad:  # it may have changed after the check above
                raise NotGatherable
            large = row * count >= OWN
            out = slot_for((count, *tensor.shape[1:]), tensor.dtype) if large else None
            found.append(torch.index_select(tensor, 0, index, out=out))
        return found

    return gather


def _are_plain(tensors: Sequence[Any]) -> bool:
    import torch

    return all(
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.requires_grad)
        for tensor in tensors
    )


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
