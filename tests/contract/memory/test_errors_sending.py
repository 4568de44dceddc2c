"""Results and errors that can't be sent, and those that are large."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.failing_datasets import (
    MEGABYTE,
    Samples,
    every_backend,
    every_process,
    explode,
    kinds,
    load,
    notes_of,
    outcomes,
    text_of,
)
from torch.utils.data import Dataset

from hybridloader.errors import ResultPicklingError

# -- results that can't be sent ------------------------------------------------------------------


class StaysHere:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


UNSENDABLE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "generator": lambda: (x for x in "abc"),
    "StaysHere": StaysHere,
    "_local": threading.local,
}


@pytest.mark.parametrize(
    ("backend", "batch_size"), [("inline", 1), ("threads", 1), ("fork", 1), ("fork", None)]
)
def test_a_result_that_can_not_be_sent_is_named_and_the_next_one_comes(
    backend: str, batch_size: int | None
) -> None:
    names = list(UNSENDABLE)

    def sample(index: int) -> Any:
        return UNSENDABLE[names[index // 2]]() if index % 2 else index

    dataset = Samples(sample, 2 * len(names))
    loader = load(dataset, backend, batch_size=batch_size, collate_fn=_same)
    found = outcomes(iter(loader))
    assert len(found) == 2 * len(names)
    good: Callable[[int], Any] = (lambda i: [i]) if batch_size else (lambda i: i)
    assert found[::2] == [good(index) for index in range(0, 2 * len(names), 2)]
    for index, error in enumerate(found):
        if index % 2 == 0:
            continue
        if backend in ("inline", "threads"):
            value = error[0] if batch_size else error
            assert type(value) is type(UNSENDABLE[names[index // 2]]())
            continue
        assert isinstance(error, ResultPicklingError)
        assert isinstance(error, TypeError)
        wanted = "list" if batch_size else names[index // 2]
        assert wanted in str(error)
        assert "threads" in str(error)
        assert (f"[{index}]" if batch_size else f"{index}.") in notes_of(error)


def _same(value: Any) -> Any:
    return value


class Bomb:
    def __reduce__(self) -> Any:
        return explode, ("a result",)


@pytest.mark.parametrize("extra", [0, MEGABYTE])
@pytest.mark.parametrize("backend", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_result_that_can_not_be_loaded_is_an_error_of_its_batch_alone(
    backend: str, extra: int
) -> None:
    def sample(index: int) -> Any:
        return (torch.full((extra,), index), Bomb() if index in (1, 2) else index)

    found = outcomes(iter(load(Samples(sample, 6), backend)))
    assert [type(item) for item in found] == [list, ArithmeticError, ArithmeticError, *[list] * 3]
    for index in (0, 3, 4, 5):
        ((tensor, number),) = found[index]
        assert number == index
        assert torch.equal(tensor, torch.full((extra,), index))
    for index in (1, 2):
        assert "a result that can't be loaded" in str(found[index])
        assert f"[{index}]" in notes_of(found[index])
        assert "worker 0 " in notes_of(found[index])


# -- large things --------------------------------------------------------------------------------


def _large(index: int) -> Any:
    if index % 3 == 0:
        return torch.full((3 * MEGABYTE,), index, dtype=torch.int32)
    return bytes([index]) * (11 * MEGABYTE) if index % 3 == 1 else index


@every_backend
def test_results_beyond_ten_megabytes_arrive(backend: str) -> None:
    found = list(load(Samples(_large, 9), backend, batch_size=None, collate_fn=_same, workers=2))
    assert len(found) == 9
    for index, value in enumerate(found):
        if index % 3 == 0:
            assert value.nbytes == 12 * MEGABYTE
            assert value.min() == value.max() == index
        elif index % 3 == 1:
            assert value == bytes([index]) * (11 * MEGABYTE)
        else:
            assert value == index


class Sums(Dataset[int]):
    def __len__(self) -> int:
        return 1 << 30

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [len(indices), sum(indices)]


@every_backend
def test_tasks_of_a_megabyte_of_indices_arrive(backend: str) -> None:
    many = list(range(1 << 20, (1 << 20) + 300_000))
    batches = [[index + shift for index in many] for shift in range(4)]
    loader = load(Sums(), backend, batch_sampler=batches)
    assert list(loader) == [[len(batch), sum(batch)] for batch in batches]


@every_process
def test_indices_that_pickle_alone_can_not_send_arrive_beside_plain_ones(backend: str) -> None:
    class Index:
        label = "made on the spot"

    dataset = Samples(lambda index: getattr(index, "label", index))
    loader = load(dataset, backend, batch_sampler=[[0, Index()], [1]], collate_fn=_same)
    assert list(loader) == [[0, "made on the spot"], [1]]


@every_process
def test_an_exception_that_can_not_be_loaded_is_an_error_of_its_batch_alone(backend: str) -> None:
    class Stubborn(Exception):
        def __new__(cls, *args: Any) -> Any:
            if os.getpid() == home:
                raise ArithmeticError("not in this process")
            return super().__new__(cls, *args)

    home = os.getpid()

    def fail(index: int) -> int:
        if index == 1:
            raise Stubborn("hello")
        return index

    found = outcomes(iter(load(Samples(fail, 3), backend)))
    assert kinds(found) == [[0], RuntimeError, [2]]
    assert "Stubborn" in text_of(found[1])
    assert "hello" in text_of(found[1])
