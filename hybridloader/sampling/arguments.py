"""Checks of the arguments of samplers: seeds, numbers of samples, lengths and weights.

Errors are raised at once and name the argument. Nothing is rounded, clipped or guessed. The module does
not import torch: it recognizes a tensor by its methods.
"""

from __future__ import annotations

import zlib
from collections.abc import Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridloader._support.text import whole
from hybridloader._support.user_objects import has

LARGEST = 2**63 - 1
"""Largest length or epoch: the maximum of int64."""

MOST_SAMPLES = 2**62
"""Largest number of samples. It leaves room in int64 for an index and a number of ranks."""


def seed_of(value: Any) -> int:
    """Return `value` as a seed of 64 bits, such as that of ``torch.initial_seed()``."""
    return whole("seed", value, 0, 2**64 - 1)


def count_of(name: str, source: int | Sized) -> int:
    """Return the number of samples: `source` itself, or its length."""
    if any(kind.__module__ == "torch.utils.data.sampler" for kind in type(source).__mro__):
        raise TypeError(
            f"{name} must be the dataset or its length, not the {type(source).__name__}, whose order "
            "and weights would be ignored; in a pipeline, .shard() divides the indices of any sampler"
        )
    if isinstance(source, Sized):
        return whole(f"len({name})", len(source), 0, MOST_SAMPLES)
    if has(source, "__index__"):
        return whole(name, source, 0, MOST_SAMPLES)
    raise TypeError(
        f"{name} must be a number of samples or something with a length, got "
        f"{type(source).__name__}; an iterable dataset has no indices to sample"
    )


def _array(name: str, values: Any) -> npt.NDArray[Any]:
    """Return the numbers of a sequence, an array or a tensor as an array of one dimension."""
    if has(values, "detach"):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must have one dimension: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got the shape {array.shape}")
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers, got {array.dtype} such as {array[0]!r}")
    return array


def lengths_of(lengths: Any) -> npt.NDArray[np.int64]:
    """Return lengths of samples as int64. Raises unless they are whole numbers from 0 up."""
    array = _array("lengths", lengths)
    if array.dtype.kind == "f":
        raise TypeError(
            f"lengths must be whole numbers, got {array.dtype}; count in a finer unit, such as "
            "milliseconds for seconds"
        )
    if array.size and int(array.max()) > LARGEST:
        raise ValueError(f"lengths must be at most {LARGEST}, got {int(array.max())}")
    if array.size and int(array.min()) < 0:
        at = int((array < 0).argmax())
        raise ValueError(f"lengths must not be negative, got lengths[{at}] = {array[at]}")
    return array.astype(np.int64, copy=False)


def weights_of(weights: Any) -> npt.NDArray[np.float64]:
    """Return weights as float64. Raises unless they are finite, not negative, and not all 0."""
    array = _array("weights", weights)
    if not array.size:
        raise ValueError("weights is empty: there is nothing to draw from")
    array = array.astype(np.float64, copy=False)
    # The extremes suffice: min and max of an array with a NaN are NaN.
    least, most = float(array.min()), float(array.max())
    if not (least >= 0 and most < float("inf")):
        at = int((~(np.isfinite(array) & (array >= 0))).argmax())
        raise ValueError(
            f"weights must be finite and not negative, got weights[{at}] = {float(array[at])}"
        )
    if most == 0:
        raise ValueError(f"all {array.size} weights are 0: there is nothing to draw from")
    return array


def fingerprint(array: npt.NDArray[Any]) -> int:
    """Return a checksum of the contents, the same on every platform."""
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return zlib.crc32(plain.view(np.uint8).data)
