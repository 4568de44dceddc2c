"""Bad inputs that only a worker can find, one a row: they cost their batch, and the loader goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.unsendable import Endless, WithInner, nested

from hybridloader import DataLoader, WorkerDied
from hybridloader.errors import ResultPicklingError


@pytest.fixture(autouse=True)
def _goes_on() -> Iterator[None]:
    """Check that a good loader works afterwards; conftest.py checks that nothing is left behind."""
    yield
    assert [int(batch) for batch in DataLoader(range(3), num_workers=1, backend="threads")] == [  # type: ignore[arg-type]
        0,
        1,
        2,
    ]


class Bytes(WithInner):
    """Dataset that calls `inner` with the index."""

    def __getitem__(self, index: int) -> Any:
        return self.inner(index)


class Lying(list):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 5


class Length(WithInner):
    def __len__(self) -> int:
        if isinstance(self.inner, Exception):
            raise self.inner
        return self.inner  # type: ignore[no-any-return]


class Fails:
    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


class NeedsThree(Exception):
    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__("three")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def stop(_: Any) -> Any:
    raise StopIteration("enough")


def first(batch: list[Any]) -> Any:
    return batch[0]


def raising(error: Exception) -> Callable[[int], Any]:
    def sample(index: int) -> Any:
        raise error

    return sample


LATE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "index too high": ({"sampler": [9]}, IndexError, "out of range"),
    "index too low": ({"sampler": [-9]}, IndexError, "out of range"),
    "index None": ({"sampler": [None]}, TypeError, "not NoneType"),
    "index text": ({"sampler": ["a"]}, TypeError, "not str"),
    "index float": ({"sampler": [1.0]}, TypeError, "not float"),
    "index nested": ({"sampler": [[0, 1]]}, TypeError, "not list"),
    "index object": ({"sampler": [object()]}, TypeError, "not object"),
    "index huge": ({"sampler": [10**40]}, IndexError, "cannot fit 'int'"),
    "empty batch": ({"batch_sampler": [[]]}, IndexError, "out of range"),
    "batch is int": ({"batch_sampler": [3]}, TypeError, "'int' object is not iterable"),
    "batch None": ({"batch_sampler": [None]}, TypeError, "'NoneType' object is not iterable"),
    "batch of text": ({"batch_sampler": ["ab"]}, TypeError, "not str"),
    "batch too deep": ({"batch_sampler": [[[0]]]}, TypeError, "not list"),
    "collate stops": ({"collate_fn": stop}, RuntimeError, "raised StopIteration"),
    "collate of none": ({"collate_fn": lambda: 3}, TypeError, "takes 0 positional arguments"),
    "sample stops": ({"dataset": Bytes(stop)}, RuntimeError, "raised StopIteration"),
    "sample is a generator": (
        {"dataset": Bytes(lambda i: (x for x in "ab"))},
        TypeError,
        "found <class 'generator'>",
    ),
    "samples that differ": (
        {"dataset": Bytes(lambda i: np.zeros(i)), "batch_size": 2},
        RuntimeError,
        "equal size",
    ),
    "len lies": ({"dataset": Lying([1]), "sampler": [3]}, IndexError, "out of range"),
    "no arguments kept": ({"dataset": Bytes(raising(NeedsThree(1, 2, 3)))}, NeedsThree, "three"),
    "init raises": ({"worker_init_fn": raising(OSError("no GPU"))}, OSError, "no GPU"),
}


@pytest.mark.parametrize(("options", "kind", "says"), LATE.values(), ids=LATE)
def test_it_is_an_error_of_its_batch(
    options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    _fails(options, kind, says, "threads")


def _fails(options: dict[str, Any], kind: type[Exception], says: str, backend: str) -> None:
    given = {"dataset": [1, 2, 3], **options}
    with (
        pytest.raises(kind, match=says) as caught,
        iter(DataLoader(num_workers=1, backend=backend, **given)) as iterator,  # type: ignore[attr-defined]
    ):
        next(iterator)
    assert "worker 0" in " ".join(getattr(caught.value, "__notes__", ["worker 0"]))


PROCESSES_ONLY: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "result endless": ({"dataset": Bytes(lambda i: Endless())}, ResultPicklingError, "'Endless'"),
    "result deep": ({"dataset": Bytes(lambda i: nested(50_000))}, ResultPicklingError, "recursion"),
    "result generator": (
        {"dataset": Bytes(lambda i: (x for x in "ab"))},
        ResultPicklingError,
        "generator",
    ),
    "result fails here": ({"dataset": Bytes(lambda i: Fails())}, ZeroDivisionError, "division"),
    "index fails there": ({"sampler": [Fails()]}, ZeroDivisionError, "division by zero"),
    "index among others": ({"batch_sampler": [[0, Fails()]]}, ZeroDivisionError, "division"),
    "index lock": ({"sampler": [threading.Lock()]}, ResultPicklingError, "a task of type"),
    "index deep": ({"sampler": [nested(50_000)]}, ResultPicklingError, "a task of type"),
    "init exits": ({"worker_init_fn": raising(SystemExit(3))}, WorkerDied, "exited with code 3"),  # type: ignore[arg-type]
    "error of a lock": (
        {"dataset": Bytes(raising(ValueError(threading.Lock())))},
        ValueError,
        "unlocked _thread.lock",
    ),
    "error of three": ({"dataset": Bytes(raising(NeedsThree(1, 2, 3)))}, NeedsThree, "three"),
}


@pytest.mark.parametrize(("options", "kind", "says"), PROCESSES_ONLY.values(), ids=PROCESSES_ONLY)
def test_it_is_an_error_of_its_batch_also_between_processes(
    options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    given: dict[str, Any] = {"dataset": [1, 2, 3], **options}
    if "batch_sampler" not in options:
        given["collate_fn"] = first
    _fails(given, kind, says, "fork")


@pytest.mark.parametrize(
    ("length", "kind", "says"),
    [
        (-1, ValueError, "__len__"),
        (2.5, TypeError, "interpreted as an integer"),
        (1 << 80, OverflowError, "cannot fit 'int'"),
        (LookupError("not yet indexed"), LookupError, "not yet indexed"),
    ],
)
def test_a_length_that_is_none_is_an_error_and_no_empty_epoch(
    length: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        next(iter(DataLoader(Length(length), shuffle=True, num_workers=1, backend="threads")))  # type: ignore[arg-type]
