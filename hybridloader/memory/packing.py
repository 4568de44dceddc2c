"""Packing of a value into a small header and large buffers, and back.

The header is an ordinary pickle. It omits the large flat memory of the value (tensors, numpy arrays,
objects that support the buffers of pickle protocol 5). That memory is returned as buffers, which can
be sent without another copy. The caller sends header and buffers.
"""

from __future__ import annotations

import copyreg
import ctypes
import pickle
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from hybridloader._support.inheritance import reducing_pickler, registered
from hybridloader._support.user_objects import text_of
from hybridloader.errors import DamagedMessage, ResultPicklingError
from hybridloader.memory.segments import ALIGN, aligned

if TYPE_CHECKING:
    import torch


# -- Reduction of tensors and arrays to flat buffers of a pickle, and their reconstruction.
#
# Special tensors (another device, quantized, a class with its own reducer) use their own pickling.
# Packing never imports torch or numpy: it uses them only if they are imported already.


@cache
def _torch() -> Any:
    import torch

    return torch


@cache
def _usual_reduction() -> tuple[Any, tuple[Any, ...]]:
    """Return torch's functions that rebuild a subclass, and the tensor within it."""
    torch: Any = _torch()
    inners = torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3
    return torch._tensor._rebuild_from_type_v2, inners


class Tensors:
    """Reducer of the tensors of one pickle: a dense CPU tensor becomes one flat buffer.

    Tensors over one storage would arrive with separate storages. So if the first pickling finds such
    tensors, the value is pickled again, with the used part of their storage once.
    """

    def __init__(self) -> None:
        # All the mutable state:
        self.met: list[Any] = []  # tensors that were reduced since the last `forget`
        self.bases: dict[int, list[_Base]] = {}  # in order, by the address of their storage

    def way_of(self, kind: type) -> Callable[[Any], Any] | None:
        """Return the function that reduces objects of this class; None leaves them to the pickler.

        A process that has not imported torch or numpy has none of their objects to send.
        """
        torch: Any = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            # Not as registered with `ForkingPickler`, as by MONAI: that sends a storage, for which only
            # torch's own pickler has a way.
            return self.reduce if kind is torch.Tensor else self.reduce_subclass
        if (way := registered(kind)) is not None:
            return way
        numpy: Any = sys.modules.get("numpy")
        return reduce_array if numpy is not None and kind is numpy.ndarray else None

    def reduce_subclass(self, tensor: torch.Tensor) -> Any:
        """Reduce `tensor` as its class does, but send its memory like that of a plain tensor."""
        reduced: Any = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        usual, inners = _usual_reduction()
        if type(reduced) is tuple and reduced[0] is usual and len(reduced) == 2:
            inner, kind, how, state = reduced[1]
            if inner in inners and tensor.device.type == "cpu":
                return usual, (_itself, kind, (inner(*how),), state)
        return reduced

    def reduce(self, tensor: torch.Tensor) -> Any:
        name = name_of(tensor.dtype)
        # For another dtype `numpy()` would raise, which takes as long as packing a small batch.
        if name in NUMPY_HAS and not (tensor.requires_grad or self.bases):
            array: Any
            try:
                array = tensor.numpy()
            except (TypeError, RuntimeError):  # on a device, or sparse
                array = None
            if array is not None and array.size and array.flags.c_contiguous:  # nearly all
                self.met.append(tensor)
                return rebuild_tensor, (pickle.PickleBuffer(array), name, array.shape, None, False)
        return self._reduce(tensor)

    def _reduce(self, tensor: torch.Tensor) -> Any:
        torch = _torch()
        check_leaf(tensor)
        odd = tensor.is_quantized or tensor.is_nested or tensor.device.type != "cpu"
        if odd or tensor.layout is not torch.strided:
            return reduce_sparse(tensor) or tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        if tensor.requires_grad:
            plain, grad = tensor.detach(), True
        else:
            plain, grad = tensor, False
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        if plain is tensor:
            self.met.append(plain)
            base = self._base_of(plain) if self.bases else None
            if base is not None:
                return _rebuild_view, (base, *base.place(plain))
        order = None
        if not plain.is_contiguous():
            order = _dense_order(plain)
            if order is None and plain is tensor and (base := _smaller_base(plain)) is not None:
                return _rebuild_view, (base, *base.place(plain))
        # A dense tensor is contiguous memory in the order of its strides: this makes no copy, and the
        # reader rebuilds the same strides (channels_last stays channels_last).
        flat = plain.contiguous() if order is None else plain.permute(order).contiguous()
        name = name_of(plain.dtype)
        return rebuild_tensor, (buffer_of(flat, name), name, tuple(flat.shape), order, grad)

    def _base_of(self, tensor: torch.Tensor) -> _Base | None:
        """Return the storage part that is sent once and covers `tensor`; None if there is none."""
        bases = self.bases.get(tensor.untyped_storage().data_ptr())
        if bases is None or not tensor.numel():
            return None
        start, end = _extent(tensor)
        place = bisect_right(bases, start, key=lambda base: base.start)
        return bases[place - 1] if place and end <= bases[place - 1].end else None

    def several_over_one_storage(self) -> bool:
        """Prepare another pickling, and return True, if tensors share a storage."""
        met = self.met
        if len(met) < 2 or self.bases:
            return False
        storages = [tensor.untyped_storage().data_ptr() for tensor in met]
        if len({*storages}) == len(met):
            return False
        groups: dict[int, list[Any]] = {}
        for tensor, storage in zip(met, storages, strict=True):
            if tensor.numel():
                groups.setdefault(storage, []).append(tensor)
        for key, group in groups.items():
            if len(group) > 1 and (parts := _shared_parts(group)):
                storage = group[0].untyped_storage()
                self.bases[key] = [_Base(storage, *part) for part in parts]
        return bool(self.bases)

    def forget(self) -> None:
        """Reset for another pickle."""
        self.met.clear()
        self.bases.clear()


