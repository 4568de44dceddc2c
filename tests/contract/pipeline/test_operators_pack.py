"""Token sequences in rows; a plain packer, which is the oracle, is in the model of pipelines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.pipeline_model import saved
from support.scripts import Oops, drain, errors_in, items_in, outcome, steps

from hybridloader import Pipeline


def test_documents_are_arrays_tensors_lists_or_dicts_of_them() -> None:
    kinds = [np.array([1, 2], np.uint16), torch.tensor([3]), [4, 5], [], torch.tensor([6])]
    (row,) = outcome(steps.pack(8, padding_value=9), *kinds)
    assert row["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 9, 9]
    (row,) = outcome(steps.pack(4), np.array([1, 2], np.uint16))
    assert row["tokens"].dtype == np.uint16
    assert row["segment_ids"].dtype == row["positions"].dtype == np.int32
    fields = [{"ids": np.array([n, n]), "weight": np.array([0.5, n], np.float32)} for n in (1, 2)]
    (row,) = outcome(steps.pack(4), *fields)
    assert {name: array.tolist() for name, array in row.items()} == {
        "ids": [1, 1, 2, 2],
        "weight": [0.5, 1, 0.5, 2],
        "segment_ids": [1, 1, 2, 2],
        "positions": [0, 1, 0, 1],
    }
    assert row["weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (5, "document 1 must be a sequence of numbers"),
        ([[1]], "document 1 must be a sequence of numbers"),
        ({"tokens": [1], "w": [1, 2]}, "of one length"),
        ({}, "document 1 must be a sequence"),
        (["a"], "document 1 has other than numbers"),
        ({"tokens": [1], "w": [1]}, "document 1 has the fields tokens, w; give all documents the"),
        ([1, 2, 3, 4], "document 1: it has 4 tokens, more than row_length=3; truncate it"),
    ],
)
def test_a_document_that_is_none_is_refused(document: Any, told: str) -> None:
    found = outcome(steps.pack(3, "first_fit"), [1], document, [2])
    (error,) = errors_in(found)
    assert told in str(error)
    assert [row["tokens"].tolist() for row in items_in(found)] == [[1, 2, 0]]


def test_parameters_are_checked_and_what_is_left_may_be_dropped() -> None:
    pipe = Pipeline.from_iterable([[1, 2, 3]])
    for arguments, told in [
        ({"row_length": 0}, "pack: row_length must be at least 1"),
        ({"row_length": 4, "method": "best"}, "method must be 'split' or 'first_fit'"),
        ({"row_length": 4, "rows": 0}, "rows must be at least 1"),
        (
            {"row_length": 4, "method": "first_fit", "drop_last": True},
            "drop_last is for method='split'",
        ),
    ]:
        with pytest.raises(ValueError, match=told):
            pipe.pack(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="padding_value must be a number"):
        pipe.pack(4, padding_value="0")  # type: ignore[arg-type]
    (row,) = pipe.pack(2, drop_last=True)
    assert row["tokens"].tolist() == [1, 2]


class Tokenize:
    """Documents of 1 to 9 tokens; some fail. Counts its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, number: int) -> Any:
        self.calls.append(number)
        if number % 17 == 5:
            raise Oops(number)
        if number % 17 == 8:
            return "no document"
        return np.arange(number * 10, number * 10 + number * 7 % 9 + 1)


def drained(run: Any) -> list[Any]:
    return [
        str(row) if isinstance(row, Exception) else {name: row[name].tolist() for name in row}
        for row in drain(run)
    ]


@pytest.mark.parametrize(("method", "rows", "again"), [("split", 1, 5), ("first_fit", 3, 12)])
def test_a_state_anywhere_resumes_with_few_documents(method: str, rows: int, again: int) -> None:
    """`again` documents at most are tokenized twice: those of the open rows."""

    def make() -> tuple[Any, Tokenize]:
        tokenize = Tokenize()
        return Pipeline.from_dataset(range(60)).map(tokenize).pack(12, method, rows), tokenize

    pipe, tokenize = make()
    whole = drained(iter(pipe))
    assert tokenize.calls == [*range(60)]
    assert len(whole) > 25
    for at in range(len(whole) + 1):
        pipe, tokenize = make()
        run = iter(pipe)
        for _ in range(at):
            try:
                next(run)
            except (Oops, ValueError):
                continue
        state = saved(run)
        seen = len(tokenize.calls)
        run.close()
        pipe, tokenize = make()
        assert drained(pipe.run(state=state)) == whole[at:], at
        if at:
            assert len(tokenize.calls) <= 60 - seen + again, at
