"""Values to pack, and the ways that they travel."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from hybridloader.backends.process.frames import (
    OTHER,
    TASK,
    decode_fields,
    encode_event,
    encode_fields,
)
from hybridloader.engine.messages import Done, Message, Task
from hybridloader.engine.serving import Pickled
from hybridloader.memory.packing import IN_BAND, AsTensor, pack, unpack
from hybridloader.memory.shared_slots import SlotReader, SlotWriter
from hybridloader.memory.slots import OWN
from support.slot_pairs import writer_and_reader

__all__ = ["IN_BAND", "OWN", "AsTensor", "pack", "unpack"]

_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "int4 uint3 bits8 bits16"
)
_LATER = "float8_e8m0fnu float4_e2m1fn_x2"  # in torch 2.7 and 2.8
DTYPES = [getattr(torch, name) for name in _DTYPES.split()]
DTYPES += [getattr(torch, name) for name in _LATER.split() if hasattr(torch, name)]
_NUMPY = "? b h i q B H I Q e f d g F D G S5 U7 M8[ns] M8[D] m8[us] V6 >f4 <i2 f4,(2,3)i2,U3"
NUMPY_DTYPES = _NUMPY.split()


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    image: Any
    label: int


class Keyed(dict[str, Any]):
    """A user's own kind of dict, with an attribute."""


class Marked(torch.Tensor):
    """A user's own kind of tensor."""


class Own(torch.Tensor):
    """A kind that says by itself how it is pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, ("mine",)


def streamed(value: Any) -> Any:
    """Pack and unpack as over a stream: every buffer has memory of its own."""
    header, buffers = pack(value)
    return unpack(header, [memoryview(bytearray(buffer)) for buffer in buffers])


def encoded_message(message: Message, returned: Sequence[int] = ()) -> list[Any]:
    """Encode a message as a crew does it, without slots for large buffers."""
    if isinstance(message, Task):
        header, buffers = pack(message.index, "a task")
        return [encode_fields(TASK, message.seq, header, returned, items=message.item), *buffers]
    header, buffers = pack(message, "a message")
    return [encode_fields(OTHER, 0, header, returned), *buffers]


def through_slots(value: Any, pair: tuple[SlotWriter, SlotReader] | None = None) -> Any:
    """Pack and unpack as process backends do: fields, slots, and a stream for the rest."""
    writer, reader = pair or writer_and_reader()
    writer.release(reader.returned())
    parts, fds = encode_event(Done(0, 7, Pickled(value)), (), writer)
    received = [memoryview(bytearray(part)) for part in parts]
    _, seq, header, _, slot_map, *_ = decode_fields(received)
    assert seq == 7
    buffers = received[1:]
    if slot_map is not None:
        reader.learn(slot_map, list(fds))
        buffers = reader.buffers(slot_map, buffers)
        if not header:
            header = buffers.pop()
    else:
        assert not fds
    found = unpack(header, buffers)
    if pair is None:
        writer.close()
    return found


WAYS = [pytest.param(streamed, id="stream"), pytest.param(through_slots, id="slots")]


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def is_dense(tensor: torch.Tensor) -> bool:
    """True if it covers its memory without gap or overlap, in whatever order of dimensions."""
    covered = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return covered + 1 == tensor.numel() and 0 not in tensor.stride()


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert type(a) is type(b)
    assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
    assert raw(a) == raw(b)


def of_random_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with any bits in it; of ``bool`` only those that a bool may have."""
    one = torch.empty(1, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(1)
    high = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, high, (*shape, one), dtype=torch.uint8, generator=generator)
    # `view(dtype)` wants a dimension of that many bytes, which a tensor without elements has too.
    return bits.view(dtype).reshape(shape)
