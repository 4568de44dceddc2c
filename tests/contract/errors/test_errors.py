"""Errors of workers as the consumer gets them, and the iterator behind them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.failing_datasets import (
    ALL,
    Samples,
    every_backend,
    explode,
    fail_on_third,
    kinds,
    load,
    notes_of,
    outcomes,
    start,
    text_of,
)
from torch.utils.data import IterableDataset

# -- what a worker raises ------------------------------------------------------------------------


class TwoArguments(Exception):
    """Can't be unpickled by pickle's own way: its constructor wants two arguments."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code, "by keyword")


class CustomNew(Exception):
    """Can't be unpickled either: it is `__new__` that wants more than it passes on."""

    def __new__(cls, code: int, *, reason: str) -> CustomNew:
        made = super().__new__(cls, code)
        made.reason = reason
        return made

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)

    reason: str


class Decorated(Exception):
    """Is unpickled with other arguments than it had, without an error."""

    def __init__(self, text: str) -> None:
        super().__init__(f"<{text}>")


class WithAttribute(Exception):
    detail: Any = None


class RefusesToPickle(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not me")


class RefusesToLoad(Exception):
    def __reduce__(self) -> Any:
        return explode, ("an exception",)


class NotedValueError(ValueError):
    pass


def _with_attribute() -> Exception:
    error = WithAttribute("see detail")
    error.detail = {"path": "x.png", "position": 7}
    return error


def _with_note() -> Exception:
    error = NotedValueError("noted")
    error.__notes__ = ["the user's own note"]  # type: ignore[attr-defined]
    return error


EXCEPTIONS: list[tuple[Callable[[], Exception], dict[str, Any]]] = [
    (lambda: ValueError(), {}),
    (lambda: ValueError("some", 1, None), {}),
    (lambda: TwoArguments(404, "not found"), {"code": 404}),
    (lambda: KeywordOnly(code=5), {}),
    (lambda: CustomNew(404, reason="not found"), {"reason": "not found"}),
    (lambda: Decorated("text"), {}),
    (_with_attribute, {"detail": {"path": "x.png", "position": 7}}),
    (lambda: RefusesToPickle("really", 2), {}),
    (lambda: RefusesToLoad("really", 2), {}),
    (lambda: FileNotFoundError(2, "No such file", "x.png"), {"errno": 2, "filename": "x.png"}),
    (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"), {"object": b"\xff"}),
    (lambda: subprocess.CalledProcessError(3, ["cp"], b"out"), {"returncode": 3, "stdout": b"out"}),
    (_with_note, {}),
]


def raise_exception(index: int) -> Any:
    if index == len(EXCEPTIONS):
        return "fine"
    raise EXCEPTIONS[index][0]()  # the line that fails


@every_backend
def test_exceptions_keep_their_type_arguments_and_attributes(backend: str) -> None:
    loader = load(Samples(raise_exception, len(EXCEPTIONS) + 1), backend, workers=2)
    found = outcomes(iter(loader))
    assert len(found) == len(EXCEPTIONS) + 1
    assert found[-1] == ["fine"]
    for index, (make, attributes) in enumerate(EXCEPTIONS):
        error, wanted = found[index], make()
        assert type(error) is type(wanted)
        assert error.args == wanted.args
        assert str(error) == str(wanted)
        for name, value in attributes.items():
            assert getattr(error, name) == value
        assert "# the line that fails" in text_of(error)
        assert "in raise_exception" in text_of(error)
        assert "'DataLoader'" in notes_of(error)
        assert f"worker {index % 2} " in notes_of(error)
        assert f"[{index}]" in notes_of(error)
    assert "the user's own note" in notes_of(found[len(EXCEPTIONS) - 1])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_exception_of_a_caller_that_does_the_work_is_the_one_raised(workers: int) -> None:
    error = TwoArguments(1, "x")

    def fail(index: int) -> Any:
        raise error

    with pytest.raises(TwoArguments) as caught:
        next(iter(load(Samples(fail), "inline", workers=workers)))
    assert caught.value is error
    assert "[0]" in notes_of(error)


def fail_in_some_way(index: int) -> Any:
    class MadeThere(LookupError):
        pass

    if index == 0:
        raise MadeThere("mine", index)  # a class that the caller can't have
    if index == 1:
        error = WithAttribute("a lock:", threading.Lock())
        error.detail = threading.Lock()
        raise error
    if index == 2:
        first, second = TwoArguments(1, "one"), TwoArguments(2, "two")
        first.other = second  # type: ignore[attr-defined]
        raise first
    try:
        return {}["inner key"]  # the inner line
    except KeyError as error:
        raise ValueError("outer") from error


@every_backend
def test_what_can_not_be_sent_as_it_is_is_told(backend: str) -> None:
    made, lock, both, caused = outcomes(iter(load(Samples(fail_in_some_way, 4), backend)))
    assert (type(made).__name__, made.args) == ("MadeThere", ("mine", 0))
    assert isinstance(made, LookupError)
    assert type(lock) is WithAttribute
    assert lock.args[0] == "a lock:"
    assert "lock" in str(lock.args[1])
    assert "lock" in str(lock.detail)
    assert (type(both), both.code) == (TwoArguments, 1)
    assert "two" in str(both.other)
    assert "# the inner line" in text_of(caused)
    assert "direct cause" in text_of(caused)
    (failed,) = outcomes(iter(load(Samples(fail_on_third, 4), backend, batch_size=4)))
    assert failed.__notes__[0] == "The dataset was asked for index 2."


# -- errors outside of the samples ---------------------------------------------------------------


def _broken_init(worker: int) -> None:
    error = LookupError("no luck", worker)
    error.__notes__ = ["the user's own note"]  # type: ignore[attr-defined]
    raise error  # the init line


class Unopenable(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise FileNotFoundError(2, "No such shard", "shard-0")  # the opening line


def _leak_stop_iteration(index: int) -> int:
    return next(iter([])) if index == 1 else index  # the leaking line


def _broken_collate(samples: list[int]) -> list[int]:
    if 2 in samples:
        raise ArithmeticError("can't collate", samples)  # the collating line
    return samples


def _broken_sampler() -> Iterator[int]:
    yield from (4, 5, 6)
    raise ArithmeticError("no more")  # the sampler's line


@pytest.mark.parametrize(("backend", "workers"), [(None, 0), *((name, 1) for name in ALL)])
def test_an_error_outside_of_the_samples_comes_in_its_place_with_its_line(
    backend: str | None, workers: int
) -> None:
    rows: list[tuple[Any, dict[str, Any], list[Any], str, str]] = [
        (
            Samples(int),
            {"sampler": _broken_sampler()},
            [[4], [5], [6], ArithmeticError],
            "# the sampler's line",
            "",
        ),
        (
            Samples(int),
            {"collate_fn": _broken_collate, "batch_size": 2},
            [[0, 1], ArithmeticError, [4, 5], [6, 7]],
            "# the collating line",
            "[2, 3]",
        ),
        (
            Samples(_leak_stop_iteration, 3),
            {},
            [[0], RuntimeError, [2]],
            "# the leaking line",
            "[1]",
        ),
        (
            Samples(int, 2),
            {"worker_init_fn": _broken_init},
            [LookupError] * 2 if workers else [[0], [1]],  # without workers nobody calls it
            "# the init line",
            "the user's own note\nIn stage 'DataLoader', worker 0 ",
        ),
    ]
    for dataset, options, wanted, line, note in rows:
        found = outcomes(iter(load(dataset, backend, workers=workers, **options)))
        assert kinds(found) == wanted
        for error in found:
            if isinstance(error, Exception):
                assert line in text_of(error)
                assert note in notes_of(error)


@every_backend
def test_an_error_in_the_iter_of_the_dataset_is_raised_by_next(backend: str) -> None:
    iterator = start(load(Unopenable(), backend))
    with pytest.raises(FileNotFoundError) as caught:
        next(iterator)
    assert caught.value.filename == "shard-0"
    assert "# the opening line" in text_of(caught.value)
