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
from support.scripts import Oops, errors_in, items_in, no_deadline, outcome, steps
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
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
    ),
    max_leaves=6,
)


@no_deadline
@given(shapes, st.integers(1, 4))
def test_what_default_collate_made_is_taken_apart(sample: Any, count: int) -> None:
    if isinstance(sample, str):
        sample = (sample, sample)
    given = [sample] * count
    same(outcome(steps.unbatch(columns=True), default_collate(given)), given)


@no_deadline
@given(st.lists(st.one_of(st.integers(), st.text(), st.none(), st.tuples(st.integers()))))
def test_a_list_of_samples_gives_these(samples: list[Any]) -> None:
    batches = outcome(steps.batch(3, collate_fn=list), *samples)
    assert outcome(steps.unbatch(), *batches) == samples
    assert outcome(steps.unbatch(), *map(tuple, batches)) == samples


def test_every_kind_of_batch() -> None:
    x, y = torch.arange(4).reshape(2, 2), np.arange(2.0)
    same(outcome(steps.unbatch(), x), [x[0], x[1]])
    same(outcome(steps.unbatch(), y), [y[0], y[1]])
    same(outcome(steps.unbatch(), {"x": x, "y": y}), [{"x": x[i], "y": y[i]} for i in range(2)])
    counted = outcome(steps.unbatch(), Counter(y=[3, 4]))  # whose own `update` adds
    same(counted, [Counter(y=3), Counter(y=4)])
    same(
        outcome(steps.unbatch(), OrderedDict(y=y, x=x)),
        [OrderedDict(y=y[i], x=x[i]) for i in range(2)],
    )
    same(outcome(steps.unbatch(), Point(x, y)), [Point(x[i], y[i]) for i in range(2)])
    same(outcome(steps.unbatch(), Row(x, {"y": y})), [Row(x[i], {"y": y[i]}) for i in range(2)])
    same(outcome(steps.unbatch(), [x, y]), [(x[i], y[i]) for i in range(2)])
    same(outcome(steps.unbatch(), (x, ["a", "b"])), [(x[0], "a"), (x[1], "b")])
    same(
        outcome(steps.unbatch(), {"x": x, "name": ["a", "b"]}),
        [{"x": x[i], "name": "ab"[i]} for i in range(2)],
    )
    assert outcome(steps.unbatch(), [], torch.zeros(0, 3), {"x": torch.zeros(0)}, ()) == []


def test_what_could_be_either_is_an_error_until_it_is_said() -> None:
    """Lengths never decide: else one batch of some size would be taken for the other thing."""
    for first in (2, 3):
        batch = [torch.ones(first, 4), torch.zeros(3, 4)]
        (error,) = outcome(steps.unbatch(), batch)
        assert isinstance(error, TypeError)
        assert "pass columns=False or columns=True" in str(error)
        same(outcome(steps.unbatch(columns=False), batch), batch)
    same(
        outcome(steps.unbatch(columns=True), [torch.ones(2), torch.zeros(2)]),
        [(torch.tensor(1.0), torch.tensor(0.0))] * 2,
    )
    boxes = [torch.ones(2, 4), torch.zeros(2, 4)]
    (error,) = outcome(steps.unbatch(), {"image": torch.ones(2, 8), "boxes": boxes})
    assert "the batch['boxes'], a list of 2 x Tensor" in str(error)
    same(
        outcome(steps.unbatch(columns=False), {"image": torch.ones(2, 8), "boxes": boxes}),
        [{"image": torch.ones(8), "boxes": box} for box in boxes],
    )


@pytest.mark.parametrize(
    ("batch", "kind", "told"),
    [
        (3, TypeError, "the batch can't be split into samples: 3"),
        ("text", TypeError, "'text' .a str.; there are rules for"),
        (None, TypeError, "give split="),
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


def test_a_function_of_ones_own() -> None:
    def split(batch: Any) -> Any:
        if batch == "bad":
            raise Oops(1)
        if batch == "end":
            raise StopIteration
        yield_late = iter(batch)
        return (character for character in yield_late)

    found = outcome(steps.unbatch(split=split), "ab", "bad", "c", "end", "", "d")
    assert items_in(found) == ["a", "b", "c", "d"]
    assert found[2] == Oops(1)
    assert type(found[4]) is RuntimeError


def test_samples_that_raise_leave_those_behind_them() -> None:
    class Late:
        def __init__(self) -> None:
            self.left = [1, 2, 3]

        def __iter__(self) -> Late:
            return self

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            number = self.left.pop(0)
            if number == 2:
                raise Oops(2)
            return number

    assert outcome(steps.unbatch(split=lambda batch: Late()), "x") == [1, Oops(2), 3]
