"""Sources with a state of their own are found again by it, and all others by the number of the item."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.pipeline_model import events, saved
from support.sampler_loaders import pace
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from hybridloader import Pipeline
from hybridloader.errors import StateError
from hybridloader.sampling import (
    DistributedShuffleSampler,
    ShuffleSampler,
    TokenBudgetBatchSampler,
    WeightedSampler,
)

LENGTHS = [1 + k * 7 % 13 for k in range(2000)]
THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 1}


@pytest.fixture(autouse=True)
def _marks_whenever_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, how often a mark that is due is made depends on what it costs."""
    pace(monkeypatch, 1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sampled(sampler: Any) -> Pipeline:
    # A window of a stage is ahead of what is given.
    return Pipeline.from_dataset(range(5000), sampler=sampler).map(abs, prefetch=64, **THREADS)


def batched(sampler: Any) -> Pipeline:
    return Pipeline.from_dataset(range(2000), batch_sampler=sampler, collate_fn=list)


def iterated(source: Any) -> Pipeline:
    return Pipeline.from_iterable(source).map(repr, prefetch=3, **THREADS)


SOURCES: dict[str, Callable[[], Pipeline]] = {
    "shuffle": lambda: sampled(ShuffleSampler(1500, seed=1)).batch(16, collate_fn=list),
    "its own place behind a shuffle": lambda: sampled(ShuffleSampler(1500, seed=1)).shuffle(9),
    "distributed": lambda: sampled(
        DistributedShuffleSampler(4000, seed=2, num_replicas=3, rank=1)
    ).batch(16, collate_fn=list),
    "weighted": lambda: sampled(WeightedSampler(LENGTHS, 1500, seed=3)),
    "random, behind a filter": lambda: sampled(RandomSampler(range(1500))).filter(
        lambda item: item % 9, **THREADS
    ),
    "random, its generator": lambda: sampled(RandomSampler(range(1500), generator=generator(5))),
    "torch's weighted, its generator": lambda: sampled(
        WeightedRandomSampler(LENGTHS, 1500, generator=generator(5))
    ),
    "a list of indices": lambda: sampled(list(range(0, 3000, 2))),
    "budget": lambda: batched(TokenBudgetBatchSampler(LENGTHS, 2**30, max_size=4, seed=1)),
    "budgets": lambda: batched(TokenBudgetBatchSampler(LENGTHS, max_cost=40, seed=1)),
    "batches at random": lambda: batched(BatchSampler(RandomSampler(range(2000)), 3, True)),
    "batches of ours": lambda: batched(BatchSampler(ShuffleSampler(2000, seed=9), 3, False)),
    "state on the object": lambda: iterated(Walk(150)),
    "state on the iterator": lambda: iterated(Steps(150)),
    "state on both, behind a shuffle": lambda: iterated(Both(150)).shuffle(5),
    "of a function": lambda: iterated(lambda: Steps(150)),
    "a list": lambda: iterated(list(range(150))),
    "a dict": lambda: iterated(dict.fromkeys(range(150))),
    "a generator function": lambda: iterated(lambda: (k for k in range(150))),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_go_on_where_they_were(name: str) -> None:
    """In the second of three epochs, in a pipeline that is new each time."""
    make = SOURCES[name]
    for stop in (0, 80):
        with make().epochs(3) as whole:
            list(next(whole))
            run = next(whole)
            events(run, stop)
            state = saved(run)
            rest = [events(run), *map(list, whole)]
        with make().epochs(3, state=state) as again:
            run = next(again)
            # A filter may have left out the first item by now: its mark is then one further.
            moved = {"marks": state["marks"]} if name == "random, behind a filter" else {}
            assert {**saved(run), **moved} == state
            assert [events(run), *map(list, again)] == rest


@pytest.mark.parametrize("count", [64, 1024])
def test_behind_the_last_item_is_not_the_next_epoch(count: int) -> None:
    """Samplers tell the end of an epoch as the beginning of the next."""
    for make in (
        lambda: Pipeline.from_dataset(range(count), sampler=ShuffleSampler(count, seed=1)),
        lambda: Pipeline.from_iterable(Walk(count)),
    ):
        for size in (1, count - 9):  # a last batch that is not full has met the end
            with make().batch(size, collate_fn=list).run(epoch=4) as run:
                events(run, count // size + (size > 1))
                state = saved(run)
            assert not state["finished"]
            assert list(make().batch(size, collate_fn=list).run(state=state)) == []


class Counted(ShuffleSampler):
    """Counts the indices that are drawn from it."""

    drawn = 0

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.drawn += 1
            yield index


def test_a_sampler_is_found_again_without_what_it_gave_before() -> None:
    sampler = Counted(10**8, seed=1)
    pipe = Pipeline.from_dataset(range(10**8), sampler=sampler)
    with pipe.batch(100, collate_fn=list).run() as run:
        events(run, 1000)
        state, expected = saved(run), next(run)
    ((_, mark),) = state["marks"].items()
    assert 0 <= 100_000 - mark["at"] < 1024 + 1
    # As it would be far into an epoch.
    mark["at"] += 5 * 10**7
    mark["value"]["position"] += 5 * 10**7
    state["given"] += 5 * 10**5
    sampler.drawn = 0
    with pipe.batch(100, collate_fn=list).run(state=state) as run:
        order = ShuffleSampler(10**8, seed=1)
        assert next(run) == [order.order(0)[5 * 10**7 + 100_000 + k] for k in range(100)]
        assert len(expected) == 100
    assert sampler.drawn <= 1024 + 100


# -- iterables ---------------------------------------------------------------------------------------


class Walk:
    """A random walk whose state is on the object, in the way of torchdata's protocol. It goes on from
    pass to pass, so a pass can't be made again from its number."""

    def __init__(self, count: int) -> None:
        self.count, self.number, self.random, self.read = count, 0, random.Random(3), 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.number < self.count:
            self.number += 1
            self.read += 1
            yield self.number, self.random.getrandbits(16)
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.read = state["number"], state["read"]
        self.random = random.Random(3)
        for _ in range(self.read):
            self.random.getrandbits(16)


class Steps:
    """Such a source with the state on its iterator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return StepsIterator(self.count)


class Both(Steps):
    """And one on the object that is of no use."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the state is that of the iterator")


class StepsIterator:
    read = 0

    def __init__(self, count: int) -> None:
        self.number, self.count, self.sum = 0, count, 1

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.number == self.count:
            raise StopIteration
        self.number += 1
        type(self).read += 1
        self.sum = self.sum * 5 % 7919
        return self.sum

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.sum = state["number"], state["sum"]


class Drawn:
    """Sampler with a generator, whose iterator has a state, as torchdata's `RandomSampler`."""

    def __init__(self, seed: int) -> None:
        self.generator = generator(seed)

    def __iter__(self) -> Any:
        found = StepsIterator(150)
        found.sum = int(torch.randint(1, 7919, (), generator=self.generator))
        return found


def test_a_sampler_may_have_a_generator_and_a_state() -> None:
    one, other = (Pipeline.from_dataset(range(8000), sampler=Drawn(seed)) for seed in (1, 2))
    with one.run() as run:
        events(run, 7)
        state, rest = saved(run), events(run)
    assert events(other.run(state=state)) == rest


def test_what_tells_its_state_is_not_read_again_from_its_beginning() -> None:
    pipe = Pipeline.from_iterable(Steps(100_000))
    with pipe.run() as run:
        events(run, 60_000)
        state, expected = saved(run), next(run)
    StepsIterator.read = 0
    with pipe.run(state=state) as run:
        assert next(run) == expected
    assert StepsIterator.read <= 65


class Failing(StepsIterator):
    def __next__(self) -> int:
        if super().__next__() % 10 == 4:
            raise ArithmeticError(self.number)
        return self.sum


def test_a_source_with_a_state_goes_on_behind_its_errors() -> None:
    pipe = Pipeline.from_iterable(lambda: Failing(150))
    whole = events(pipe.run())
    for stop in (4, 80, 134):
        with pipe.run() as run:
            assert events(run, stop) == whole[:stop]
            assert events(pipe.run(state=saved(run))) == whole[stop:]


def test_a_state_that_can_not_be_told_troubles_only_who_asks_for_it() -> None:
    class Broken(Steps):
        def state_dict(self) -> dict[str, Any]:
            raise OSError("no disk")

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

        def __iter__(self) -> Any:
            return iter(range(9))

    with Pipeline.from_iterable(Broken(9)).run() as run:
        assert next(run) == 0
        with pytest.raises(StateError, match=r"has no state after item.*no disk"):
            run.state_dict()
        assert list(run) == list(range(1, 9))
        assert run.state_dict()["finished"]


# -- caches ------------------------------------------------------------------------------------------


def cached(path: Any = None) -> Pipeline:
    return Pipeline.from_dataset(range(12), shuffle=True).map(str, **THREADS).cache(path).shuffle(2)


@pytest.mark.parametrize(("epoch", "same"), [(0, True), (1, False)])
def test_a_cache_in_memory_is_filled_again_with_what_it_held(epoch: int, same: bool) -> None:
    for stop in (3, 12):
        pipe = cached()
        with pipe.epochs(3) as epochs:
            for _ in range(epoch):
                list(next(epochs))
            run = next(epochs)
            events(run, stop)
            state = saved(run)
            rest = [list(run), *map(list, epochs)]
        again = pipe if same else cached()
        with again.epochs(3, state=state) as epochs:
            assert [list(run) for run in epochs] == rest


def test_a_cache_that_another_run_had_filled_can_not_be_filled_again() -> None:
    pipe = cached()
    list(pipe.run(seed=1))
    with pipe.run(seed=2) as run:
        next(run)
        state = saved(run)
    with pytest.raises(StateError, match=r"cache: .* seed 1, epoch 0, which another run had made"):
        cached().run(state=state)
    other = cached()
    list(other.run(seed=3))
    with pytest.raises(StateError, match=r"cache: .* seed 1, epoch 0, and this cache holds .* 3"):
        other.run(state=state)


def test_a_cache_in_a_file_is_gone_on_with_by_another_process(tmp_path: Any) -> None:
    path = str(tmp_path / "kept")
    with cached(path).epochs(2) as epochs:
        list(next(epochs))
        run = next(epochs)
        events(run, 5)
        state, rest = saved(run), list(run)
    assert list(cached(path).run(state=state)) == rest
    (tmp_path / "kept").unlink()
    with pytest.raises(StateError, match=r"cache file .*kept.* does not exist"):
        cached(path).run(state=state)


# -- other numbers of ranks --------------------------------------------------------------------------


def of_rank(rank: int, ranks: int, place: dict[str, Any], count: int = 103) -> Pipeline:
    sampler = DistributedShuffleSampler(
        count, 5, num_replicas=ranks, rank=rank, uneven="exact", epoch=0
    )
    pipe = Pipeline.from_dataset(range(count), sampler=sampler).map(abs, **place)
    return pipe.batch(3, collate_fn=list).map(list, **place)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1)])
def test_another_number_of_ranks_goes_on(before: int, after: int) -> None:
    place: dict[str, Any] = {"backend": "threads", "num_workers": 2}
    for steps in (0, 4):
        given, states = list[int](), list[Any]()
        for rank in range(before):
            with of_rank(rank, before, place).run(seed=1) as run:
                given += [item for _, batch in events(run, steps) for item in batch]
                states.append(saved(run))
        for rank in range(after):
            with of_rank(rank, after, place).run(state=states[0]) as run:
                given += [item for _, batch in events(run) for item in batch]
        assert sorted(given) == list(range(103))


def test_a_pass_that_all_ranks_have_ended_goes_on_with_nothing_on_others() -> None:
    with of_rank(0, 2, {}, 12).run(seed=1) as run:
        events(run, 2)
        state = saved(run)
    for rank in range(3):
        assert list(of_rank(rank, 3, {}, 12).run(state=state)) == []
