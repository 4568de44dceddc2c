"""Batches are split into the samples that they were made of."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.comparison import same
from support.scripts import errors_in, items_in, no_deadline, outcome, steps
from torch.utils.data import default_collate

Point = namedtuple("Point", "x y")


@dataclass
class Row:
    x: Any
    y: Any


leaves = st.one_of(
    st.just(torch.ones(2)), st.text(max_size=2), st.builds(lambda: torch.zeros(1, 3))
)
shapes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
        st.tuples(st.just(torch.ones(2)), st.just("a"), inner),
        st.builds(Point, inner, inner),
    ),
    max_leaves=6,
)


@no_deadline
@given(shapes, st.integers(1, 4))
def test_what_default_collate_made_is_taken_apart(sample: Any, count: int) -> None:
    if isinstance(sample, str):
        sample = (torch.ones(2), sample)  # a list of texts alone holds samples
    given = [sample] * count
    same(outcome(steps.unbatch(), default_collate(given)), given)


def test_every_kind_of_batch() -> None:
    x, y = torch.arange(4).reshape(2, 2), np.arange(2.0)
    for batch, make in [
        (x, lambda i: x[i]),
        (y, lambda i: y[i]),
        ({"x": x, "y": y}, lambda i: {"x": x[i], "y": y[i]}),
        (Counter(y=[3, 4]), lambda i: Counter(y=3 + i)),  # whose own `update` adds
        (OrderedDict(y=y, x=x), lambda i: OrderedDict(y=y[i], x=x[i])),
        (Point(x, y), lambda i: Point(x[i], y[i])),
        (Row(x, {"y": y}), lambda i: Row(x[i], {"y": y[i]})),
        ([x, y], lambda i: (x[i], y[i])),
        ((x, ["a", "b"]), lambda i: (x[i], "ab"[i])),
        ({"x": x, "name": ["a", "b"]}, lambda i: {"x": x[i], "name": "ab"[i]}),
    ]:
        same(outcome(steps.unbatch(), batch), [make(0), make(1)])  # type: ignore[no-untyped-call]
    assert outcome(steps.unbatch(), [], torch.zeros(0, 3), {"x": torch.zeros(0)}, ()) == []


def test_what_could_be_either_is_an_error() -> None:
    """Lengths never decide: else one batch of some size would be taken for the other thing."""
    for first in (2, 3):
        batch = [torch.ones(first, 4), torch.zeros(3, 4)]
        (error,) = outcome(steps.unbatch(), batch)
        assert isinstance(error, TypeError)
        assert "use flat_map(list), or flat_map(lambda batch: zip(*batch))" in str(error)
    boxes = [torch.ones(2, 4), torch.zeros(2, 4)]
    (error,) = outcome(steps.unbatch(), {"image": torch.ones(2, 8), "boxes": boxes})
    assert "the batch['boxes'], a list of 2 x Tensor" in str(error)


@pytest.mark.parametrize(
    ("batch", "kind", "told"),
    [
        (3, TypeError, "the batch can't be split into samples: 3"),
        ("text", TypeError, "'text' .a str.; there are rules for"),
        (None, TypeError, "use flat_map, with a function"),
        (deque([1]), TypeError, "can't be split"),
        (torch.tensor(1), TypeError, "can't be split"),
        ({"x": torch.ones(2), "epoch": 3}, TypeError, r"the batch\['epoch'\] can't be split"),
        ([torch.ones(2), None], TypeError, r"the batch\[1\] can't be split"),
        (
            {"x": torch.ones(2), "y": torch.ones(3)},
            ValueError,
            r"columns of different lengths \(the batch\['x'\]: 2, the batch\['y'\]: 3\)",
        ),
    ],
)
def test_what_is_no_batch_is_an_error_and_the_next_one_comes(
    batch: Any, kind: type[Exception], told: str
) -> None:
    found = outcome(steps.unbatch(), [1, 2], batch, [3])
    assert items_in(found) == [1, 2, 3]
    with pytest.raises(kind, match=told):
        raise errors_in(found)[0]
