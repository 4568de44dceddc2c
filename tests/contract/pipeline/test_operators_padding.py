"""Samples of different lengths: torch's `pad_sequence` and `default_collate` are the oracles."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.comparison import same
from support.scripts import no_deadline, outcome, steps
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from hybridloader.pipeline import Pad

Point = namedtuple("Point", "x y")

dtypes = st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.float64, torch.bfloat16])
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def tensor(length: int, width: int | None, dtype: torch.dtype) -> torch.Tensor:
    shape = (length,) if width is None else (length, width)
    return torch.arange(1, 1 + length * (1 if width is None else width)).reshape(shape).to(dtype)


@no_deadline
@given(lengths, st.sampled_from([None, 1, 3]), dtypes, st.sampled_from([0, 1, 7]))
def test_one_dimension_is_padded_as_by_torch(
    lengths: list[int], width: int | None, dtype: torch.dtype, value: int
) -> None:
    samples = [tensor(length, width, dtype) for length in lengths]
    theirs = pad_sequence(samples, batch_first=True, padding_value=value)
    same(Pad(value)(samples), theirs)
    if dtype is not torch.bfloat16:
        same(Pad(value)([sample.numpy() for sample in samples]), theirs)
    batch, told = Pad(value, lengths=True)(samples)
    same(batch, theirs)
    same(told, torch.tensor(lengths))


def test_arrays_that_torch_can_not_share_are_copied_and_kinds_are_promoted() -> None:
    arrays = [np.arange(3)[::-1], np.arange(2, dtype=np.int32)]
    arrays[1].flags.writeable = False
    same(Pad()(arrays), torch.tensor([[2, 1, 0], [0, 1, 0]]))
    kinds = [torch.ones(2, requires_grad=True), torch.zeros(2, dtype=torch.float64)]
    Pad()(kinds).sum().backward()
    same(Pad(9)(kinds).detach(), torch.tensor([[1.0, 1], [0, 0]], dtype=torch.float64))
    same(kinds[0].grad, torch.ones(2))


def alike(number: int) -> dict[str, Any]:
    return {
        "tensor": torch.full((2, 3), float(number)),
        "array": np.full(3, number, np.int16),
        "number": number,
        "float": number / 2,
        "name": f"n{number}",
        "flag": number % 2 == 0,
        "scalar": np.float32(number),
        "none of these": torch.tensor(number),
        "pair": (number, torch.full((2,), number)),
        "point": Point(number, torch.zeros(1)),
        "ordered": OrderedDict(a=number),
    }


def test_samples_that_are_alike_are_collated_as_by_torch() -> None:
    samples = [alike(number) for number in range(3)]
    same(Pad()(samples), default_collate(samples))
    same(
        Pad()([OrderedDict(sample) for sample in samples]),
        default_collate([OrderedDict(s) for s in samples]),
    )


def test_fields_are_padded_each_by_itself_and_lengths_have_their_structure() -> None:
    samples = [
        {"tokens": [1, 2, 3], "label": 1, "span": (torch.ones(1), "a"), "point": Point([1], 2)},
        {"tokens": [4], "label": 0, "span": (torch.ones(2), "b"), "point": Point([1, 2], 3)},
    ]
    batch, told = Pad(lengths=True)(samples)
    same(
        batch,
        {
            "tokens": torch.tensor([[1, 2, 3], [4, 0, 0]]),
            "label": torch.tensor([1, 0]),
            "span": [torch.tensor([[1.0, 0.0], [1.0, 1.0]]), ["a", "b"]],
            "point": Point(torch.tensor([[1, 0], [1, 2]]), torch.tensor([2, 3])),
        },
    )
    assert told["label"] is None
    assert told["tokens"].tolist() == [3, 1]
    assert told["span"][0].tolist() == [1, 2]
    assert told["span"][1] is None
    assert told["point"].x.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([[1, 2], []], torch.tensor([[1, 2], [0, 0]])),
        ([[], []], torch.zeros(2, 0)),
        ([[1], [2.5, 3]], torch.tensor([[1.0, 0.0], [2.5, 3.0]])),
        ([[[1, 2], [3, 4]], [[5]]], torch.tensor([[[1, 2], [3, 4]], [[5, 0], [0, 0]]])),
        ([[[1, 2]], []], torch.tensor([[[1, 2]], [[0, 0]]])),
        ([[[1, 2]], [[]]], torch.tensor([[[1, 2]], [[0, 0]]])),
        ([[True], [False, True]], torch.tensor([[True, False], [False, True]])),
        ([[np.int64(1)], [2, 3]], torch.tensor([[1, 0], [2, 3]])),
        ([torch.tensor([1]), np.array([2, 3]), [4]], torch.tensor([[1, 0], [2, 3], [4, 0]])),
        ([torch.tensor(1), torch.tensor(2)], torch.tensor([1, 2])),
    ],
)
def test_lists_of_numbers_are_sequences(samples: Any, expected: torch.Tensor) -> None:
    same(Pad()(samples), expected)


@pytest.mark.parametrize(
    ("value", "dtype", "told"),
    [
        (0.5, torch.int64, "samples are of torch.int64, which can't hold padding_value=0.5"),
        (-1, torch.uint8, "can't hold padding_value=-1"),
        (300, torch.uint8, "can't hold padding_value=300"),
        (float("nan"), torch.int32, "can't hold padding_value=nan"),
        (float("inf"), torch.int32, "can't hold padding_value=inf"),
        (2, torch.bool, "torch.bool, which can't hold"),
    ],
)
def test_no_padding_value_is_bent(value: float, dtype: torch.dtype, told: str) -> None:
    samples = [torch.ones(1, dtype=dtype), torch.ones(2, dtype=dtype)]
    with pytest.raises(ValueError, match=told):
        Pad(value)(samples)
    same(Pad(value)(samples[:1]), torch.stack(samples[:1]))  # where nothing is padded

    for found in (float("nan"), -1, 0.25):
        assert str(Pad(found)([torch.ones(1), torch.ones(2)])[0, 1].item()) == str(float(found))


def test_samples_that_do_not_fit_are_an_error_that_names_the_field() -> None:
    for samples, told in [
        ([{"x": torch.ones(2)}, {"x": torch.ones(2, 2)}], r"samples\['x'\] differ in their number"),
        ([{"x": 1}, {"y": 1}], "samples differ in structure"),
        ([{"x": 1}, 1], "samples differ in structure"),
        ([(1, (2, 3)), (1, (2,))], r"samples\[1\] differ in structure"),
        ([("a",), "a"], "samples differ in structure"),
    ]:
        with pytest.raises(ValueError, match=told):
            Pad()(samples)
    bad, good = outcome(steps.batch(2, collate_fn=Pad()), [1], {"x": 1}, [2], [3, 4])
    assert isinstance(bad, (ValueError, TypeError))  # of its batch alone
    same(good, torch.tensor([[2, 0], [3, 4]]))
