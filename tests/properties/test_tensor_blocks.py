"""Many small tensors in one value: sent in blocks, and each arrives as if it had been sent alone."""

from __future__ import annotations

import gc
from array import array
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.comparison import same
from support.packed_values import (
    DTYPES,
    FEW,
    IN_BAND,
    OWN,
    SMALL,
    WAYS,
    AsTensor,
    Keyed,
    Marked,
    Point,
    Record,
    assert_same,
    of_random_bytes,
    pack,
    streamed,
    through_slots,
    unpack,
)
from support.slot_pairs import writer_and_reader

from hybridloader.errors import DamagedMessage

FILLING = [torch.full((2,), i) for i in range(FEW)]
"""Tensors that are sent alone, so that those behind them go into blocks."""


def behind(tensors: Any, way: Any = streamed) -> Any:
    return way([*FILLING, tensors])[FEW]


def test_a_thousand_keys_are_a_few_buffers() -> None:
    batch = {f"key {i}": torch.rand(32, 4) for i in range(1000)}
    header, buffers = pack(batch)
    assert [buffer.nbytes for buffer in buffers] == [(1000 - FEW) * 512]
    assert len(header) < 40_000


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_every_dtype_arrive_as_if_each_had_been_sent_alone(way: Any) -> None:
    shapes = [(), (0,), (1,), (3,), (2, 0, 4), (5, 7), (1, 2, 1)]
    sent = [of_random_bytes(dtype, shape) for dtype in DTYPES for shape in shapes for _ in range(3)]
    large = of_random_bytes(torch.float32, (64, 80, 60))
    alone = [way([tensor])[0] for tensor in [*sent[::3], large]]
    together = behind(sent, way)
    for tensor, back in zip([*sent[::3], large, *sent], [*alone, *together], strict=True):
        assert_same(tensor, back)
        assert back.stride() == tensor.stride()
        assert back._base is None
        assert not back.is_shared()
        assert back.storage_offset() == 0
        assert back.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_DTYPES = st.sampled_from(
    [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.complex64]
)


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, form: str) -> torch.Tensor:
    tensor = of_random_bytes(dtype, shape)
    if form == "transposed":
        return tensor.T if tensor.dim() == 2 else tensor
    if form == "stepped":
        return tensor[::2] if tensor.dim() else tensor
    if form == "grad":
        return tensor.requires_grad_(dtype.is_floating_point or dtype.is_complex)
    if form == "conj":
        return tensor.conj()
    if form == "negative":
        return tensor.conj().imag if dtype.is_complex else tensor
    if form == "subclass":
        return tensor.as_subclass(Marked)  # type: ignore[no-any-return]
    return tensor


_FORMS = ["plain"] * 8 + ["transposed", "stepped", "grad", "conj", "negative", "subclass"]


same_values = partial(same, tensors=assert_same)
_BYTES = st.sampled_from([IN_BAND - 1, IN_BAND, OWN])
_ARRAYS = hnp.arrays(
    st.sampled_from(["u1", "i8", "f4"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    elements=st.integers(0, 99),
)
_LEAVES = st.one_of(
    st.builds(_tensor, _SHAPES, _DTYPES, st.sampled_from(_FORMS)),
    st.builds(_tensor, st.tuples(st.integers(1, 50)), _DTYPES, st.just("plain")),
    st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False),
    st.text(max_size=5) | st.binary(max_size=5),
    _ARRAYS,
    _BYTES.map(lambda n: np.full(n, 7, np.uint8)),
    _BYTES.map(lambda n: torch.full((n,), n % 251, dtype=torch.uint8)),
)


def _around(inner: Any) -> Any:
    keyed = st.dictionaries(st.text(max_size=3), inner, max_size=20)
    return st.one_of(
        st.lists(inner, max_size=30),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Record, inner, st.integers()),
        keyed | keyed.map(OrderedDict) | keyed.map(Keyed),
    )


