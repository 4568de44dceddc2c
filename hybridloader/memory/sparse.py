"""Conversion of sparse tensors to the dense ones that they are made of, and back.

torch's own pickles of sparse tensors do the same. But torch 2.13 keeps every sparse tensor that was
loaded from a pickle in a list (`torch._utils._sparse_tensors_to_validate`), which only `torch.load`
clears. So a process that receives sparse batches would keep them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ROWS, _COLUMNS = ("sparse_csr", "sparse_bsr"), ("sparse_csc", "sparse_bsc")


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return the dense tensors that a sparse one consists of; None if it is not sparse."""
    layout = _layout(tensor)
    if layout == "sparse_coo":
        return tensor._indices(), tensor._values()
    if layout in _ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in _COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return None


def reduce_sparse(tensor: torch.Tensor) -> Any:
    """Reduce `tensor` for pickle, as a leaf; None if it is not sparse."""
    plain, grad = tensor.detach(), tensor.requires_grad
    parts, layout = dense_parts(plain), _layout(plain)
    if parts is None:
        return None
    coalesced = plain.is_coalesced() if layout == "sparse_coo" else None
    return _rebuild, (layout, parts, tuple(plain.shape), coalesced, grad)


def _layout(tensor: torch.Tensor) -> str:
    return str(tensor.layout).removeprefix("torch.")


def _rebuild(
    layout: str,
    parts: tuple[torch.Tensor, ...],
    shape: tuple[int, ...],
    coalesced: bool | None,
    grad: bool,
) -> torch.Tensor:
    import torch

    known: Any = {"device": parts[-1].device, "check_invariants": False}
    make: Any = torch.sparse_coo_tensor  # Any, as torch's stubs do not know all forms of it
    if coalesced is None:
        make, known["layout"] = torch.sparse_compressed_tensor, getattr(torch, layout)
    else:
        known["is_coalesced"] = coalesced
    made: torch.Tensor = make(*parts, shape, **known)
    return made.requires_grad_() if grad else made
