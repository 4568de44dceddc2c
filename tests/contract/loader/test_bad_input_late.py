"""Bad inputs that only a worker can find, one a row: they cost their batch, and the loader goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.unsendable import WithInner, nested

from hybridloader import DataLoader, WorkerDied
from hybridloader.errors import ResultPicklingError


class Bytes(WithInner):
    """Dataset that calls `inner` with the index."""

    def __getitem__(self, index: int) -> Any:
        return self.inner(index)


class Length(WithInner):
    def __len__(self) -> int:
        if isinstance(self.inner, Exception):
            raise self.inner
        return self.inner  # type: ignore[no-any-return]


class Fails:
    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


def first(batch: list[Any]) -> Any:
    return batch[0]


def raising(error: Exception) -> Callable[[int], Any]:
    def sample(index: int) -> Any:
        raise error

    return sample


LATE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "index too high": ({"sampler": [9]}, IndexError, "out of range"),
    "empty batch": ({"batch_sampler": [[]]}, IndexError, "out of range"),
    "batch is int": ({"batch_sampler": [3]}, TypeError, "'int' object is not iterable"),
}


PROCESSES_ONLY: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "result deep": ({"dataset": Bytes(lambda i: nested(50_000))}, ResultPicklingError, "recursion"),
    "index fails there": ({"sampler": [Fails()]}, ZeroDivisionError, "division by zero"),
    "index among others": ({"batch_sampler": [[0, Fails()]]}, ZeroDivisionError, "division"),
    "index lock": ({"sampler": [threading.Lock()]}, ResultPicklingError, "a task of type"),
    "index deep": ({"sampler": [nested(50_000)]}, ResultPicklingError, "a task of type"),
    "init exits": ({"worker_init_fn": raising(SystemExit(3))}, WorkerDied, "exited with code 3"),  # type: ignore[arg-type]
}


def fails(options: dict[str, Any], kind: type[Exception], says: str, backend: str) -> None:
    """Check one row, in a frame of its own, which the errors of the table keep."""
    given: dict[str, Any] = {"dataset": [1, 2, 3], **options}
    if backend == "fork" and "batch_sampler" not in options:
        given["collate_fn"] = first
    loader: Any = DataLoader(num_workers=1, backend=backend, **given)
    with pytest.raises(kind, match=says) as caught, iter(loader) as iterator:
        next(iterator)
    assert "worker 0" in " ".join(getattr(caught.value, "__notes__", ["worker 0"]))


def test_it_is_an_error_of_its_batch() -> None:
    for row in LATE.values():
        fails(*row, "threads")
    for row in PROCESSES_ONLY.values():
        fails(*row, "fork")


def test_a_length_that_is_none_is_an_error_and_no_empty_epoch() -> None:
    for length, kind in ((-1, ValueError), (LookupError("__len__ is not yet known"), LookupError)):
        data: Any = Length(length)
        with pytest.raises(kind, match="__len__"):
            next(iter(DataLoader(data, shuffle=True, num_workers=1, backend="threads")))
