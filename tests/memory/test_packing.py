"""Values there and back: packing, the frames that carry it, and the dataset's own way to a worker."""

from __future__ import annotations

import collections
import copyreg
import enum
import gc
import os
import pickle
import sys
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.alike import same
from support.steps import steps

from hybridloader._support.errors import ResultNotSendable
from hybridloader.backends.process.codec import (
    decode_fields,
    decode_message,
    encode_done,
    encode_message,
)
from hybridloader.backends.process.frames import Decoder, encode
from hybridloader.engine.messages import Begin, Stop, Task
from hybridloader.memory.packing import IN_BAND, pack, unpack
from hybridloader.memory.shared_slots import SlotReader, SlotWriter
from hybridloader.memory.slots import OWN

_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 int4 uint3 bits8 bits16"
)
DTYPES = [getattr(torch, name) for name in _DTYPES.split()]
_NUMPY = "? b h i q B H I Q e f d g F D G S5 U7 M8[ns] M8[D] m8[us] V6 >f4 <i2 f4,(2,3)i2,U3"
NUMPY_DTYPES = _NUMPY.split()


class Colour(enum.Enum):
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
    """As over a stream: every buffer in memory of its own."""
    header, buffers = pack(value)
    return unpack(header, [memoryview(bytearray(buffer)) for buffer in buffers])


def through_slots(value: Any, pair: tuple[SlotWriter, SlotReader] | None = None) -> Any:
    """As the process backend does it: letters, slots, and a stream for the rest."""
    writer, reader = pair or (SlotWriter(1 << 30), SlotReader(1 << 30))
    writer.release(reader.returned())
    parts, fds = encode_done(7, pack(value), writer)
    carried = [memoryview(bytearray(part)) for part in parts]
    _, seq, header, _, slot_map, *_ = decode_fields(carried)
    assert seq == 7
    buffers = carried[1:]
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
    """Whether it covers its memory without gap or overlap, in whatever order of dimensions."""
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


# -- tensors and arrays --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7), (64, 80, 60)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_size_come_back_equal_and_writable(
    dtype: torch.dtype, shape: tuple[int, ...], way: Any
) -> None:
    tensor = of_random_bytes(dtype, shape)
    back = way([tensor])[0]
    assert_same(tensor, back)
    assert back.stride() == tensor.stride()
    assert back._base is None
    if tensor.numel():
        before = raw(tensor)
        back.untyped_storage().fill_(1)
        assert {*raw(back)} == {1}
        assert raw(tensor) == before  # nothing is shared with the sender's own


@pytest.mark.parametrize("way", WAYS)
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
        lambda t: t[1:2],
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t + 1).conj().imag,
        lambda t: torch.complex(t, t + 1).real,
    ],
)
@pytest.mark.parametrize("scale", [1, 24], ids=["small", "large"])
def test_views_come_back_equal_and_dense_ones_keep_their_strides(
    view: Any, scale: int, way: Any
) -> None:
    tensor = view(torch.arange(4 * 3 * 8 * 8 * scale * 1.0).reshape(4, 3, 8, 8 * scale))
    back = way(tensor)
    assert_same(tensor, back)
    assert not back.is_neg()
    if is_dense(tensor):
        assert tensor.stride() == back.stride()
    else:
        assert back.is_contiguous()


def test_a_channels_last_tensor_that_arrives_is_nobodys_view() -> None:
    tensor = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert streamed(tensor)._base is None


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")  # torch's own, of quantised tensors
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_tensors_that_are_not_dense_on_the_cpu_go_by_torchs_own_way() -> None:
    eye = torch.eye(300)
    for sparse in (eye.to_sparse(), eye.to_sparse_csr(), eye.to_sparse_csc()):
        back = streamed({"s": sparse})["s"]
        assert back.layout is sparse.layout
        assert torch.equal(back.to_dense(), eye)
    quantised = torch.quantize_per_tensor(torch.rand(80_000), 0.1, 3, torch.quint8)
    back = streamed(quantised)
    assert (back.q_scale(), back.q_zero_point()) == (0.1, 3)
    assert torch.equal(back.int_repr(), quantised.int_repr())
    meta = streamed(torch.empty(3, 4, device="meta"))
    assert (meta.device.type, meta.shape) == ("meta", (3, 4))


@pytest.mark.parametrize("way", WAYS)
def test_parameters_and_leaves_that_require_grad_come_back_as_such(way: Any) -> None:
    parameter = torch.nn.Parameter(torch.rand(300, 400))
    assert_same(parameter, way(parameter))
    frozen = torch.nn.Parameter(torch.rand(3), requires_grad=False)
    assert_same(frozen, way(frozen))
    leaf = way(torch.ones(300, 400, requires_grad=True))
    (leaf * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((300, 400), 3.0))


