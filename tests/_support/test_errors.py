"""Errors of workers as the consumer gets them, and the iterator behind them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
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
from torch.utils.data import IterableDataset, get_worker_info

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
    (lambda: KeyError("a key"), {}),
    (lambda: IndexError(3), {}),
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
    (lambda: json.JSONDecodeError("bad", "{", 1), {"pos": 1, "doc": "{"}),
    (lambda: RuntimeError("StopIteration-like", b"\x00"), {}),
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


def raise_group(index: int) -> Any:
    inner = ExceptionGroup("inner", [TwoArguments(404, "not found"), RefusesToLoad("really", 2)])  # noqa: F821
    first = CustomNew(3, reason="three")
    first.seen = inner  # type: ignore[attr-defined]
    raise ExceptionGroup("outer", [first, inner, KeyError("a key")])  # noqa: F821


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
@every_backend
def test_a_group_keeps_its_type_and_its_members(backend: str) -> None:
    (error,) = outcomes(iter(load(Samples(raise_group, 1), backend, workers=1)))
    assert (type(error).__name__, error.message) == ("ExceptionGroup", "outer")
    first, inner, last = error.exceptions
    assert (type(first), first.args, first.reason) == (CustomNew, (3,), "three")
    assert (type(inner).__name__, inner.message) == ("ExceptionGroup", "inner")
    assert [type(member) for member in inner.exceptions] == [TwoArguments, RefusesToLoad]
    assert inner.exceptions[0].code == 404
    assert inner.exceptions[1].args == ("really", 2)
    assert first.seen.message == "inner"
    assert (type(last), last.args) == (KeyError, ("a key",))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_exception_of_a_caller_that_does_the_work_is_the_one_raised(workers: int) -> None:
    error = TwoArguments(1, "x")

    def fail(index: int) -> Any:
        raise error

    with pytest.raises(TwoArguments) as caught:
        next(iter(load(Samples(fail), "inline", workers=workers)))
    assert caught.value is error
    assert "[0]" in notes_of(error)


class Broken(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise ArithmeticError("no file")
        yield


@every_backend
def test_a_task_of_an_iterable_dataset_is_named_by_its_number_of_samples(backend: str) -> None:
    with pytest.raises(ArithmeticError) as caught:
        next(start(load(Broken(), backend, batch_size=4)))
    assert notes_of(caught.value).endswith("fetching the next 4 samples.")


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
        first.other, second.other = second, first  # type: ignore[attr-defined]
        raise first
    try:
        return {}["inner key"]  # the inner line
    except KeyError as error:
        raise ValueError("outer") from error


@every_backend
def test_what_can_not_be_sent_as_it_is_is_told(backend: str) -> None:
    class Local(Exception):
        pass

    def fail(index: int) -> Any:
        if index == 4:
            raise Local("mine", index)
        return fail_in_some_way(index)

    made, lock, both, caused, local = outcomes(iter(load(Samples(fail, 5), backend)))
    assert (type(made).__name__, made.args) == ("MadeThere", ("mine", 0))
    assert isinstance(made, LookupError)
    assert type(lock) is WithAttribute
    assert lock.args[0] == "a lock:"
    assert "lock" in str(lock.args[1])
    assert "lock" in str(lock.detail)
    assert (type(both), both.code, both.other.code) == (TwoArguments, 1, 2)
    if backend == "fork":
        assert both.other.other == repr(both)
    assert "# the inner line" in text_of(caused)
    assert "direct cause" in text_of(caused)
    assert (type(local), local.args) == (Local, ("mine", 4))
    (failed,) = outcomes(iter(load(Samples(fail_on_third, 4), backend, batch_size=4)))
    assert failed.__notes__[0] == "The dataset was asked for index 2."


@pytest.mark.filterwarnings("ignore:.*forks this process while other threads")  # the main one
@every_backend
def test_errors_of_a_worker_on_another_thread_of_the_caller_arrive_there(backend: str) -> None:
    if backend == "fork" and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    found: list[Any] = []

    def work() -> None:
        found.extend(outcomes(iter(load(Samples(fail_on_third, 3), backend))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kinds(found) == [[0], [1], ArithmeticError]


# -- the iterator goes on ------------------------------------------------------------------------


class Shards(IterableDataset[int]):
    """Each worker's shard fails at its third item; a generator is over then, an object goes on."""

    def __init__(self, generator: bool) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first = 0 if info is None else 10 * info.id
        return self._generate(first) if self.generator else _Fragile(first)

    @staticmethod
    def _generate(first: int) -> Iterator[int]:
        yield from (first, first + 1)
        raise ArithmeticError("third")


