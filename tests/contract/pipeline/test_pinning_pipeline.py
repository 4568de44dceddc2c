"""`Pipeline.pin_memory` and `Pipeline.to`: on a thread of their own, for the thread that takes."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from support.failing_datasets import outcomes
from support.fake_accelerator import FakeAccelerator
from support.pinning_datasets import Counting, Pinnable, first_of, on_backends

from hybridloader import Pipeline

TO_THREAD = "hybridloader-to"
PIN_THREAD = "hybridloader-pin_memory"


def row(number: int, size: int = 4) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.int32)


def rows(count: int = 12, **where: Any) -> Pipeline:
    return Pipeline.from_dataset(range(count)).map(row, **where)


def batches_of(size: int, count: int = 12) -> list[list[int]]:
    return [list(range(k, min(k + size, count))) for k in range(0, count, size)]


# -- what comes ------------------------------------------------------------------------------------


@on_backends
def test_batches_come_on_the_device_copied_by_one_thread_and_taken_by_the_caller(
    backend: str,
) -> None:
    fake = Counting()
    pipe = rows(backend=backend, num_workers=2).batch(4).to(fake)
    for _ in range(2):
        found = list(pipe)
        assert all(fake.holds(batch) for batch in found)
        fake.run()
        assert [first_of(batch) for batch in found] == batches_of(4)
    assert set(fake.movers) == {TO_THREAD}
    assert set(fake.takers) == {threading.current_thread().name}
    assert TO_THREAD in fake.entries


def test_what_was_pinned_may_go_on_to_other_workers_and_be_repeated() -> None:
    for before in ({}, {"backend": "fork", "num_workers": 1}):  # whose results are opened for it
        fake = Counting()
        pipe = rows(4, **before).pin_memory(fake)
        pipe = pipe.map(torch.neg, backend="fork", num_workers=2, fuse=False).repeat(2)
        assert [int(item[0]) for item in pipe] == [0, -1, -2, -3] * 2
        assert fake.entries == [PIN_THREAD] * 2
        assert len(fake.pinners) == 8


def test_steps_that_the_loop_itself_runs_may_come_behind() -> None:
    fake = Counting(manual=False)
    names: list[str] = []

    def on_device(batch: torch.Tensor) -> torch.Tensor:
        assert fake.holds(batch)
        names.append(threading.current_thread().name)
        return -batch

    pipe = rows(8, backend="threads", num_workers=1).batch(4).to(fake).map(on_device).enumerate()
    assert [(k, first_of(-batch)) for k, batch in pipe] == [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7])]
    assert set(names) == {threading.current_thread().name}


# -- errors and ends -------------------------------------------------------------------------------


def test_what_fails_comes_in_its_place_and_says_where() -> None:
    def made(number: int) -> Pinnable:
        return Pinnable(number, LookupError("not this one", 3) if number == 2 else None)

    run = iter(Pipeline.from_dataset(range(4)).map(made).pin_memory(FakeAccelerator("fake:3")))
    found = outcomes(run)
    assert [getattr(item, "number", None) for item in found] == [0, 1, None, 3]
    assert type(found[2]) is LookupError
    assert found[2].args == ("not this one", 3)
    if sys.version_info >= (3, 11):
        where = (
            "In stage \"pin_memory(device=FakeAccelerator('fake:3'))\", at item 2 of this epoch."
        )
        assert found[2].__notes__ == [where]


# -- what can't be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (lambda pipe: pipe.prefetch(2), r"prefetch\(2\) comes after to\("),
        (lambda pipe: pipe.map(abs, backend="threads", num_workers=1), "on another thread"),
        (lambda pipe: pipe.pin_memory(FakeAccelerator()), r"pin_memory\(.*comes after to\("),
        (lambda pipe: Pipeline.zip(pipe, rows()), "is in a branch that is joined"),
        (lambda pipe: Pipeline.concat(rows(), pipe), "move it after the join"),
    ],
    ids=["prefetch", "stage", "pin", "zip", "concat"],
)
def test_what_another_thread_would_take_is_refused_before_anything_starts(
    behind: Any, words: str
) -> None:
    pipe = behind(rows(backend="fork", num_workers=1).to(FakeAccelerator()))
    with pytest.raises(ValueError, match=words):
        iter(pipe)


def test_parameters_that_can_not_be_are_refused_where_they_are_given() -> None:
    with pytest.raises(ValueError, match=r"^to: batches_ahead must be at least 1, got 0"):
        rows().to("cuda", batches_ahead=0)
    with pytest.raises(TypeError, match=r"^pin_memory: buffer_bytes must be a whole number"):
        rows().pin_memory(buffer_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a device"):
        iter(rows().to("cuad"))
    with pytest.raises(TypeError, match=r"^to: give a device"):
        iter(rows().to(None))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_without_an_accelerator_items_pass_with_a_warning_and_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda' is not available"):
        iter(rows(backend="fork", num_workers=1).to("cuda"))
    with pytest.warns(UserWarning, match="no accelerator that pins memory was found") as caught:
        assert len(list(rows().pin_memory().repeat(2))) == 24
    assert [w.filename for w in caught] == [__file__]


# -- what it is ------------------------------------------------------------------------------------


def test_it_is_a_line_of_the_table_and_of_the_statistics() -> None:
    fake = FakeAccelerator(manual=False)
    pipe = rows(backend="threads", num_workers=1).batch(4).to(fake)
    assert "to(device=FakeAccelerator('fake:0'))  a separate thread" in str(pipe)
    with pipe.run(observe=True) as run:
        found = [next(run) for _ in range(3)]
        assert "batch(4) + to(device=FakeAccelerator('fake:0'))" in str(run.stats())
    assert len(found) == len(pipe) == 3