def test_a_tensor_inside_a_graph_is_refused_as_torch_does() -> None:
    tensor = torch.rand(3, requires_grad=True)
    with pytest.raises(ResultNotSendable, match="detach"):
        pack([tensor * 2])


def test_a_tensor_subclass_keeps_type_and_attributes_and_goes_out_of_band() -> None:
    sent = torch.arange(40_000).view(200, 200).T.as_subclass(Marked)
    sent.label, sent.other = {"a": [1]}, torch.ones(20_000)  # type: ignore[attr-defined]
    header, buffers = pack([sent, sent])
    assert [buffer.nbytes for buffer in buffers] == [320_000, 80_000]
    assert len(header) < 2000
    back, again = unpack(header, [memoryview(bytearray(buffer)) for buffer in buffers])
    assert again is back
    assert type(back) is Marked
    assert back.label == {"a": [1]}
    assert torch.equal(back.other, torch.ones(20_000))
    assert_same(back.as_subclass(torch.Tensor), sent.as_subclass(torch.Tensor))
    assert back.stride() == sent.stride()


def test_a_tensor_subclass_that_reduces_itself_is_left_to_do_so() -> None:
    back = streamed([torch.arange(4).as_subclass(Own), torch.nn.Parameter(torch.ones(20_000))])
    assert back[0] == "mine"
    assert type(back[1]) is torch.nn.Parameter
    assert back[1].requires_grad


@pytest.mark.parametrize("kind", [torch.Tensor, Marked])
def test_views_of_one_storage_share_it_whatever_their_classes(kind: Any) -> None:
    memory = torch.arange(40_000)
    whole, part = streamed([memory.as_subclass(kind), memory[7:]])
    part[0] = -1
    assert whole[7] == -1


class Metal(type):
    """A metaclass: its classes go by their names."""


class Plate(metaclass=Metal):
    def __eq__(self, other: object) -> bool:
        return type(other) is Plate


def test_classes_and_objects_of_metaclasses_go_as_ever() -> None:
    assert streamed([Plate, Plate(), Metal, int, {Plate: Plate()}]) == [
        Plate, Plate(), Metal, int, {Plate: Plate()}
    ]  # fmt: skip


# -- several tensors over one storage --------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [64, 200_000], ids=["small", "large"])
def test_views_of_one_storage_still_share_it_when_they_arrive(size: int, way: Any) -> None:
    whole = torch.arange(size, dtype=torch.float32)
    views = {
        "all": whole,
        "left": whole[: size // 2 + 3],
        "right": whole[size // 2 - 3 :],  # overlaps with left
        "bytes": whole.view(torch.uint8),
        "ints": whole.view(torch.int32)[5:],
        "steps": whole[1::2],
        "square": whole[: size // 8 * 8].view(-1, 8).T,
    }
    back = way(views)
    for name, view in views.items():
        assert_same(view, back[name])
        assert back[name].stride() == view.stride()
        assert back[name]._base is None
    at = size // 2
    back["left"][at] = -8.0
    assert back["all"][at] == -8
    assert back["right"][3] == -8
    assert back["ints"][at - 5] == torch.tensor(-8.0).view(torch.int32)
    assert back["square"].T.reshape(-1)[at] == -8
    back["bytes"].zero_()
    assert not back["all"].any()
    assert whole[at] == at  # the sender's own is another


def test_an_empty_view_of_a_storage_that_others_share_arrives() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    empty, *others = streamed([memory[:0], memory[16:20], memory[17:21]])
    assert empty.shape == (0,)
    assert [t.tolist() for t in others] == [[16, 17, 18, 19], [17, 18, 19, 20]]


def test_views_of_neighbouring_parts_of_a_storage_share_what_they_shared() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    back = streamed([memory[:20], memory[17:20], memory[24:40], memory[30:40]])
    back[1][:], back[3][:] = 99, 98  # the parts begin within the same 16 bytes
    assert back[0].tolist() == [*range(17), 99, 99, 99]
    assert back[2].tolist() == [*range(24, 30), *[98] * 10]


def test_many_overlapping_views_of_one_storage_take_no_longer_each_than_few() -> None:
    def lines(pairs: int) -> int:
        memory = torch.zeros(pairs * 20)
        cuts = [(memory[at : at + 8], memory[at + 4 : at + 12]) for at in range(0, len(memory), 20)]
        return steps(lambda: pack(cuts))

    lines(2)  # imports, and what is looked up once
    assert lines(400) < 11 * lines(40)


def test_one_bfloat16_cut_out_with_a_step_arrives() -> None:
    tensor = torch.arange(4).to(torch.bfloat16)[3::4]
    assert_same(tensor, streamed(tensor))


def test_one_tensor_in_two_places_is_one_tensor_and_one_buffer() -> None:
    tensor = torch.ones(100_000)
    header, buffers = pack({"a": tensor, "b": [tensor]})
    assert [buffer.nbytes for buffer in buffers] == [400_000]
    back = unpack(header, [memoryview(bytearray(buffers[0]))])
    assert back["a"] is back["b"][0]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.integers(1, 6),
            st.integers(1, 6),
            st.integers(0, 7),
            st.integers(1, 3),
            st.sampled_from([torch.uint8, torch.int16, torch.float64, torch.complex128]),
        ),
        min_size=2,
        max_size=6,
    ),
    st.binary(min_size=1, max_size=16),
)
def test_any_views_of_one_storage_come_back_as_such(
    cuts: list[tuple[int, int, int, int, int, torch.dtype]], content: bytes
) -> None:
    memory = torch.tensor(list(content), dtype=torch.uint8).repeat(4096)[:4096]
    views = [
        memory.view(dtype).as_strided(
            (rows, columns), ((columns - 1) * right + 1 + gap, right), offset
        )  # may overlap another, not itself
        for offset, rows, columns, gap, right, dtype in cuts
    ]
    back = streamed(views)
    for view, arrived in zip(views, back, strict=True):
        assert_same(view, arrived)
    for i in range(len(views)):  # what one view writes, the others see: here as there
        for sent_or_arrived in (views, back):
            sent_or_arrived[i][-1, -1] = i + 1
        for view, arrived in zip(views, back, strict=True):
            assert_same(view, arrived)


