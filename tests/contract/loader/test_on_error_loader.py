"""`on_error` of a `DataLoader` over a map-style dataset: failures, batches and records."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison import same
from support.failing_datasets import outcomes
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset

from hybridloader import DataLoader, Replace, Retry, Skip, TooManyErrors
from hybridloader.errors import ResultPicklingError


class Samples(Dataset[Any]):
    """`length` samples, of which those in `bad` raise."""

    def __init__(self, length: int = 40, bad: Any = (3, 10, 17, 24, 31, 38)) -> None:
        self.length, self.bad = length, frozenset(bad)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise ValueError("bad", index)
        return torch.full((3,), index)


class Together(Samples):
    """Dataset read a batch at a time; a batch fails if one of its samples does."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [super(Together, self).__getitem__(index) for index in indices]


class OnlyTogether(Dataset[Any]):
    """No single samples at all: torch's base class has a `__getitem__` that only raises."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [Samples()[index] for index in indices]

    def __len__(self) -> int:
        return 40


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PLACES = [
    ("inline", 0),
    ("threads", 5),
    ("shared-memory", 2),
]


def loader(dataset: Any, *args: Any, **more: Any) -> DataLoader:
    """Make a loader without the warning of a backend without workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DataLoader(dataset, *args, **more)


def run(made: DataLoader) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(made)


def numbers(batches: list[Any]) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in batches]


BAD = Samples().bad


def expected(batches: list[list[int]], bad: Any) -> list[list[int]]:
    """Return the batches of a loader that skips: what is good in each, if anything is."""
    left = ([index for index in batch if index not in bad] for batch in batches)
    return [good for good in left if good]


def fours(length: int = 40) -> list[list[int]]:
    return [[*range(k, min(k + 4, length))] for k in range(0, length, 4)]


EXPECTED = expected(fours(), BAD)


@pytest.mark.parametrize(
    ("make", "backend", "workers"),
    [
        (Samples, "inline", 0),
        (Samples, "threads", 5),
        (Samples, "shared-memory", 2),
        pytest.param(Samples, "spawn", 1, marks=pytest.mark.full),
        (Together, "fork", 2),
        (OnlyTogether, "inline", 0),
        (lambda: Subset(Samples(), range(40)), "inline", 0),
    ],
)
def test_batches_lack_the_bad_samples_alone_on_every_backend(
    make: Callable[[], Any], backend: str, workers: int
) -> None:
    made = loader(make(), 4, backend=backend, num_workers=workers, on_error="skip")
    assert made.skipped == ()
    assert numbers(run(made)) == EXPECTED
    assert [record.index for record in made.skipped] == sorted(BAD)
    for record in made.skipped:
        assert type(record.error) is ValueError
        assert record.error.args == ("bad", record.index)
        assert "in __getitem__" in record.traceback
        assert (record.stage, record.epoch, record.replaced) == ("DataLoader", 0, False)
        assert record.worker == (record.index // 4 % workers if workers else None)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 63)), max_size=12),
    st.sets(st.integers(0, 11)),
)
def test_batches_of_any_sizes_with_anything_bad_are_those_of_the_model(
    sizes: list[tuple[int, int]], all_bad: set[int]
) -> None:
    batches, bad, at = list[list[int]](), set[int](), 0
    for number, (size, mask) in enumerate(sizes):
        batches.append([*range(at, at + size)])
        bad |= {at + k for k in range(size) if mask >> k & 1 or number in all_bad}
        at += size
    made = DataLoader(Samples(at, bad), batch_sampler=batches, on_error=Skip(None))
    assert numbers(list(made)) == expected(batches, bad)
    assert [record.index for record in made.skipped] == sorted(bad)
    for drop_last in (False, True):
        plain = DataLoader(Samples(at, bad), 4, drop_last=drop_last, on_error=Skip(None))
        whole = fours(at - at % 4 if drop_last else at)
        assert numbers(list(plain)) == expected(whole, bad)


def test_several_threads_per_worker_change_nothing() -> None:
    made = loader(
        Samples(), 4, backend="threads", num_workers=2, threads_per_worker=3, on_error="skip"
    )
    assert numbers(run(made)) == EXPECTED
    raising = DataLoader(Samples(), 4, threads_per_worker=3, on_error=Retry(1, 0))
    with pytest.raises(ValueError, match="bad") as caught:
        list(raising)
    assert "sample 3" in caught.value.__notes__


@pytest.mark.parametrize(
    ("make", "backend", "workers"),
    [(Samples, "inline", 0), (Together, "threads", 5), (Samples, "shared-memory", 2)],
)
def test_others_take_the_places_of_what_fails(
    make: Callable[[], Any], backend: str, workers: int
) -> None:
    made = loader(
        make(), 4, backend=backend, num_workers=workers, on_error=Replace(negative, max_failures=6)
    )
    expected = [[-n if n in Samples().bad else n for n in range(k, k + 4)] for k in range(0, 40, 4)]
    assert numbers(run(made)) == expected
    assert [(r.index, r.replaced) for r in made.skipped] == [(n, True) for n in range(3, 40, 7)]


def negative(index: int, error: Exception) -> torch.Tensor:
    assert error.args == ("bad", index)
    return torch.full((3,), -index)


class Flaky(Samples):
    """Dataset that fails `times` times before each sample comes."""

    def __init__(self, times: int) -> None:
        super().__init__(8, ())
        self.times, self.attempted = times, [0] * 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.attempted[index] += 1
        if self.attempted[index] <= self.times:
            raise OSError("again", index)
        return super().__getitem__(index)


