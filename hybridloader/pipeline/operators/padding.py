"""Padding: samples of different lengths become one batch, filled up with a padding value.

Samples of one shape give the batch of `default_collate`, with one difference: a list of numbers is one
sequence, not one field for each number. Nothing is truncated, and no number is changed: a dtype that
can't hold the padding value is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import TYPE_CHECKING, Any

from hybridloader._support.arguments import is_number
from hybridloader._support.text import short
from hybridloader.devices.batch_parts import like
from hybridloader.fetching.collate import slot_for
from hybridloader.pipeline.operators.fields import is_named

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pad:
    """A collate function that pads; for any operator that takes a ``collate_fn``.

    Tensors, arrays and lists of numbers are padded, at the end, to the longest of the batch in every
    dimension, and stacked; a list goes through ``torch.tensor``. Mappings, tuples and namedtuples are
    padded field by field and have the structure that `default_collate` gives them: a tuple becomes a
    list. Numbers and strings are collated as by `default_collate`.

    Parameters
    ----------
    padding_value
        Value to fill up with.
    lengths
        True gives ``(batch, lengths)``: `lengths` has the structure of the batch, with an int64 tensor
        of the sizes of the first dimension for tensors that have one, and None for the rest.

    Raises
    ------
    TypeError
        `padding_value` is not a number.

    Examples
    --------
    >>> Pad()([[1, 2, 3], [4]]).tolist()
    [[1, 2, 3], [4, 0, 0]]
    """

    padding_value: float = 0
    lengths: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.padding_value):
            raise TypeError(
                f"padding_value must be a number, not {short(self.padding_value)}; numbers differing "
                "by field are for a collate_fn of your own"
            )

    def __call__(self, samples: list[Any]) -> Any:
        batch, lengths = self._field(samples, "")
        return (batch, lengths) if self.lengths else batch

    def _field(self, samples: Sequence[Any], place: str) -> tuple[Any, Any]:
        """Return one field of all samples, and its lengths; `place` names it in errors."""
        first = samples[0]
        if {*map(type, samples)} == {_tensor_type()} or all(map(_is_sequence, samples)):
            return self._sequences(samples, place)
        if isinstance(first, Mapping):
            keys = list(first)
            for sample in samples:
                if not isinstance(sample, Mapping) or sample.keys() != first.keys():
                    raise _unlike(place, first, sample)
            columns = [[sample[key] for sample in samples] for key in keys]
            batches, lengths = self._fields(columns, keys, place)
            return (
                like(first, dict(zip(keys, batches, strict=True))),
                like(first, dict(zip(keys, lengths, strict=True))),
            )
        if isinstance(first, (tuple, list)):
            for sample in samples:
                if not isinstance(sample, (tuple, list)) or len(sample) != len(first):
                    raise _unlike(place, first, sample)
            batches, lengths = self._fields(zip(*samples, strict=True), range(len(first)), place)
            if is_named(first):
                return type(first)(*batches), type(first)(*lengths)
            return batches, lengths
        from torch.utils.data import default_collate

        return default_collate(list(samples)), None

    def _fields(
        self, columns: Iterable[Sequence[Any]], names: Iterable[Any], place: str
    ) -> tuple[list[Any], list[Any]]:
        found = [
            self._field(column, f"{place}[{name!r}]")
            for name, column in zip(names, columns, strict=True)
        ]
        return [batch for batch, _ in found], [lengths for _, lengths in found]

    def _sequences(self, samples: Sequence[Any], place: str) -> tuple[Any, Any]:
        import torch

        tensors = _tensors(samples)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len({*map(len, shapes)}) != 1:
            raise ValueError(
                f"samples{place} differ in their number of dimensions, they are of shapes "
                f"{short(shapes)}; padding makes a dimension longer, it adds none"
            )
        batch = self._stack(tensors, shapes, place)
        if not self.lengths or not shapes[0]:
            return batch, None
        return batch, torch.tensor([shape[0] for shape in shapes], device="cpu")

    def _stack(
        self, tensors: list[torch.Tensor], shapes: list[tuple[int, ...]], place: str
    ) -> torch.Tensor:
        import torch

        first = tensors[0]
        dtypes = {tensor.dtype for tensor in tensors}
        dtype = reduce(torch.promote_types, dtypes)
        shape = tuple(map(max, zip(*shapes, strict=True)))
        ragged = len({*shapes}) > 1
        if ragged:
            self._check(dtype, place)
        out: torch.Tensor | None = None
        if first.device.type == "cpu" and not any(tensor.requires_grad for tensor in tensors):
            out = slot_for((len(tensors), *shape), dtype)
        if not ragged and len(dtypes) == 1:
            return torch.stack(tensors, out=out)
        if out is None:
            if len(dtypes) == 1 and len({one[1:] for one in shapes}) == 1:
                value = self.padding_value
                return torch.nn.utils.rnn.pad_sequence(tensors, True, value)
            out = torch.empty((len(tensors), *shape), dtype=dtype, device=first.device)
        if ragged:
            out.fill_(self.padding_value)
        for row, tensor in enumerate(tensors):
            covered: Any = (row, *map(slice, shapes[row]))
            out[covered].copy_(tensor)
        return out

    def _check(self, dtype: torch.dtype, place: str) -> None:
        import torch

        value = self.padding_value
        if dtype.is_floating_point or dtype.is_complex:
            return
        if dtype is torch.bool:
            fits = value in (0, 1)
        else:
            limits = torch.iinfo(dtype)
            fits = limits.min <= value <= limits.max and value == int(value)
        if not fits:
            raise ValueError(
                f"samples{place} are of {dtype}, which can't hold padding_value={value!r}; give "
                "another value, or convert the samples first"
            )


@cache
def _tensor_type() -> Any:
    import torch

    return torch.Tensor


def _is_sequence(sample: Any) -> bool:
    """Return True if it is a tensor, an array, or a list of numbers, also a nested one."""
    if type(sample) is list:
        while type(sample) is list:
            if not sample:
                return True
            sample = sample[0]
        if isinstance(sample, (int, float, complex)):
            return True
        import numpy as np

        return isinstance(sample, (np.number, np.bool_))
    import numpy as np
    import torch

    return isinstance(sample, (torch.Tensor, np.ndarray))


def _tensors(samples: Sequence[Any]) -> list[torch.Tensor]:
    """Return the samples as tensors; an empty list is of the others' dtype and dimensions."""
    if {*map(type, samples)} == {_tensor_type()}:
        return list(samples)
    import torch

    found = [_tensor(sample) for sample in samples]
    empty = [type(s) is list and not t.numel() for s, t in zip(samples, found, strict=True)]
    if any(empty) and not all(empty):
        others = [tensor for tensor, nothing in zip(found, empty, strict=True) if not nothing]
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in others))
        for number, nothing in enumerate(empty):
            if nothing:
                tensor = found[number].to(dtype)
                flat = tensor.dim() == 1 and others[0].dim() > 1
                found[number] = tensor.new_empty((0,) * others[0].dim()) if flat else tensor
    return found


def _tensor(sample: Any) -> torch.Tensor:
    import numpy as np
    import torch

    if isinstance(sample, np.ndarray):
        # Torch has no tensors that can't be written to, and none of negative strides.
        if not sample.flags.writeable or min(sample.strides, default=0) < 0:
            sample = sample.copy()
        return torch.from_numpy(sample)
    return sample if isinstance(sample, torch.Tensor) else torch.tensor(sample)


def _unlike(place: str, first: Any, sample: Any) -> ValueError:
    return ValueError(f"samples{place} differ in structure: {short(first)} and {short(sample)}")