def test_two_samples_at_the_ends_of_a_large_dataset_do_not_take_the_dataset_along() -> None:
    dataset = torch.zeros(100_000, 100)
    _, buffers = pack([dataset[0], dataset[-1]])
    assert sum(buffer.nbytes for buffer in buffers) < 100_000


# -- numpy -----------------------------------------------------------------------------------------


def native_dtypes() -> st.SearchStrategy[Any]:
    kinds = hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes()
    return kinds.map(lambda dtype: dtype.newbyteorder("="))


@given(
    hnp.arrays(
        # Native byte order: numpy's own pickling forgets that of a big-endian datetime64.
        native_dtypes(),
        hnp.array_shapes(min_dims=0, min_side=0),
    )
)
def test_numpy_arrays_come_back_equal(array: np.ndarray[Any, Any]) -> None:
    back = streamed({"a": array})["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300, 500)], ids=str)
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_large_arrays_of_every_dtype_come_back_equal_and_writable(
    dtype: str, shape: tuple[int, ...], way: Any
) -> None:
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    array = np.resize(np.arange(65, 91, dtype=np.uint8), size)
    if kind.kind == "U":
        array = np.full(int(np.prod(shape)), "çafé", kind)
    elif kind.names:
        array = np.zeros(int(np.prod(shape)), kind)
        array["f0"] = np.arange(len(array))
    elif kind.kind == "b":
        array = (array % 2).astype(bool)
    else:
        array = array.view(kind)
    array = array.reshape(shape)
    back = way((array,))[0]
    assert (type(back), back.dtype, back.shape) == (np.ndarray, kind, shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::-1],
        lambda a: a[:, ::-2],
        lambda a: a.T,
        lambda a: np.asfortranarray(a),
        lambda a: np.broadcast_to(a[0], (400, 500)),
        lambda a: a[10:20, 5:9],
    ],
)
def test_arrays_with_any_strides_come_back_equal(view: Any, way: Any) -> None:
    array = view(np.arange(300.0 * 500).reshape(300, 500))
    back = way(array)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [0, 3, 100_000])
@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a[::-2],
        lambda a: a[None].T,
        lambda a: a[: len(a) // 2 * 2].reshape(2, -1).T,
    ],
    ids=["whole", "reversed", "column", "transposed"],
)
def test_a_read_only_array_arrives_writable_as_a_copy_does(view: Any, size: int, way: Any) -> None:
    array = view(np.frombuffer(np.arange(size).tobytes(), np.int64))
    assert not array.flags.writeable
    back = way([array, {"again": array}])
    np.testing.assert_array_equal(back[0], array)
    assert back[0] is back[1]["again"]
    assert back[0].flags.writeable
    back[0][...] = 7
    np.testing.assert_array_equal(array, view(np.arange(size)))  # that of the sender is its own


