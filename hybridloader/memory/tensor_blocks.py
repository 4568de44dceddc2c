"""Blocks: many small tensors of one pickle, sent as one buffer for each kind.

A tensor that is reduced alone costs about 2 microseconds to pack and 1 to 2 to rebuild, whatever its
size. So after the first `FEW`, small tensors are put into blocks. A block holds the tensors of one dtype
and row shape; their lengths may differ. For each tensor, the pickle contains only a call of `next` on an
iterator. The iterator replaces one of the pickle's buffers. An outer pickle loads the iterators first
(`packing.Around`).

Each rebuilt tensor has its own storage. Those of at most `PADDED` bytes share pieces of at most `SMALL`
bytes, so a tensor that is kept keeps no more than that alive.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any

from hybridloader.memory.segments import ALIGN
from hybridloader.memory.tensors import (
    NUMPY_HAS,
    AsTensor,
    Tensors,
    buffer_of,
    dtype_of,
    name_of,
    steps_of,
)

FEW = 16
"""Number of tensors of a pickle that are reduced alone before blocks are used. Making and opening a
block takes as long as about 10 tensors."""

SMALL = 4096
"""Bytes of a tensor above which it is reduced alone, and of the pieces that hold small ones: a page.
torch's workers make a file of shared memory for each tensor, which takes at least as much."""

PADDED = 256
"""Bytes of a tensor above which memory of its own takes less time than a row of a piece."""

MOST = 64
"""Maximum number of blocks of one pickle: further kinds of tensors are reduced alone."""

_HERE = NUMPY_HAS | {"bfloat16"}

Kind = tuple[Any, Any]  # dtype (of torch, or the name of one) and shape


class _Mark(bytearray):
    """Empty buffer that represents a block in the pickle."""

    number: int


