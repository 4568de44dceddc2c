"""`on_error` where samples come one behind the other: iterable datasets, and readers of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from support.failing_datasets import outcomes
from torch.utils.data import IterableDataset

from hybridloader import DataLoader, Pipeline, Replace, Retry, Skip, get_worker_info
from hybridloader.errors import ShardLost

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WORKERS = [("inline", 1), ("threads", 2), ("fork", 2)]


class Steps:
    """Numbers up to `length`; `next` raises at those in `bad`, each time once, and goes on behind it."""

    def __init__(self, length: int, bad: Any, step: int = 1, start: int = 0) -> None:
        self.length, self.bad, self.step = length, bad, step
        self.number = start - step

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        self.number += self.step
        if self.number >= self.length:
            raise StopIteration
        if self.number in self.bad:
            raise OSError("page", self.number)
        return self.number


class Stream(IterableDataset[int]):
    """The numbers up to `length`, shared out to workers."""

    def __init__(self, length: int = 20, bad: Any = (2, 3, 11), dies: bool = False) -> None:
        self.length, self.bad, self.dies = length, bad, dies

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        steps = Steps(self.length, self.bad, step, start)
        return (number for number in steps) if self.dies else steps


@pytest.mark.parametrize(("backend", "workers"), WORKERS)
def test_the_next_samples_fill_the_batch(backend: str, workers: int) -> None:
    made = DataLoader(
        Stream(), 4, collate_fn=list, backend=backend, num_workers=workers, on_error="skip"
    )
    found = list(made)
    if workers == 1:
        assert found == [[0, 1, 4, 5], [6, 7, 8, 9], [10, 12, 13, 14], [15, 16, 17, 18], [19]]
        expected = [(2, 0), (3, 0), (11, 0)]
    else:
        assert found == [
            [0, 4, 6, 8],
            [1, 5, 7, 9],
            [10, 12, 14, 16],
            [13, 15, 17, 19],
            [18],
        ]
        expected = [(1, 0), (1, 1), (5, 1)]  # numbers in the shard, and whose it is
    assert [(record.index, record.worker) for record in made.skipped] == expected
    assert {repr(r.error) for r in made.skipped} == {f"OSError('page', {n})" for n in (2, 3, 11)}


Rows = list[tuple[Stream, dict[str, Any], list[Any], list[tuple[int, bool]]]]
GOOD = [n for n in range(20) if n not in (2, 3, 11)]
ROWS: Rows = [
    (
        Stream(),
        {"batch_size": None, "on_error": "skip"},
        GOOD,
        [(2, False), (3, False), (11, False)],
    ),
    (Stream(), {"batch_size": 20, "on_error": Retry(2, 0)}, [GOOD], []),
    (
        Stream(),
        {"batch_size": 20, "on_error": Replace(lambda number, error: -number)},
        [[-n if n in (2, 3, 11) else n for n in range(20)]],
        [(2, True), (3, True), (11, True)],
    ),
    # what fails at the very end
    (Stream(5, (4,)), {"on_error": Retry(3, 0, then="skip")}, [[0, 1], [2, 3]], [(4, False)]),
    *(
        (
            Stream(length, (4, 5)),
            {"drop_last": drop_last, "on_error": "skip"},
            [[0, 1], [2, 3], *[[6]] * (length == 7 and not drop_last)],
            [(4, False), (5, False)],
        )
        for length in (6, 7)
        for drop_last in (False, True)
    ),
]


def test_the_next_sample_or_another_takes_the_place_and_each_is_recorded() -> None:
    for stream, options, wanted, records in ROWS:
        made = DataLoader(stream, **{"batch_size": 2, "collate_fn": listed, **options})
        assert list(made) == wanted
        assert [(record.index, record.replaced) for record in made.skipped] == records
        assert {record.worker for record in made.skipped} <= {None}


def listed(samples: Any) -> Any:
    return samples if isinstance(samples, int) else list(samples)


def test_what_failed_too_often_is_raised_in_its_place() -> None:
    steps = iter(DataLoader(Stream(), 2, collate_fn=list, on_error=Retry(1, 0)))
    assert next(steps) == [0, 1]
    with pytest.raises(OSError, match="3"):
        next(steps)
    assert next(steps) == [4, 5]
    steps = iter(DataLoader(Stream(5, (4,)), 2, collate_fn=list, on_error=Retry(3, 0)))
    assert [next(steps), next(steps)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="4"):
        next(steps)
    assert list(steps) == []


@pytest.mark.parametrize(("backend", "workers"), WORKERS)
def test_a_generator_is_over_and_that_is_never_silent(backend: str, workers: int) -> None:
    made = DataLoader(
        Stream(dies=True, bad=(11,)),
        3,
        collate_fn=list,
        backend=backend,
        num_workers=workers,
        on_error="skip",
    )
    with iter(made) as steps:
        found = outcomes(steps)
    batches = [batch for batch in found if isinstance(batch, list)]
    (error,) = (error for error in found if error not in batches)
    assert type(error) is ShardLost
    assert "rest of the shard is lost" in str(error)
    assert "OSError: [Errno page] 11" in str(error)
    assert "iterator class with __next__" in str(error)
    if workers == 1:
        assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]  # all that came before
    else:
        assert sorted(chain(*batches)) == sorted([*range(0, 20, 2), 1, 3, 5, 7, 9])
    assert made.skipped == ()


def test_a_batch_that_can_not_be_made_is_lost_as_a_whole() -> None:
    def collate(samples: list[int]) -> Any:
        if 5 in samples:
            raise ValueError("odd")
        return samples

    made = DataLoader(
        Stream(16), 4, collate_fn=collate, backend="fork", num_workers=1, on_error=Skip(11)
    )
    assert list(made) == [[6, 7, 8, 9], [10, 12, 13, 14], [15]]
    assert [r.index for r in made.skipped] == [0, 1, 2, 3, 4, 5, 11]


# -- readers of a pipeline -------------------------------------------------------------------------


def shard() -> Steps:
    info = get_worker_info()
    assert info is not None
    return Steps(20, (2, 3, 11), info.num_workers, info.id)


@pytest.mark.parametrize("backend", ["inline", "threads", "fork"])
def test_the_order_is_as_if_what_fails_were_not_there(backend: str) -> None:
    pipe = Pipeline.from_iterable(shard, backend=backend, num_workers=2, on_error="skip")
    with pipe.run() as run:
        assert list(run) == [0, 1, 4, 5, 6, 7, 8, 9, 10, 13, 12, 15, 14, 17, 16, 19, 18]
        assert sorted((r.worker, r.index) for r in run.skipped) == [(0, 1), (1, 1), (1, 5)]
    pipe = Pipeline.from_iterable(
        shard, backend=backend, num_workers=2, on_error=Replace(lambda number, error: -number)
    )
    assert sorted(pipe) == sorted([*(set(range(20)) - {2, 3, 11}), -1, -1, -5])


def test_a_source_that_is_read_where_it_is_asked_for() -> None:
    with Pipeline.from_iterable(lambda: Steps(5, (1,)), on_error="skip").run() as run:
        assert list(run) == [0, 2, 3, 4]
        assert [(r.index, r.worker) for r in run.skipped] == [(1, 0)]


def test_a_reader_that_is_a_generator_says_that_the_rest_is_lost() -> None:
    def read() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    with Pipeline.from_iterable(
        read, backend="threads", num_workers=1, on_error="skip"
    ).run() as run:
        assert next(run) == 1
        with pytest.raises(ShardLost, match="OSError: gone"):
            next(run)
        assert list(run) == []
        assert run.skipped == ()