def test_the_memory_of_a_read_only_array_lives_as_long_as_its_buffers() -> None:
    header, buffers = pack(np.frombuffer(b"abcd" * 20_000, np.uint8))
    gc.collect()
    assert bytes(buffers[0]) == b"abcd" * 20_000
    assert unpack(header, buffers)[-1] == ord("d")


def test_arrays_of_objects_and_numpy_scalars_come_back_equal() -> None:
    objects = np.array([{"a": 1}, None, "text"], dtype=object)
    assert list(streamed(objects)) == list(objects)
    for scalar in (np.float16(1.5), np.int8(-3), np.datetime64("2020-02-02"), np.str_("x")):
        back = streamed([scalar])[0]
        assert type(back) is type(scalar)
        assert back == scalar


def test_an_array_over_a_tensor_and_that_tensor_both_arrive() -> None:
    tensor = torch.arange(60_000.0)
    back_tensor, back_array = streamed((tensor, tensor.numpy()))
    assert torch.equal(back_tensor, tensor)
    np.testing.assert_array_equal(back_array, tensor.numpy())


# -- what is around them ---------------------------------------------------------------------------


def leaves() -> st.SearchStrategy[Any]:
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    arrays = hnp.arrays(st.sampled_from(["u1", "i8", "f4"]), shapes, elements=st.integers(0, 99))
    return (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=5)
        | st.binary(max_size=5)
        | arrays
        | arrays.map(torch.from_numpy)
        | st.sampled_from([IN_BAND - 1, IN_BAND, OWN]).map(
            lambda n: torch.full((n,), n % 251, dtype=torch.uint8)
        )
        | st.sampled_from([IN_BAND, OWN]).map(lambda n: np.full(n, 7, np.uint8))
    )


def nests() -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(Point, inner, inner)
            | st.builds(Record, inner, st.integers())
            | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(Keyed)
        ),
        max_leaves=8,
    )


@settings(deadline=None, max_examples=150)
@given(st.lists(nests(), min_size=1, max_size=3))
def test_nests_of_anything_come_back_equal_whichever_way(values: list[Any]) -> None:
    pair = SlotWriter(8 << 20), SlotReader(4 << 20)
    kept = []
    for value in values:
        same(value, streamed(value), assert_same)
        kept.append(through_slots(value, pair))
        for sent, arrived in zip(values, kept, strict=False):
            same(sent, arrived, assert_same)
    pair[0].close()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_around_the_arrays_comes_back_too(way: Any) -> None:
    counted = collections.defaultdict(list, a=[torch.ones(100_000)])
    value = {
        "point": Point(torch.ones(20_000), "y"),
        "record": Record(np.zeros((100, 100)), 3),
        "ordered": collections.OrderedDict(a=[1, (2, {3})]),
        "counted": counted,
    }
    back = way(value)
    assert isinstance(back["point"], Point)
    assert torch.equal(back["point"].x, torch.ones(20_000))
    assert type(back["record"]) is Record
    assert back["record"].image.shape == (100, 100)
    assert back["ordered"] == value["ordered"]
    assert type(back["ordered"]) is collections.OrderedDict
    assert back["counted"]["new"] == []
    assert torch.equal(back["counted"]["a"][0], counted["a"][0])


@pytest.mark.parametrize(
    "make", [bytes, bytearray, lambda n: "ç" * n], ids=["bytes", "bytearray", "str"]
)
def test_a_large_header_goes_through_a_slot_and_so_not_through_the_stream(make: Any) -> None:
    value = {"text": make(1_000_000), "x": torch.ones(100_000)}
    writer, reader = SlotWriter(1 << 30), SlotReader(1 << 30)
    parts, fds = encode_done(0, pack(value), writer)
    assert sum(memoryview(part).nbytes for part in parts) < 2000
    for fd in fds:
        os.close(fd)
    back = through_slots(value, (writer, reader))
    assert back["text"] == value["text"]
    assert type(back["text"]) is type(value["text"])
    assert torch.equal(back["x"], value["x"])


@pytest.mark.parametrize("way", WAYS)
def test_what_is_made_on_the_spot_goes_by_cloudpickle_and_keeps_its_buffers_apart(way: Any) -> None:
    class Local:
        def __init__(self, x: Any) -> None:
            self.x = x

    whole = torch.arange(100_000)
    header, _ = pack([Local(whole), Local(whole[3:])])
    assert len(header) < 10_000
    first, second = way([Local(whole), Local(whole[3:])])
    assert torch.equal(second.x, whole[3:])
    first.x[3] = -1
    assert second.x[0] == -1
    add = whole.numpy()[:50_000]
    assert way(lambda x: x + add)(1).tolist() == (add + 1).tolist()