class Block:
    """Small tensors of one dtype whose shapes differ at most in the first dimension."""

    def __init__(self, number: int, dtype: Any, row: tuple[int, ...] | None) -> None:
        self.dtype, self.row = dtype, row  # `row` is the shape without its first size; None: 0-d
        self.shapes: list[tuple[int, ...]] = []
        self.tensors: list[Any] = []
        self.take = self.tensors.append
        mark = _Mark()
        mark.number = number
        # Always the same object: after the first, the pickle contains a reference of two bytes.
        self.way: Any = (next, (pickle.PickleBuffer(mark),))
        self.parts: tuple[Any, ...] = ()  # arguments of `rebuild_block`, once gathered

    def gather(self) -> bool:
        """Join the bytes of the tensors in `parts`; return False if that is impossible."""
        name, lengths, shape = self.dtype, None, self.shapes[0]
        if type(name) is str:  # `AsTensor` objects
            data: Any = bytearray().join([tensor.numbers for tensor in self.tensors])
            sizes = [prod(tensor.shape) for tensor in self.tensors] if self.shapes[1:] else []
        else:
            name = name_of(name)
            whole = _joined(self.tensors, self.row is None)
            if whole is None:
                return False
            data = buffer_of(whole, name)
            sizes = [*map(type(whole).numel, self.tensors)] if self.shapes[1:] else []
        if sizes:
            assert self.row is not None
            step, shape = prod(self.row), self.row
            lengths = sizes if step == 1 else [size // step for size in sizes]
        self.parts = pickle.PickleBuffer(data), name, tuple(shape), lengths
        return True


def _joined(tensors: list[Any], scalars: bool) -> Any | None:
    """Return contiguous tensors of one dtype joined into one; None unless all are plain CPU tensors."""
    torch: Any = sys.modules["torch"]
    kind = torch.Tensor
    try:
        if {*map(attrgetter("layout"), tensors)} != {torch.strided}:
            return None
        if {device.type for device in {*map(attrgetter("device"), tensors)}} != {"cpu"}:
            return None
        if any(map(kind.is_neg, tensors)) or any(map(kind.is_conj, tensors)):
            return None
        return torch.stack(tensors) if scalars else torch.cat(tensors)
    except Exception:  # torch can't join this kind: the tensors are reduced alone
        return None


class Blocks(dict[Kind, Block | None]):
    """Blocks of one pickle, by the kinds of the tensors in them; None for a kind without a block."""

    def __init__(self) -> None:
        super().__init__()
        # All the mutable state, beside the dict's own:
        self.made: list[Block] = []
        self.closed = False  # no more tensors are put into blocks
        self._by_row: dict[Kind, Block | None] = {}

    def __missing__(self, kind: Kind) -> Block | None:
        dtype, shape = kind
        count = prod(shape)
        name = dtype if type(dtype) is str else name_of(dtype)
        block = None
        if not self.closed and name in _HERE and 0 < count * _size_of(name) <= SMALL:
            row = tuple(shape[1:]) if shape else None
            block = self._by_row.get((dtype, row))
            if block is None and len(self.made) < MOST:
                block = self._by_row[dtype, row] = Block(len(self.made), dtype, row)
                self.made.append(block)
            if block is not None:
                block.shapes.append(shape)
        self[kind] = block
        return block

    def tensors(self) -> Iterator[Any]:
        """Yield the torch tensors in the blocks."""
        for block in self.made:
            if type(block.dtype) is not str:
                yield from block.tensors

    def gather(self) -> bool:
        """Prepare all blocks to be sent; return False if some tensors can't be joined."""
        return all(block.gather() for block in self.made)

    def part(self, buffer: memoryview) -> Any:
        """Return the object to send for a buffer of the pickle: for a mark, the parts of its block."""
        if is_mark(buffer):
            return self.made[buffer.obj.number].parts  # type: ignore[attr-defined]
        return pickle.PickleBuffer(buffer)

    def forget(self, *, closed: bool = False) -> None:
        """Reset for another pickle."""
        self.clear()
        self._by_row.clear()
        self.made.clear()
        self.closed = closed


class TensorsInBlocks(Tensors):
    """Reducer of the tensors of one pickle; after the first few, it puts small ones into blocks."""

    few = FEW

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks()
        self.numbers = 0  # `AsTensor` objects that were reduced alone

    def way_of(self, kind: type) -> Callable[[Any], Any] | None:
        return self._reduce_numbers if kind is AsTensor else super().way_of(kind)

    def _reduce_numbers(self, numbers: AsTensor) -> Any:
        if self.numbers >= FEW:
            block = self.blocks[numbers.dtype, numbers.shape]
            if block is not None:
                block.take(numbers)
                return block.way
        self.numbers += 1
        return numbers.__reduce__()

    def together(self, tensor: Any) -> Any:
        try:
            block = self.blocks[tensor.dtype, tensor.shape]
            if block is None or tensor.requires_grad or not tensor.is_contiguous():
                return None
            if self.bases and tensor.untyped_storage().data_ptr() in self.bases:
                return None
        except RuntimeError:  # nested and sparse tensors lack some of these attributes
            return None
        block.take(tensor)
        return block.way

    def another_pass(self) -> bool:
        """Prepare another pickling, and return True, if the value must be pickled again."""
        blocks = self.blocks
        if not blocks.made:
            return self.several_over_one_storage()
        if blocks.gather():
            if not self.several_over_one_storage(blocks.tensors()):
                return False
            blocks.forget(closed=blocks.closed)
        else:
            blocks.forget(closed=True)
            self.met.clear()
        self.numbers = 0
        return True


def is_mark(buffer: memoryview) -> bool:
    """Return True if this buffer of a pickle represents a block."""
    return type(buffer.obj) is _Mark


@cache
def _size_of(name: str) -> int:
    """Return the bytes of an element, for the dtypes in `_HERE`."""
    if name == "bool":
        return 1
    return int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


def rebuild_block(
    data: Any,
    dtype: str,
    shape: tuple[int, ...],  # of each tensor, or of each of their rows
    lengths: list[int] | None,  # numbers of rows; None: all have that shape
) -> Iterator[Any]:
    """Make the tensors of a block, each with memory that begins at a multiple of `ALIGN`."""
    import torch as imported

    torch: Any = imported  # torch's stubs lack some of these return types
    kind, count = dtype_of(dtype), prod(shape)
    flat = torch.frombuffer(data, dtype=kind)
    if lengths is not None:
        return iter(torch.split_with_sizes_copy(flat.view(-1, *shape), lengths))
    bytes_each = count * kind.itemsize
    if not shape or bytes_each > PADDED or dtype not in NUMPY_HAS:  # numpy has no views of these
        return iter(torch.unbind_copy(flat.view(-1, *shape)))
    import numpy as np

    found: list[Any] = []
    place = -(-bytes_each // ALIGN) * ALIGN
    strides = place, *(kind.itemsize * step for step in steps_of(shape))
    whole, several = flat.numpy().reshape(-1, *shape), SMALL // place
    for start in range(0, len(whole), several):
        # A copy, because the tensors would keep all of `data` and its slot alive.
        rows = whole[start : start + several]
        piece = torch.empty(len(rows) * place, dtype=torch.uint8, device="cpu").numpy()
        spread = np.ndarray(rows.shape, rows.dtype, piece, 0, strides)
        spread[...] = rows
        found += map(torch.from_numpy, spread)
    return iter(found)