@given(st.lists(st.recursive(_LEAVES, _around, max_leaves=60), min_size=1, max_size=3))
def test_nests_of_anything_come_back_equal_whichever_way(values: list[Any]) -> None:
    """Of the first value the tensors are few; those of the others go into blocks."""
    pair = writer_and_reader(8 << 20, 4 << 20)
    kept = []
    for number, value in enumerate(values):
        same_values(value, behind(value) if number else streamed(value))
        kept.append(behind(value, partial(through_slots, pair=pair)))
        for sent, arrived in zip(values, kept, strict=False):
            same_values(sent, arrived)
    pair[0].close()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("odd", ["meta", "sparse", "nested"])
def test_tensors_that_only_look_like_others_of_their_block_are_sent_alone(odd: str) -> None:
    like = {
        "meta": lambda: torch.empty(2, dtype=torch.int64, device="meta"),
        "sparse": lambda: torch.tensor([0, 7]).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    }[odd]()
    plain = [torch.tensor([i, i]) for i in range(30)]
    shared = [plain[0][:1], plain[0][:2]]
    back = behind([*plain, like, *shared])
    same_values(plain, back[:30])
    assert (back[30].layout, back[30].device) == (like.layout, like.device)
    back[31][0] = -1
    assert back[32][0] == -1 == back[0][0]
    if odd == "sparse":
        assert back[30].to_dense().tolist() == [0, 7]


def test_numbers_that_are_to_arrive_as_tensors_go_into_blocks_without_torch() -> None:
    sent = [AsTensor(array("d", [i, 2 * i]), "float64", (2,)) for i in range(100)]
    sent += [AsTensor(np.full((3, 2), i, np.int16), "int16", (3, 2)) for i in range(100)]
    sent += [AsTensor(bytearray([1] * (i % 3 + 1)), "bool", (i % 3 + 1,)) for i in range(100)]
    back = streamed(sent)
    assert [t.tolist() for t in back[:100]] == [[i, 2 * i] for i in range(100)]
    assert [t.tolist() for t in back[100:200]] == [[[i, i]] * 3 for i in range(100)]
    assert [t.tolist() for t in back[200:]] == [[True] * (i % 3 + 1) for i in range(100)]
    assert {t.dtype for t in back} == {torch.float64, torch.int16, torch.bool}
    assert len(pack(sent)[0]) < 8000


# -- memory ----------------------------------------------------------------------------------------


def pieces(tensors: list[torch.Tensor]) -> list[int]:
    """Sizes of the memory that the tensors lie in together: neighbors in one page count as one."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    joined = [list(spans[0])]
    for start, end in spans[1:]:
        if start == joined[-1][1]:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    return [end - start for start, end in joined]


def test_a_tensor_that_is_kept_keeps_at_most_a_page() -> None:
    for lengths in ([4], [512], [3, 5, 50, 511]):
        sent = [torch.full((lengths[i % len(lengths)],), i) for i in range(2000)]
        back = behind(sent)
        same_values(sent, back)
        assert max(pieces(back)) <= SMALL
        back[0].zero_()
        same_values(sent[1:], back[1:])


def test_no_tensor_of_a_block_keeps_a_slot() -> None:
    pair = writer_and_reader()
    batch = through_slots([torch.rand(64) for _ in range(1000)], pair)
    gc.collect()
    assert len(pair[1].returned()) == 1
    assert len(batch) == 1000
    pair[0].close()


# -- opening ---------------------------------------------------------------------------------------


def test_a_block_with_fewer_tensors_than_the_pickle_names_is_damage() -> None:
    header, buffers = pack([torch.full((3,), i) for i in range(100)])
    wrong = header.replace(b"K\x03\x85", b"K\x06\x85")  # tensors twice as long, so half as many
    assert wrong != header
    with pytest.raises(DamagedMessage):
        unpack(wrong, buffers)