def test_what_can_not_be_pickled_is_named() -> None:
    with pytest.raises(ResultNotSendable, match="generator"):
        pack([(letter for letter in "abc")])


def test_packing_leaves_pickles_own_tables_alone() -> None:
    before = dict(copyreg.dispatch_table)
    pack(torch.ones(3))
    assert copyreg.dispatch_table == before
    assert torch.equal(pickle.loads(pickle.dumps(torch.ones(3))), torch.ones(3))


@pytest.mark.parametrize(
    ("size", "apart"), [(IN_BAND - 1, False), (IN_BAND, True)], ids=["below", "at"]
)
@pytest.mark.parametrize("make", [torch.from_numpy, np.asarray], ids=["tensor", "array"])
def test_small_buffers_stay_in_the_header(make: Any, size: int, apart: bool) -> None:
    _, buffers = pack((make(np.zeros(size, np.uint8)), make(np.zeros(64, np.int64))))
    assert [buffer.nbytes for buffer in buffers] == ([size] if apart else [])


@pytest.mark.parametrize("own", [IN_BAND, OWN], ids=["shared slot", "own slot"])
def test_who_keeps_the_labels_does_not_keep_the_images(own: int) -> None:
    pair = SlotWriter(1 << 30), SlotReader(1 << 30)
    batch = through_slots((torch.zeros(own, dtype=torch.uint8), torch.arange(64)), pair)
    labels = batch[1]
    assert pair[1].returned() == []  # the images live
    del batch
    gc.collect()
    assert len(pair[1].returned()) == 1
    assert torch.equal(labels, torch.arange(64))
    pair[0].close()


# -- the pickler that is kept ----------------------------------------------------------------------


class Nested:
    """Packs something else while it is packed."""

    def __reduce__(self) -> Any:
        return unpack, pack(np.arange(3))


class Failing:
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


def test_nothing_of_a_value_is_left_in_the_pickler_or_in_the_next_value() -> None:
    shared = np.arange(5)
    for value in ([shared, torch.arange(3)], torch.arange(3).expand(2, 3), Failing, None):
        if value is Failing:
            with pytest.raises(ResultNotSendable, match="no"):
                pack([torch.ones(2), Failing()])
        else:
            pack(value)
    for _ in range(2):
        assert pickle.loads(pack([shared, shared])[0])[1].tolist() == [0, 1, 2, 3, 4]
    assert sys.getrefcount(shared) == 2
    assert unpack(*pack([Nested(), "after"]))[0].tolist() == [0, 1, 2]


def test_a_way_that_is_registered_later_counts_from_then_on() -> None:
    pack([Colour.RED])
    copyreg.pickle(Colour, lambda colour: (str, ("registered",)))  # type: ignore[arg-type]
    try:
        assert unpack(*pack([Colour.RED])) == ["registered"]
    finally:
        del copyreg.dispatch_table[Colour]
    assert unpack(*pack([Colour.RED])) == [Colour.RED]


def test_classes_that_are_made_on_the_way_are_not_kept_for_ever() -> None:
    def made() -> Any:
        return type("Made", (), {"__reduce_ex__": lambda self, protocol: (str, ("made",))})

    kind = made()
    first = weakref.ref(kind)
    for _ in range(1100):
        assert unpack(*pack(kind())) == "made"
        kind = made()
    gc.collect()
    assert first() is None


# -- frames ----------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "index",
    [
        3,
        [1, 2],
        [],
        ["a", "b"],
        ("tuple", 1),
        [0, (1, 2)],
        [1, lambda: 5],
        torch.tensor([4, 5]),
        np.arange(20_000),
        None,
    ],
)
def test_every_kind_of_index_reaches_the_worker_with_the_slots_to_use_again(index: Any) -> None:
    parts = [memoryview(bytes(part)) for part in encode_message(Task(9, index), [4, 2])]
    message, returned = decode_message(parts)
    assert isinstance(message, Task)
    assert (message.seq, returned) == (9, (4, 2))
    if isinstance(index, list) and len(index) == 2 and callable(index[1]):
        assert message.index[0] == 1
        assert message.index[1]() == 5
    else:
        same(index, message.index, assert_same)


def test_other_messages_carry_the_returned_slots_too() -> None:
    for message in (Stop(), Begin(2, 77, ())):
        parts = [memoryview(bytes(part)) for part in encode_message(message, [1])]
        assert decode_message(parts) == (message, (1,))
