"""Errors in the places of items, and epochs, when a run goes on from a state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.random_pipelines import changed, events, saved
from torch.utils.data import RandomSampler, Sampler

from hybridloader import Pipeline, WorkerTimeout
from hybridloader.testing import Gate

# -- errors in the places of items -------------------------------------------------------------------


def fails(item: int) -> int:
    if item % 5 == 2:
        raise ArithmeticError(f"no {item}")
    return item


def test_what_is_left_out_is_left_out_again() -> None:
    pipe = Pipeline.from_dataset(range(40))
    pipe = pipe.map(fails, on_error="skip", backend="threads", num_workers=2)
    pipe = pipe.batch(3, collate_fn=list)
    with pipe.run() as run:
        events(run, 5)
        state, rest = saved(run), events(run)
        skipped = [failed.index for failed in run.skipped]
        assert len(skipped) == 8
    with pipe.run(state=state) as run:
        assert events(run) == rest
        last = 18  # item of the first five batches
        assert [failed.index for failed in run.skipped] == [k for k in skipped if k > last]


def test_a_timeout_is_not_in_the_place_of_an_item() -> None:
    gate = Gate()

    def wait(item: int) -> int:
        if item == 1:
            gate.arrive()
        return item

    pipe = Pipeline.from_dataset(range(4))

    def rest(run: Iterator[int], most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most:
            with suppress(WorkerTimeout):  # on a busy computer
                found.append(next(run))
        return found

    with pipe.map(wait, backend="threads", num_workers=1, timeout=0.05).run() as run:
        assert rest(run, 1) == [0]
        with pytest.raises(WorkerTimeout):
            next(run)
        assert (saved(run)["given"], saved(run)["raised"]) == (1, 0)
        gate.open()
        assert rest(run, 3) == [1, 2, 3]


# -- epochs ------------------------------------------------------------------------------------------


def shuffled() -> Pipeline:
    pipe = Pipeline.from_dataset(range(10), shuffle=True).shuffle(3)
    return pipe.map(changed, backend="threads", num_workers=2).batch(2, collate_fn=list)


def test_a_state_from_the_end_of_an_epoch_begins_the_next_one_once() -> None:
    with shuffled().epochs(3) as epochs:
        first, *others = [(list(epoch), saved(epoch)) for epoch in epochs]
    with shuffled().epochs(3, state=first[1]) as again:
        assert [(list(epoch), saved(epoch)) for epoch in again] == others
    with shuffled().epochs(3, state=others[-1][1]) as again:
        assert list(again) == []
    with shuffled().epochs(state=others[-1][1]) as endless:
        assert next(endless).epoch == 3


# -- what goes on from one epoch to the next ---------------------------------------------------------


def drawn_by(seed: int) -> Pipeline:
    order = RandomSampler(range(30), generator=torch.Generator().manual_seed(seed))
    return Pipeline.from_dataset(range(30), sampler=order)


@pytest.mark.parametrize("branches", [False, True])
def test_the_generator_of_a_sampler_goes_on_behind_a_whole_epoch(branches: bool) -> None:
    def make(seed: int) -> Pipeline:
        one = drawn_by(seed).map(int, backend="threads", num_workers=2)
        return Pipeline.zip(one, Pipeline.from_dataset(range(30))) if branches else one

    whole = [list(run) for run in make(1).epochs(3)]
    with make(1).epochs(1) as epochs:
        run = next(epochs)
        assert list(run) == whole[0]
        state = saved(run)
    with make(2).epochs(3, state=state) as epochs:
        assert [list(run) for run in epochs] == whole[1:]


class OwnGenerator(Sampler[int]):
    """Sampler with a generator, whose iterator has a state, as torchdata's `RandomSampler`."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        return OwnOrder(torch.randperm(30, generator=self.generator).tolist())


class OwnOrder(Iterator[int]):
    def __init__(self, order: list[int]) -> None:
        self.order, self.at = order, 0

    def __next__(self) -> int:
        if self.at == len(self.order):
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


@pytest.mark.parametrize("stop", [7, 30])
def test_a_sampler_may_have_a_generator_and_a_state(stop: int) -> None:
    with Pipeline.from_dataset(range(30), sampler=OwnGenerator(1)).run() as run:
        events(run, stop)
        state, rest = saved(run), events(run)
    with Pipeline.from_dataset(range(30), sampler=OwnGenerator(2)).run(state=state) as other:
        assert events(other) == rest


class Growing(Sampler[int]):
    """Sampler whose length is that of the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10 * (self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


@pytest.mark.parametrize("stop", [15, None])
def test_a_sampler_may_be_longer_in_a_later_epoch(stop: int | None) -> None:
    def make() -> Pipeline:
        return Pipeline.from_dataset(range(100), sampler=Growing())

    with make().epochs(3) as epochs:
        list(next(epochs))
        run = next(epochs)
        events(run) if stop is None else events(run, stop)
        state, rest = saved(run), events(run)
        after = [list(run) for run in epochs]
    with make().epochs(3, state=state) as epochs:
        found = [list(run) for run in epochs]
    assert found == ([] if stop is None else [[item for _, item in rest]]) + after


def test_without_workers_an_init_function_is_called_once_for_all_epochs() -> None:
    called: list[int] = []
    pipe = Pipeline.from_dataset(range(3)).map(
        int, backend="inline", num_workers=1, worker_init_fn=called.append
    )
    assert [list(run) for run in pipe.repeat(2).epochs(2)] == [[0, 1, 2] * 2] * 2
    assert called == [0]
