"""Exceptions whose own methods raise, in a sample: all other samples come, and each is recorded."""

from __future__ import annotations

import asyncio
import operator
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
from support.failing_datasets import Samples
from torch.utils.data import IterableDataset

from hybridloader import DataLoader, Pipeline, Replace, Retry, Skip, TooManyErrors
from hybridloader.errors import IteratorClosed, ResultPicklingError

METHODS = (
    *("__getattr__", "__setattr__", "__str__", "__repr__", "__format__"),
    *("__reduce__", "__reduce_ex__", "__getstate__", "__copy__", "__eq__", "__hash__"),
)


class Refused(Exception):
    """Raised by an exception that is looked at, and as hostile itself."""

    def __str__(self) -> str:
        raise LookupError("no text")

    __repr__ = __str__


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Refused


def _made(name: str, **parts: Any) -> type[Exception]:
    return type(name, (Exception,), {"__module__": __name__, **parts})


class OfSystem(OSError):
    """With a signature of its own, by which it can't be made again."""

    def __init__(self, *args: Any, path: str = "") -> None:
        super().__init__(*args)
        self.path = path


HOSTILE: dict[str, type[Exception]] = {
    **{name: _made(f"Bad_{name.strip('_')}", **{name: _refuse}) for name in METHODS},
    "everything": _made("Hostile", **dict.fromkeys(METHODS, _refuse)),
    "of the system": OfSystem,
}
globals().update({kind.__name__: kind for kind in HOSTILE.values()})

KINDS = [*HOSTILE.values()]
Hostile = HOSTILE["everything"]


class RaisesAtOdd:
    """A function, and a dataset, that raises an exception of another class at each odd number."""

    def __len__(self) -> int:
        return 2 * len(KINDS)

    def __call__(self, item: int) -> int:
        if item % 2:
            raise KINDS[item // 2]("bad", item)
        return item

    __getitem__ = __call__


class Unsendable:
    """A value that can't be pickled, nor be asked why."""

    def __reduce__(self) -> Any:
        raise Refused


BACKENDS = ("inline", "threads", "fork")
WANTED: list[Any] = [x for at, kind in enumerate(KINDS) for x in (2 * at, kind.__name__)]


def outcomes(run: Iterator[Any]) -> list[Any]:
    """Its items, and the names of the types of what it raises."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(run))
        except (StopIteration, IteratorClosed):
            return found
        except Exception as error:
            found.append(type(error).__name__)


def loader(backend: str, batch_size: int | None, **options: Any) -> DataLoader:
    options |= {"batch_size": batch_size, "collate_fn": list if batch_size else operator.pos}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inline has no workers
        workers = 0 if backend == "inline" else 1
        return DataLoader(RaisesAtOdd(), backend=backend, num_workers=workers, **options)


def records(skipped: Any) -> list[Any]:
    return [(record.index, type(record.error).__name__) for record in skipped]


RECORDED = [(2 * at + 1, kind.__name__) for at, kind in enumerate(KINDS)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_is_raised_in_its_place_or_skipped_and_recorded(backend: str) -> None:
    assert outcomes(iter(loader(backend, None))) == WANTED
    for batch_size in (4, None):
        made = loader(backend, batch_size, on_error=Skip(None))
        found = outcomes(iter(made))
        assert (found if batch_size is None else [*chain(*found)]) == WANTED[::2]
        assert records(made.skipped) == RECORDED
        for record in made.skipped:
            assert "raise KINDS[item // 2]" in record.traceback
            assert type(record.error).__name__ in record.traceback
    pipe = Pipeline.from_dataset(range(len(RaisesAtOdd())))
    with pipe.map(RaisesAtOdd(), backend=backend, num_workers=1).run() as run:
        assert outcomes(run) == WANTED
    pipe = pipe.map(RaisesAtOdd(), backend=backend, num_workers=1, on_error=Skip(None))
    with pipe.run() as run:
        assert outcomes(run) == WANTED[::2]
        assert records(run.skipped) == RECORDED


# -- other places that an exception comes from ---------------------------------------------------------


def fail_at_3(item: int) -> int:
    if item == 3:
        raise Hostile("bad", item)
    return item


class Shard(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(Stream())


class Stream(Iterator[int]):
    count = -1

    def __next__(self) -> int:
        self.count += 1
        if self.count == 6:
            raise StopIteration
        return fail_at_3(self.count)


async def fail_slowly_at_3(item: int) -> int:
    await asyncio.sleep(0)
    return fail_at_3(item)


def fail(*_: Any) -> Any:
    raise Hostile("bad")


def unsendable_at_3(index: int) -> Any:
    return Unsendable() if index == 3 else index


def items(**where: Any) -> Pipeline:
    return Pipeline.from_dataset(range(6)).map(fail_at_3, **where)


WHERE: dict[str, Any] = {"backend": "fork", "num_workers": 1}
PLACES: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "iterable dataset": (lambda: DataLoader(Shard(), None, **WHERE), [0, 1, 2, Hostile, 4, 5]),
    "iterable dataset, skipped": (
        lambda: DataLoader(Shard(), None, on_error="skip", **WHERE),
        [0, 1, 2, 4, 5],
    ),
    "sampler": (lambda: DataLoader(range(6), None, sampler=Shard(), **WHERE), [0, 1, 2, Hostile]),
    "collate_fn": (
        lambda: DataLoader(range(6), 3, collate_fn=lambda b: fail_at_3(b[0]), **WHERE),
        [0, Hostile],
    ),
    "worker_init_fn": (
        lambda: DataLoader(range(2), None, worker_init_fn=fail, **WHERE),
        [Hostile, Hostile],
    ),
    "retried": (
        lambda: DataLoader(Samples(fail_at_3, 6), None, on_error=Retry(1, 0, then="skip"), **WHERE),
        [0, 1, 2, 4, 5],
    ),
    "replacement": (
        lambda: DataLoader(Samples(fail_at_3, 6), None, on_error=Replace(fail), **WHERE),
        [0, 1, 2, Hostile, 4, 5],
    ),
    "too many": (
        lambda: DataLoader(Samples(fail_at_3, 6), None, on_error=Skip(0), **WHERE),
        [0, 1, 2, TooManyErrors, 4, 5],
    ),
    "value that can't be sent": (
        lambda: DataLoader(Samples(unsendable_at_3, 6), None, on_error="skip", **WHERE),
        [0, 1, 2, ResultPicklingError, 4, 5],
    ),
    "coroutine": (
        lambda: Pipeline.from_dataset(range(6)).map(fail_slowly_at_3, **WHERE),
        [0, 1, 2, Hostile, 4, 5],
    ),
    "source": (lambda: Pipeline.from_iterable(Stream), [0, 1, 2, Hostile, 4, 5]),
    "reader": (
        lambda: Pipeline.from_iterable(Stream, **WHERE),
        [0, 1, 2, Hostile, 4, 5],
    ),
    "collated here": (
        lambda: items().map(abs).batch(2, collate_fn=fail),
        [Hostile, Hostile, Hostile, Hostile],
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_all_else_comes_wherever_it_is_raised(place: str) -> None:
    make, wanted = PLACES[place]
    names = [
        kind.__name__ if isinstance(kind, type) and kind is not int else kind for kind in wanted
    ]
    assert outcomes(iter(make())) == names
