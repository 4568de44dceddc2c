"""Batches there and back: packing, frames and slots."""

from __future__ import annotations

import collections
import gc
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hybridloader import arena
from hybridloader.arena import Reader, Writer, capacity_for
from hybridloader.backends.frames import Decoder, encode
from hybridloader.errors import ResultNotSendable
from hybridloader.packing import IN_BAND, pack, unpack

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


def native_dtypes() -> st.SearchStrategy[Any]:
    kinds = hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes()
    return kinds.map(lambda dtype: dtype.newbyteorder("="))


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    image: Any
    label: int


def there_and_back(value: Any) -> Any:
    """As over a stream: every buffer in memory of its own."""
    header, buffers = pack(value)
    return unpack(header, [memoryview(bytearray(buffer)) for buffer in buffers])


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it covers its memory without gap or overlap, in whatever order of dimensions."""
    covered = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return covered + 1 == tensor.numel() and 0 not in tensor.stride()


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert type(a) is type(b)
    assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
    assert raw(a) == raw(b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7), (40, 40, 40)], ids=str)
def test_tensors_of_every_kind_come_back_equal(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bits = torch.randint(0, 2, shape, dtype=torch.int32)
    tensor = bits.to(dtype)
    back = there_and_back(tensor)
    assert_same(tensor, back)
    back.zero_()  # writable


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.permute(0, 2, 3, 1),
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t[:, ::2],
        lambda t: t[..., 1:3],
        lambda t: t[0, 0, 0].expand(50, -1),
        lambda t: t.flip(0),
        lambda t: t.transpose(1, 3),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
    ],
)
@pytest.mark.parametrize("scale", [1, 16], ids=["small", "large"])
def test_views_come_back_equal_and_dense_ones_keep_their_strides(view: Any, scale: int) -> None:
    tensor = view(torch.arange(4 * 3 * 8 * 8 * scale * 1.0).reshape(4, 3, 8, 8 * scale))
    back = there_and_back(tensor)
    assert torch.equal(tensor, back)
    if is_dense(tensor):
        assert tensor.stride() == back.stride()


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")  # torch's own, of quantised tensors
def test_tensors_that_are_not_dense_on_the_cpu_go_by_torchs_own_way() -> None:
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(there_and_back(sparse).to_dense(), torch.eye(4))
    quantised = torch.quantize_per_tensor(torch.rand(8), 0.1, 3, torch.quint8)
    assert torch.equal(there_and_back(quantised).int_repr(), quantised.int_repr())
    parameter = torch.nn.Parameter(torch.rand(3))
    assert_same(parameter, there_and_back(parameter))


def test_a_tensor_inside_a_graph_is_refused_as_torch_does() -> None:
    tensor = torch.rand(3, requires_grad=True)
    assert there_and_back(tensor).requires_grad
    with pytest.raises(ResultNotSendable, match="detach"):
        pack([tensor * 2])


@given(
    hnp.arrays(
        # Native byte order: numpy's own pickling forgets that of a big-endian datetime64.
        native_dtypes(),
        hnp.array_shapes(min_dims=0, min_side=0),
    )
)
def test_numpy_arrays_come_back_equal(array: np.ndarray[Any, Any]) -> None:
    back = there_and_back({"a": array})["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


def test_numpy_arrays_of_structures_and_objects_come_back_equal() -> None:
    structured = np.zeros(5000, dtype=[("x", "f4"), ("name", "U8")])
    structured["x"] = np.arange(5000)
    np.testing.assert_array_equal(structured, there_and_back(structured))
    objects = np.array([{"a": 1}, None, "text"], dtype=object)
    assert list(there_and_back(objects)) == list(objects)


def test_what_is_around_the_arrays_comes_back_too() -> None:
    value = {
        "point": Point(torch.ones(20_000), "y"),
        "record": Record(np.zeros((100, 100)), 3),
        "ordered": collections.OrderedDict(a=[1, (2, {3})]),
        "bytes": [b"x" * 100_000, bytearray(b"y"), "z" * 50_000],
    }
    back = there_and_back(value)
    assert isinstance(back["point"], Point)
    assert torch.equal(back["point"].x, torch.ones(20_000))
    assert back["record"].label == 3
    assert back["record"].image.shape == (100, 100)
    assert back["ordered"] == value["ordered"]
    assert type(back["ordered"]) is collections.OrderedDict
    assert back["bytes"] == value["bytes"]


def test_small_buffers_stay_in_the_header_so_that_labels_do_not_keep_images() -> None:
    images, labels = torch.zeros(IN_BAND, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64)
    _, buffers = pack((images, labels))
    assert [buffer.nbytes for buffer in buffers] == [IN_BAND]


def test_what_is_made_on_the_spot_goes_by_cloudpickle() -> None:
    class Local:
        def __init__(self, x: Any) -> None:
            self.x = x

    assert torch.equal(there_and_back(Local(torch.arange(3))).x, torch.arange(3))
    assert there_and_back(lambda x: x + 1)(1) == 2


def test_what_can_not_be_pickled_is_named() -> None:
    with pytest.raises(ResultNotSendable, match="generator"):
        pack([(letter for letter in "abc")])


# -- frames --------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=200), max_size=4), min_size=1, max_size=5), st.data())
def test_frames_survive_any_cutting_of_the_stream(
    frames: list[list[bytes]], data: st.DataObject
) -> None:
    stream = b"".join(bytes(piece) for parts in frames for piece in encode(parts))
    decoder, got = Decoder(), []
    while stream:
        room = decoder.room()
        most = len(stream) if room is None else min(len(room), len(stream))
        count = data.draw(st.integers(1, most))
        chunk, stream = stream[:count], stream[count:]
        if room is None:
            got.extend(decoder.feed(chunk))
        else:
            room[:count] = chunk
            room.release()
            got.extend(decoder.advance(count))
    assert [[bytes(part) for part in frame.parts] for frame in got] == frames


def test_descriptors_go_to_the_frame_they_belong_to() -> None:
    decoder = Decoder()
    decoder.fds.extend([7, 8])
    stream = b"".join(map(bytes, [*encode([b"a"], [7]), *encode([b"b"]), *encode([b"c"], [8])]))
    assert [frame.fds for frame in decoder.feed(stream)] == [[7], [], [8]]


# -- slots ---------------------------------------------------------------------------------------


def pass_on(writer: Writer, reader: Reader, *buffers: Any) -> tuple[Any, list[memoryview]]:
    """One batch from writer to reader, as the process backend does it."""
    while reader.returned:
        writer.release(reader.returned.popleft())
    place, fd, retired = writer.write([memoryview(b) for b in buffers])
    reader.retire(retired)
    if fd is not None:
        reader.add(place.slot, fd, place.capacity)
    return place, reader.buffers(place)


def test_a_slot_is_used_again_once_the_last_view_of_it_has_died() -> None:
    writer, reader = Writer(), Reader()
    first, buffers = pass_on(writer, reader, b"a" * 5000, b"b" * 3000)
    assert [bytes(buffer) for buffer in buffers] == [b"a" * 5000, b"b" * 3000]
    view = torch.frombuffer(buffers[1], dtype=torch.uint8)[100:200]
    del buffers
    second, others = pass_on(writer, reader, b"c" * 8000)
    assert second.slot != first.slot  # the view is alive
    assert view.unique().tolist() == [ord("b")]
    del view, others
    gc.collect()
    slots = {pass_on(writer, reader, b"d" * 8000)[0].slot for _ in range(5)}
    assert slots <= {first.slot, second.slot}


def test_slots_cost_no_descriptors_however_many_are_kept() -> None:
    writer, reader = Writer(), Reader()
    before = len(os.listdir("/proc/self/fd"))
    kept = [pass_on(writer, reader, bytes([k]) * 40_000)[1] for k in range(200)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(buffer[0][-1] == k for k, buffer in enumerate(kept))


def test_slots_of_sizes_no_longer_used_are_given_back() -> None:
    writer, reader = Writer(), Reader()
    for size in range(1, 60):
        pass_on(writer, reader, bytes(size * 40_000))
        gc.collect()
    assert len(writer._mappings) < 10
    assert set(reader._mappings) == set(writer._mappings)


def test_a_view_outlives_writer_and_reader() -> None:
    writer, reader = Writer(), Reader()
    _, buffers = pass_on(writer, reader, b"x" * 100_000)
    array = np.frombuffer(buffers[0], dtype=np.uint8)
    del writer, reader, buffers
    gc.collect()
    assert array.sum() == 100_000 * ord("x")


@given(st.integers(1, 1 << 40))
def test_capacities_waste_at_most_an_eighth_above_a_page(size: int) -> None:
    capacity = capacity_for(size)
    assert size <= capacity < size + max(4096, size / 7)
    assert capacity_for(capacity) == capacity


def test_no_memory_for_a_slot_is_an_error_that_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    writer, reader = Writer(), Reader()
    pass_on(writer, reader, b"x" * 5000)
    monkeypatch.setattr(arena.os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        writer.write([memoryview(bytes(10_000_000))])
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    assert bytes(pass_on(writer, reader, b"y" * 6000)[1][0]) == b"y" * 6000