def check_leaf(tensor: torch.Tensor) -> None:
    """Refuse a tensor with autograd history, which can't be sent, as torch does."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise pickle.PicklingError(
            "a tensor that requires grad and is not a leaf can't be sent to another process "
            "(autograd does not cross processes); detach() it first"
        )


def reduce_array(array: Any) -> Any:
    """Reduce an array as numpy does; a read-only array arrives writable, like a copy."""
    reduced = array.__reduce_ex__(5)
    if array.flags.writeable or type(reduced[1][0]) is not pickle.PickleBuffer:
        return reduced
    rebuild, (_, *how) = reduced
    memory: Any = bytearray()
    if array.nbytes:
        # Contiguous memory that the pickle must not mark as read-only. This process never writes to it.
        memory = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
        memory.kept = array
    return rebuild, (pickle.PickleBuffer(memory), *how)


@cache
def name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


NUMPY_HAS = frozenset({
    "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool", "complex128", "complex64",
})  # fmt: skip
"""Dtypes of torch that numpy has by the same name."""


def buffer_of(flat: torch.Tensor, dtype: str) -> Any:
    """Return the memory of a contiguous tensor as an object that pickles by protocol 5."""
    if flat.numel() == 0:
        return b""
    if dtype not in NUMPY_HAS:
        # as_strided, because a contiguous tensor of one element may have any stride
        flat = flat.as_strided((flat.numel(),), (1,)).view(_torch().uint8)
    array: Any = flat.numpy()
    return pickle.PickleBuffer(array)


class _Base:
    """Part of one storage that several tensors use; the pickle's memo writes it once."""

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._start = start // ALIGN * ALIGN  # the tensors keep their alignment
        self._bytes: Any = view_of(storage, _torch().uint8, self._start, (end - self._start,), (1,))

    def place(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        offset = tensor.storage_offset() - self._start // tensor.element_size()
        return name_of(tensor.dtype), offset, tuple(tensor.shape), tensor.stride()

    def __reduce__(self) -> Any:
        array = self._bytes.numpy()
        return rebuild_tensor, (pickle.PickleBuffer(array), "uint8", array.shape, None, False)


def _shared_parts(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return start and end of each part of the storage where several overlap or touch, in order."""
    parts: list[tuple[int, int, int]] = []
    for start, end in sorted(map(_extent, tensors)):
        if parts and start <= parts[-1][1]:
            first, reached, count = parts[-1]
            parts[-1] = first, max(reached, end), count + 1
        else:
            parts.append((start, end, 1))
    return [(start, end) for start, end, count in parts if count > 1]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of the storage that `tensor` covers, and the end after the last."""
    last: int = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + last + 1) * size


def _smaller_base(tensor: torch.Tensor) -> _Base | None:
    """Return the part of the storage that `tensor` covers, if that is smaller than its elements.

    It is smaller after `expand`: three numbers are sent as three numbers, as with torch.
    """
    start, end = _extent(tensor)
    smaller = end - start < tensor.numel() * tensor.element_size()
    return _Base(tensor.untyped_storage(), start, end) if smaller else None


def _dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions by falling stride, if the elements leave no gap in that order."""
    stride = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=stride.__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def tensor_over(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a contiguous tensor over the memory of `buffer`, which is no view of another tensor."""
    flat: torch.Tensor = _torch().frombuffer(buffer, dtype=dtype)
    if len(shape) == 1:
        return flat
    return view_of(flat.untyped_storage(), dtype, 0, shape, steps_of(shape))


def steps_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    step, steps = 1, []
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def view_of(storage: Any, dtype: Any, offset: int, shape: Any, stride: Any) -> torch.Tensor:
    empty = _torch().empty(0, dtype=dtype, device="cpu")
    return empty.set_(storage, offset, shape, stride)  # type: ignore[no-any-return]


def _flat(data: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory of a pickle's buffer as a tensor that begins at a multiple of `ALIGN`.

    A buffer within the pickle is loaded as a bytearray, which is aligned to 16 bytes: it is copied.
    """
    if type(data) is not bytearray:
        return _torch().frombuffer(data, dtype=dtype)  # type: ignore[no-any-return]
    size = len(data)
    memory, start = aligned(size)
    memory[start : start + size] = data
    count = size // dtype.itemsize
    return _torch().frombuffer(memory, dtype=dtype, count=count, offset=start)  # type: ignore[no-any-return]


def rebuild_tensor(
    data: Any, dtype: str, shape: tuple[int, ...], order: tuple[int, ...] | None, grad: bool
) -> torch.Tensor:
    kind = dtype_of(dtype)
    tensor: torch.Tensor
    if not len(data):
        tensor = _torch().empty(shape, dtype=kind, device="cpu")
    elif order is None:
        tensor = _flat(data, kind)
        if len(shape) != 1:
            tensor = view_of(tensor.untyped_storage(), kind, 0, shape, steps_of(shape))
    else:  # `shape` is in the order of the memory: restore that of the dimensions
        steps = steps_of(shape)
        back = sorted(range(len(order)), key=order.__getitem__)
        where = tuple(shape[i] for i in back), tuple(steps[i] for i in back)
        tensor = view_of(_flat(data, kind).untyped_storage(), kind, 0, *where)
    return tensor.requires_grad_() if grad else tensor


@cache
def dtype_of(name: str) -> Any:
    return getattr(_torch(), name)


class AsTensor:
    """Numbers that arrive as a tensor; made without torch."""

    __slots__ = ("dtype", "numbers", "shape")

    def __init__(
        self,
        numbers: Any,  # C-contiguous, with the buffer protocol
        dtype: str,  # by its name in torch
        shape: tuple[int, ...],
    ) -> None:
        self.numbers, self.dtype, self.shape = numbers, dtype, shape

    def __reduce__(self) -> Any:
        data = pickle.PickleBuffer(self.numbers) if prod(self.shape) else b""
        return rebuild_tensor, (data, self.dtype, self.shape, None, False)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _rebuild_view(base: torch.Tensor, dtype: str, *place: Any) -> torch.Tensor:
    return view_of(base.untyped_storage(), dtype_of(dtype), *place)


# -- sparse tensors ----------------------------------------------------------------------------------

# torch's own pickles of sparse tensors contain their dense parts, too. But torch 2.13 puts each sparse
# tensor that it loads from a pickle into a list (`torch._utils._sparse_tensors_to_validate`), which only
# `torch.load` clears. So a process that receives sparse batches would keep all of them.

_ROWS, _COLUMNS = ("sparse_csr", "sparse_bsr"), ("sparse_csc", "sparse_bsc")


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return the dense tensors that a sparse one consists of; None if it is not sparse."""
    layout = name_of(tensor.layout)
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
    parts, layout = dense_parts(plain), name_of(plain.layout)
    if parts is None:
        return None
    coalesced = plain.is_coalesced() if layout == "sparse_coo" else None
    return _rebuild_sparse, (layout, parts, tuple(plain.shape), coalesced, grad)


def _rebuild_sparse(
    layout: str,
    parts: tuple[torch.Tensor, ...],
    shape: tuple[int, ...],
    coalesced: bool | None,
    grad: bool,
) -> torch.Tensor:
    known: Any = {"device": parts[-1].device, "check_invariants": False}
    make: Any = _torch().sparse_coo_tensor  # Any, as torch's stubs do not know all forms of it
    if coalesced is None:
        make, known["layout"] = _torch().sparse_compressed_tensor, getattr(_torch(), layout)
    else:
        known["is_coalesced"] = coalesced
    made: torch.Tensor = make(*parts, shape, **known)
    return made.requires_grad_() if grad else made


IN_BAND = 32 * 1024
"""Bytes below which a buffer stays in the header.

Buffers share their memory with the rest of the batch: code that keeps the labels would keep the images.
Copying 32 KB costs about 3 microseconds, less than handling one buffer.
"""

Packed = tuple[bytes, list[memoryview]]


def pack(value: Any, what: str = "a result", *, other_main: bool = False) -> Packed:
    """Split `value` into a header and the buffers left out of it.

    The buffers are views of the memory of `value`: use them before it changes. `other_main` is True if
    the reader has another ``__main__``; objects from ``__main__`` are then pickled by value. Raises
    `ResultPicklingError`, with the name `what`, if a part of the value can't be pickled.
    """
    try:
        packer = _idle.pop()
    except IndexError:  # the first call, or other threads use the rest
        packer = _Packer(_plain)
    if packer.functions != copyreg.dispatch_table:
        packer = _Packer(_plain)
    try:
        packed = packer.pack(value)
        if len(packed[0]) < _LARGE_HEADER:
            _idle.append(packer)
        if not (other_main and _MAIN in packed[0]):
            return packed
    except Exception:  # pickle's own errors are of many types: PicklingError, TypeError, ...
        pass
    try:  # lambdas, classes defined in a function, things from __main__
        return _Packer(_by_value).pack(value)
    except Exception as error:
        raise ResultPicklingError(
            f"{what} of type {type(value).__qualname__!r} can't be sent to another process: "
            f"{text_of(error)}. Use something that can be pickled, or backend='threads'."
        ) from error


def pack_in_band(value: Any, what: str, *, other_main: bool = False) -> bytes:
    """Pickle `value` with all its buffers in the pickle. Raises as `pack` does."""
    header, buffers = pack(value, what, other_main=other_main)
    if not buffers:
        return header
    import cloudpickle

    whole: bytes = cloudpickle.dumps(value, protocol=5)
    return whole


_MAIN = b"_main__"  # of `__main__`, and of `__mp_main__`
_NAMES_OF_ONE_PROCESS = re.compile(_MAIN), re.compile(b"cloudpickle")


def reads_the_same_everywhere(header: bytes | memoryview) -> bool:
    """Return True if a process with another ``__main__`` loads the same objects from this header.

    A class that cloudpickle sent by value is the original in one process and a copy in another. The
    search takes a millisecond for a megabyte; loading and packing take several times as long.
    """
    return not any(name.search(header) for name in _NAMES_OF_ONE_PROCESS)


def unpack(header: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    """Load a value from the result of `pack`; the value shares memory with `buffers`.

    Raises `DamagedMessage` if the header is no complete pickle. Errors that its objects raise are
    raised unchanged.
    """
    try:
        return pickle.loads(header, buffers=buffers)
    except _NO_PICKLE as error:
        # In no variable: this frame is in that traceback, and the cycle would keep the buffers.
        if getattr(error.__traceback__, "tb_next", None) is not None:
            raise  # the code of an object raised it
        raise DamagedMessage(f"a pickle of {len(header):,} bytes is damaged: {error!r}") from error


_NO_PICKLE = (
    pickle.UnpicklingError, EOFError, ValueError, LookupError, OverflowError, MemoryError, StopIteration
)  # fmt: skip
"""Errors of the unpickler itself for bytes that are no pickle. `AttributeError`, `ImportError` and
`TypeError` are left out: they mean that a class is missing or has changed."""


class Arriving:
    """Object that arrives as the result of ``function(*arguments)``, called there."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


_LARGE_HEADER = 64 * 1024
"""Bytes of a header above which its packer is not reused: it would keep that much memory."""

_CLASSES = 1000  # maximum number of classes that a packer remembers and so keeps alive


class _Packer:
    """Pickler with the pieces that it writes and the buffers that it leaves out, for one caller.

    Making a packer takes longer than packing a small batch, so `_idle` keeps packers for reuse.
    """

    def __init__(self, pickler: Callable[..., Any]) -> None:
        self.functions = dict(copyreg.dispatch_table)
        self._tensors = Tensors()
        self._pieces: list[bytes] = []
        self._buffers: list[memoryview] = []
        self.write = self._pieces.append  # the pickler takes this object for its file
        self._pickler = pickler(self, keep_small(self._buffers), self._tensors)

    def pack(self, value: Any) -> Packed:
        self._pickler.dump(value)
        tensors = self._tensors
        if len(tensors.met) > 1 and tensors.several_over_one_storage():
            self._take()
            self._pickler.dump(value)
        if tensors.met:
            tensors.forget()
        return self._take()

    def _take(self) -> Packed:
        self._pickler.clear_memo()
        header = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        buffers = self._buffers[:]
        self._buffers.clear()
        return header, buffers


_idle: list[_Packer] = []


def keep_small(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a `buffer_callback` that puts buffers into `buffers`, except small ones."""

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < IN_BAND:
            return True
        buffers.append(raw)
        return False

    return keep


def _plain(out: Any, keep: Callable[..., bool], tensors: Tensors) -> pickle.Pickler:
    pickler = pickle.Pickler(out, protocol=5, buffer_callback=keep)
    pickler.dispatch_table = _Table(tensors)
    return pickler


class _Table(dict[type, Callable[[Any], Any]]):
    """Table of reducers by class; `Tensors.way_of` is called once for each class.

    A `reducer_override` would do the same, but takes a microsecond more for every object.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(copyreg.dispatch_table)
        self._way_of = tensors.way_of

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, type):  # classes are pickled by name, unless in the table
            raise KeyError(kind)
        if len(self) > _CLASSES:  # a dataset makes classes all the time
            self.clear()
            self.update(copyreg.dispatch_table)
        found = self[kind] = self._way_of(kind) or _as_it_says
        return found


_as_it_says = methodcaller("__reduce_ex__", 5)


def _by_value(out: Any, keep: Callable[..., bool], tensors: Tensors) -> Any:
    import cloudpickle

    def reduce(obj: Any) -> Any:
        way = tensors.way_of(type(obj))
        return None if way is None else way(obj)

    pickler = reducing_pickler(cloudpickle.Pickler)
    return pickler(out, reduce, protocol=5, buffer_callback=keep)
