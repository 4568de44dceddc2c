"""Tensors there and back: dtypes, views, subclasses, and several over one storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packed_values import (
    IN_BAND,
    WAYS,
    Marked,
    Own,
    assert_same,
    is_dense,
    of_random_bytes,
    pack,
    streamed,
    unpack,
)

from hybridloader.engine import ResultPicklingError

# -- tensors and arrays --------------------------------------------------------------------------


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.permute(0, 2, 3, 1),
    lambda t: t[:, ::2],
    lambda t: t[0, 0, 0].expand(50, -1),
    lambda t: t.flip(0),
    lambda t: t[1:2],
    lambda t: torch.complex(t, t).conj(),
    lambda t: torch.complex(t, t + 1).conj().imag,
    lambda t: torch.complex(t, t + 1).real,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1, 24], ids=["small", "large"])
def test_views_come_back_equal_and_dense_ones_keep_their_strides(scale: int, way: Any) -> None:
    for view in VIEWS:
        tensor = view(torch.arange(4 * 3 * 8 * 8 * scale * 1.0).reshape(4, 3, 8, 8 * scale))
        back = way(tensor)
        assert_same(tensor, back)
        assert not back.is_neg()
        if is_dense(tensor) or 0 in tensor.stride():
            assert tensor.stride() == back.stride()
        else:
            assert back.is_contiguous()


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
    with pytest.raises(ResultPicklingError, match="detach"):
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


# -- several tensors over one storage --------------------------------------------------------------


def test_an_empty_view_of_a_storage_that_others_share_arrives() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    empty, *others = streamed([memory[:0], memory[16:20], memory[17:21]])
    assert empty.shape == (0,)
    assert [t.tolist() for t in others] == [[16, 17, 18, 19], [17, 18, 19, 20]]


def test_one_bfloat16_cut_out_with_a_step_arrives() -> None:
    tensor = torch.arange(4).to(torch.bfloat16)[3::4]
    assert_same(tensor, streamed(tensor))


def test_one_tensor_in_two_places_is_one_tensor_and_one_buffer() -> None:
    tensor = torch.ones(100_000)
    header, buffers = pack({"a": tensor, "b": [tensor]})
    assert [buffer.nbytes for buffer in buffers] == [400_000]
    back = unpack(header, [memoryview(bytearray(buffers[0]))])
    assert back["a"] is back["b"][0]


@pytest.mark.parametrize("way", WAYS)
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
@settings(max_examples=50)
def test_any_views_of_one_storage_come_back_as_such(
    way: Any, cuts: list[tuple[int, int, int, int, int, torch.dtype]], content: bytes
) -> None:
    memory = torch.tensor(list(content), dtype=torch.uint8).repeat(IN_BAND)[:IN_BAND]
    views = [
        memory.view(dtype).as_strided(
            (rows, columns), ((columns - 1) * right + 1 + gap, right), offset
        )  # may overlap another, not itself
        for offset, rows, columns, gap, right, dtype in cuts
    ]
    back = way(views)
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


@pytest.mark.parametrize("way", WAYS)
def test_views_of_one_storage_keep_their_alignment(way: Any) -> None:
    whole = torch.arange(1000)
    sent = [whole[10:300], whole[16:], whole[499].expand(80)]
    back = way(sent)
    assert [t.data_ptr() % 64 for t in back] == [t.data_ptr() % 64 for t in sent] == [16, 0, 24]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_expanded_is_sent_once(dtype: torch.dtype, way: Any) -> None:
    whole = of_random_bytes(dtype, (1000, 3))
    for tensor in (
        whole[7].expand(100_000, 3),
        whole[5, 1].expand(64, 64),
        whole[3:4, :2].expand(9, 2),
    ):
        back = way(tensor)
        assert_same(tensor, back)
        assert back.stride() == tensor.stride()
        assert back.untyped_storage().nbytes() < 64 + 3 * dtype.itemsize