class _Fragile(Iterator[int]):
    def __init__(self, first: int) -> None:
        self.first, self.count = first, 0

    def __next__(self) -> int:
        self.count += 1
        if self.count == 3:
            raise ArithmeticError("third")
        if self.count > 5:
            raise StopIteration
        return self.first + self.count


DATASETS: dict[str, Callable[[], Any]] = {
    "map": lambda: Samples(fail_on_third, 9),
    "generator": lambda: Shards(generator=True),
    "iterator": lambda: Shards(generator=False),
}


WORKERS = [(None, 0), ("threads", 2), ("fork", 2)]


@pytest.mark.parametrize(
    ("backend", "workers", "dataset"),
    [
        pytest.param("spawn", 2, "map", marks=pytest.mark.full),
        *((*workers, dataset) for workers in WORKERS for dataset in DATASETS),
    ],
)
def test_after_an_error_the_same_batches_come_as_with_torchs_loader(
    backend: str | None, workers: int, dataset: str
) -> None:
    theirs = torch.utils.data.DataLoader(
        DATASETS[dataset](), batch_size=2, num_workers=workers, collate_fn=list
    )
    wanted = kinds(outcomes(iter(theirs)))
    assert ArithmeticError in wanted
    loader = load(DATASETS[dataset](), backend, workers=workers, batch_size=2)
    assert kinds(outcomes(iter(loader))) == wanted


@every_backend
def test_persistent_workers_go_on_after_errors_in_every_epoch(backend: str) -> None:
    loader = load(Samples(fail_on_third, 5), backend, persistent_workers=True)
    wanted = [[0], [1], ArithmeticError, [3], [4]]
    assert [kinds(outcomes(iter(loader))) for _ in range(2)] == [wanted, wanted]


# -- errors outside of the samples ---------------------------------------------------------------


def _broken_init(worker: int) -> None:
    error = LookupError("no luck", worker)
    error.__notes__ = ["the user's own note"]  # type: ignore[attr-defined]
    raise error  # the init line


@every_backend
def test_an_error_in_worker_init_fn_is_raised_by_next(backend: str) -> None:
    iterator = start(load(Samples(int), backend, worker_init_fn=_broken_init))
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            next(iterator)
        assert caught.value.args == ("no luck", 0)
        assert "# the init line" in text_of(caught.value)
        own, note = caught.value.__notes__  # each time one of its task alone
        assert own == "the user's own note"
        assert "worker 0 " in note


class Unopenable(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise FileNotFoundError(2, "No such shard", "shard-0")  # the opening line


@every_backend
def test_an_error_in_the_iter_of_the_dataset_is_raised_by_next(backend: str) -> None:
    iterator = start(load(Unopenable(), backend))
    with pytest.raises(FileNotFoundError) as caught:
        next(iterator)
    assert caught.value.filename == "shard-0"
    assert "# the opening line" in text_of(caught.value)


@pytest.mark.parametrize(("backend", "workers"), [(None, 0), *((name, 2) for name in ALL)])
def test_an_error_in_the_sampler_comes_after_the_batches_before_it(
    backend: str | None, workers: int
) -> None:
    def sampler() -> Iterator[int]:
        yield from (4, 5, 6)
        raise ArithmeticError("no more")  # the sampler's line

    loader = load(Samples(int), backend, workers=workers, sampler=sampler())
    found = outcomes(iter(loader))
    assert kinds(found) == [[4], [5], [6], ArithmeticError]
    assert "# the sampler's line" in text_of(found[-1])


@every_backend
def test_an_error_in_collate_fn_is_that_batchs_alone(backend: str) -> None:
    def collate(samples: list[int]) -> list[int]:
        if 2 in samples:
            raise ArithmeticError("can't collate", samples)  # the collating line
        return samples

    found = outcomes(iter(load(Samples(int), backend, batch_size=2, collate_fn=collate)))
    assert kinds(found) == [[0, 1], ArithmeticError, [4, 5], [6, 7]]
    assert found[1].args == ("can't collate", [2, 3])
    assert "# the collating line" in text_of(found[1])
    assert "[2, 3]" in notes_of(found[1])


def _leak_stop_iteration(index: int) -> int:
    return next(iter([])) if index == 1 else index  # the leaking line


@pytest.mark.parametrize(("backend", "workers"), [(None, 0), *((name, 1) for name in ALL)])
def test_a_stop_iteration_that_a_map_style_dataset_leaks_does_not_end_the_loop(
    backend: str | None, workers: int
) -> None:
    found = outcomes(iter(load(Samples(_leak_stop_iteration, 3), backend, workers=workers)))
    assert kinds(found) == [[0], RuntimeError, [2]]
    assert "StopIteration" in str(found[1])
    assert "# the leaking line" in text_of(found[1])
    assert "[1]" in notes_of(found[1])
