"""Parts of a batch that are pinned or moved to a device.

Containers are rebuilt by the rules of torch's `pin_memory`, and dataclasses too. This module pins and
moves nothing, and imports torch only when it examines a batch.
"""

from __future__ import annotations

import collections.abc as abc
import copy
import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hybridloader._support.user_objects import attribute, has

if TYPE_CHECKING:
    import torch


def mapped(data: Any, is_part: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Return `data` with its parts changed; containers are rebuilt as torch's `pin_memory` does it.

    A dataclass of which a field has changed is copied without a call of its constructor.
    """
    if is_part(data):
        return change(data)
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, abc.Mapping):
        return like(data, {key: mapped(value, is_part, change) for key, value in data.items()})
    if isinstance(data, tuple):
        parts = [mapped(value, is_part, change) for value in data]
        return type(data)(*parts) if has(data, "_fields") else type(data)(parts)
    if isinstance(data, abc.Sequence):
        parts = [mapped(value, is_part, change) for value in data]
        try:
            if isinstance(data, abc.MutableSequence):
                clone: Any = copy.copy(data)
                for i, value in enumerate(parts):
                    clone[i] = value
                return clone
            return type(data)(parts)  # type: ignore[call-arg]
        except TypeError:  # for example a range
            return parts
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _with_fields(data, is_part, change)
    return data


def like(first: abc.Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `first` with other values, as `default_collate` makes one."""
    if type(first) is dict:
        return values
    try:
        if not isinstance(first, abc.MutableMapping):
            return type(first)(values)  # type: ignore[call-arg]
        clone: Any = copy.copy(first)  # it may have more than its items
        if isinstance(first, Counter):  # `Counter.update` adds
            dict.update(clone, values)
        else:
            clone.update(values)
        return clone
    except TypeError:  # it can't be copied, updated or made of a dict
        return values


def _with_fields(data: Any, is_part: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    clone = None
    for field in dataclasses.fields(data):
        if not has(data, field.name):
            continue
        before = getattr(data, field.name)
        after = mapped(before, is_part, change)
        if after is not before:
            clone = copy.copy(data) if clone is None else clone
            object.__setattr__(clone, field.name, after)  # works for a frozen dataclass too
    return data if clone is None else clone


def tensors_in(data: Any) -> list[torch.Tensor] | None:
    """Return the tensors in a container; None for another object, whose tensors can't be found."""
    parts: Iterable[Any]
    if is_tensor(data):
        return [data]
    if isinstance(data, (str, bytes)):
        return []
    if isinstance(data, abc.Mapping):
        parts = data.values()
    elif isinstance(data, abc.Sequence):
        parts = data
    elif dataclasses.is_dataclass(data):
        parts = [attribute(data, field.name) for field in dataclasses.fields(data)]
    else:
        return None
    return [tensor for part in parts for tensor in tensors_in(part) or ()]


def is_tensor(part: Any) -> bool:
    """Return True if `part` is a tensor of torch's, of any kind."""
    import torch

    return isinstance(part, torch.Tensor)


def pins_itself(part: Any) -> bool:
    """Return True if `part` is pinned as a whole: a tensor, or an object with a `pin_memory()`."""
    return is_tensor(part) or has(part, "pin_memory")


def is_tensor_or_movable(part: Any) -> bool:
    return is_tensor(part) or takes_device(type(part))


def moves_itself(part: Any) -> bool:
    """Return True if `part` is pinned or moved as a whole."""
    return pins_itself(part) or takes_device(type(part))


@functools.lru_cache(maxsize=256)
def _parameters_of_to(kind: type) -> tuple[inspect.Parameter, ...]:
    to = getattr(kind, "to", None)
    if not callable(to):
        return ()
    try:
        return tuple(inspect.signature(to).parameters.values())[1:]
    except (TypeError, ValueError):  # some classes in C have no signature
        return ()


def takes_device(kind: type) -> bool:
    """Return True if the `to()` of `kind` takes a device, and not a unit or a time zone."""
    first = _parameters_of_to(kind)[:1]
    return any(p.name == "device" or p.kind is inspect.Parameter.VAR_POSITIONAL for p in first)


def takes_non_blocking(kind: type) -> bool:
    return any(
        p.name == "non_blocking" or p.kind is inspect.Parameter.VAR_KEYWORD
        for p in _parameters_of_to(kind)
    )


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense tensor; 0 for others."""
    import torch

    return tensor.nbytes if tensor.layout is torch.strided else 0


def help_to_pin(tensor: torch.Tensor) -> str:
    """Return advice for a dense tensor that could not be pinned: because of itself, or of the memory."""
    import torch

    strides = () if tensor.is_nested else zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in strides):
        return (
            "Some of its elements share memory, as expand() makes them. Return it with .contiguous() "
            "from the dataset or collate_fn, or expand it in your loop"
        )
    if tensor.is_quantized:
        return "It is quantized, and torch does not pin such tensors. Quantize it in your loop"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"Its class {type(tensor).__qualname__} may not let it be pinned: return plain tensors. Or "
            "the system's limit is reached: raise it (ulimit -l), or keep fewer batches"
        )
    return "Raise the system's limit (ulimit -l), or keep fewer batches"


def can_be_pinned(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` can be pinned: it is dense, and on the CPU."""
    import torch

    return tensor.layout is torch.strided and tensor.device.type == "cpu"
