"""Comparison of batches: equal in type, structure and value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def same_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
    assert a.requires_grad == b.requires_grad
    assert a.is_conj() == b.is_conj()
    if a.layout is torch.strided:
        assert torch.equal(a.detach(), b.detach())
    else:
        assert torch.equal(a.to_dense(), b.to_dense())


def same(
    a: Any, b: Any, tensors: Callable[[torch.Tensor, torch.Tensor], None] = same_tensors
) -> None:
    """Fail unless `a` equals `b`; `tensors` says what that means for two tensors."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        tensors(a, b)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key], tensors)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other, tensors)
    elif dataclasses.is_dataclass(a):
        same(vars(a), vars(b), tensors)
    else:
        assert a == b