@pytest.mark.parametrize(("backend", "workers"), PLACES)
def test_what_passes_is_not_seen_if_it_is_tried_again(backend: str, workers: int) -> None:
    def made(times: int, **then: Any) -> DataLoader:
        policy = Retry(2, 0, OSError, **then)
        return loader(Flaky(times), 4, backend=backend, num_workers=workers, on_error=policy)

    good = made(2)
    assert numbers(run(good)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert good.skipped == ()
    with pytest.raises(OSError, match="again"):
        list(made(3))
    skipping = made(3, then=Skip(8))
    assert run(skipping) == []
    assert len(skipping.skipped) == 8

    # That no thread is left is looked at after every test.


def test_too_much_is_raised_at_the_same_place_everywhere() -> None:
    found = []
    for backend, workers in PLACES:
        steps = iter(loader(Samples(), 4, backend=backend, num_workers=workers, on_error=Skip(2)))
        batches = outcomes(steps)
        steps.close()
        errors = [(at, e) for at, e in enumerate(batches) if isinstance(e, TooManyErrors)]
        assert numbers([b for b in batches if isinstance(b, torch.Tensor)]) == EXPECTED
        assert [at for at, _ in errors] == [4, 7, 9, 12]
        first = errors[0][1]
        assert repr(first.__cause__) == "ValueError('bad', 17)"
        found.append([str(error) for _, error in errors])
    assert found == [found[0]] * len(PLACES)
    assert "3 of 20 samples failed" in found[0][0]
    assert found[0][0].splitlines()[2].split() == ["3", "ValueError('bad',", "3)"]


# -- batches that can't be made, or sent -------------------------------------------------------------


class Ragged(Samples):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3 + (index == 5))


@pytest.mark.parametrize(("backend", "workers"), PLACES)
def test_a_batch_that_does_not_fit_together_is_skipped_and_listed(
    backend: str, workers: int
) -> None:
    made = loader(Ragged(12), 4, backend=backend, num_workers=workers, on_error=Skip(4))
    assert len(run(made)) == 2
    assert [record.index for record in made.skipped] == [4, 5, 6, 7]
    assert {type(record.error) for record in made.skipped} == {RuntimeError}
    raising = loader(
        Ragged(12), 4, backend=backend, num_workers=workers, on_error=Replace(negative)
    )
    with pytest.raises(RuntimeError, match="stack expects"):
        list(raising)


class Locks(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            raise ValueError("bad", index)
        return threading.Lock() if index in (2, 5) else index


def test_what_can_not_be_sent_is_raised_whatever_the_policy() -> None:
    made = DataLoader(Locks(), None, on_error="skip", backend="fork", num_workers=1)
    batches, found = iter(made), list[Any]()
    for wanted in ([0], [3, 4], [6, 7]):
        found.append([next(batches) for _ in wanted])
        if wanted != [6, 7]:
            with pytest.raises(ResultPicklingError, match="lock"):
                next(batches)
    assert found == [[0], [3, 4], [6, 7]]
    assert list(batches) == []
    assert [record.index for record in made.skipped] == [1]


# -- nothing fails ---------------------------------------------------------------------------------


def test_if_nothing_fails_batches_are_those_of_torch() -> None:
    x, y = torch.arange(60.0).reshape(20, 3), torch.arange(20)
    tensors = TensorDataset(x, y)
    for dataset, policy, backend, workers in [
        (tensors, "skip", "inline", 0),
        (Subset(tensors, list(range(19, 3, -1))), "skip", "inline", 0),
        (StackDataset(a=tensors, b=Samples(20, ())), "skip", "inline", 0),
        (Together(20, ()), "skip", "inline", 0),
        (Together(20, ()), Retry(2), "threads", 2),
        (Samples(20, ()), Replace(negative), "threads", 2),
    ]:
        for more in ({"batch_size": 3, "shuffle": True}, {"batch_size": None}):
            torch.manual_seed(5)
            wanted = list(torch.utils.data.DataLoader(dataset, **more))
            torch.manual_seed(5)
            options = {"backend": backend, "num_workers": workers, "on_error": policy}
            same(run(loader(dataset, **options, **more)), wanted)


# -- the loader as frameworks see it -----------------------------------------------------------------


def test_each_iterator_and_each_pass_has_its_own_records() -> None:
    made = DataLoader(Samples(8, [1]), 4, on_error="skip")
    first, second = iter(made), iter(made)
    list(first)
    assert [r.epoch for r in first.skipped] == [0]
    assert second.skipped == made.skipped == ()
    list(second)
    assert [r.epoch for r in made.skipped] == [1]


def test_closing_ends_a_wait_in_a_worker() -> None:
    attempted = threading.Event()

    class Never(Samples):
        def __getitem__(self, index: int) -> Any:
            attempted.set()
            raise OSError

    made = loader(Never(), 4, backend="threads", num_workers=1, on_error=Retry(9, 60))
    with iter(made):
        attempted.wait()


def test_a_share_of_a_run_counts_what_was_tried_in_this_pass() -> None:
    every = DataLoader(Samples(4000, range(0, 4000, 99)), 100, on_error=Skip(0.01))
    with pytest.raises(TooManyErrors, match="11 of 1000 samples failed"):
        list(every)
    late = DataLoader(Samples(4000, range(2000, 4000, 50)), 100, on_error=Skip(0.01))
    assert sum(map(len, late)) == 3960
    for _ in range(2):  # each pass has a budget of its own
        assert len(late.skipped) == 40
        assert sum(map(len, late)) == 3960
