"""Calls of the user's functions that a resumed run makes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.random_pipelines import Counting, events, saved

from hybridloader import Pipeline, Retry, Skip

COUNT = 400


def odd(item: int) -> bool:
    return item % 7 not in (0, 3, 4)


def some(item: int) -> list[int]:
    return [item] * (item % 3)


def fails(item: int) -> int:
    if item % 11 == 5:
        raise ArithmeticError(item)
    return item


def size(item: int) -> int:
    return item % 6 + 1


def kind(item: int) -> int:
    return item % 5


Place = dict[str, Any]
STEPS: dict[str, Callable[[Pipeline, Place], Pipeline]] = {
    "filter": lambda pipe, place: pipe.filter(odd, **place),
    "flat_map": lambda pipe, place: pipe.flat_map(some, **place),
    "filter and flat_map": lambda pipe, place: pipe.filter(odd, **place).flat_map(some, **place),
    "skip": lambda pipe, place: pipe.map(fails, on_error=Skip(None), **place),
    "retry": lambda pipe, place: pipe.map(
        fails, on_error=Retry(2, backoff=0.0, then=Skip(None)), **place
    ),
    "error": lambda pipe, place: pipe.map(fails, **place),
    "take": lambda pipe, place: pipe.filter(odd, **place).take(150),
    "unbatch": lambda pipe, place: pipe.filter(odd, **place).unbatch(split=some),
    "batch behind errors": lambda pipe, place: pipe.map(fails, **place).batch(3, collate_fn=list),
    "batch_by": lambda pipe, place: pipe.batch_by(size, 13, collate_fn=list),
    "bucket_by": lambda pipe, place: pipe.bucket_by(kind, 3, collate_fn=list),
    "shuffle": lambda pipe, place: pipe.shuffle(10),
    "interleave": lambda pipe, place: pipe.interleave(
        Pipeline.from_dataset(range(10**6, 10**6 + 50)).filter(odd, **place), block=2
    ),
    "mix": lambda pipe, place: pipe.mix(Pipeline.from_dataset(range(10**6, 10**6 + 50))),
}


def items_of(found: list[Any]) -> list[int]:
    """Return the items of a run, those of batches one by one."""
    return [
        one
        for kind, item in found
        if kind == "item"
        for one in (item if isinstance(item, list) else [item])
    ]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "place",
    [
        pytest.param({}, id="inline"),
        pytest.param({"backend": "threads", "num_workers": 2}, id="threads"),
        pytest.param(
            {"backend": "threads", "num_workers": 2, "threads_per_worker": 2},
            id="4",
            marks=pytest.mark.full,
        ),
    ],
)
def test_nothing_is_made_again_but_what_is_needed(step: str, place: Place) -> None:
    work = Counting()

    def make() -> Pipeline:
        return STEPS[step](Pipeline.from_dataset(range(COUNT)).map(work), place)

    whole = events(make().run(seed=1))
    for stop in (1, 40, 87):
        with make().run(seed=1) as run:
            assert events(run, stop) == whole[:stop]
            state = saved(run)
        work.calls = 0
        with make().run(state=state) as run:
            assert events(run) == whole[stop:]
        needed = [item for item in items_of(whole[stop:]) if item < COUNT]
        # One more, and those that `filter` has dropped before it: the item that came before has given
        # what it gave, and nobody knows that it is all.
        most = COUNT - min(needed) + _between(step, whole[:stop], min(needed)) + 3
        assert work.calls <= most


def _between(step: str, given: list[Any], oldest: int) -> int:
    """Return how many items came between the last one that was given and the oldest that is needed."""
    if step in ("shuffle", "bucket_by"):
        return 0  # all from the oldest one on
    had = [item for item in items_of(given) if item < COUNT]
    return max(0, oldest - max(had, default=-1) - 1)


def test_a_shuffle_of_indices_costs_no_call() -> None:
    work = Counting()
    pipe = Pipeline.from_dataset(range(1000)).shuffle(100).map(work)
    with pipe.run(seed=1) as run:
        events(run, 500)
        state = saved(run)
    work.calls = 0
    with pipe.run(state=state) as run:
        events(run)
    assert work.calls == 500


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("later", [True, False])
def test_steps_may_share_a_node_in_one_run_and_not_in_the_other(fused: bool, later: bool) -> None:
    def make(fuse: bool) -> Pipeline:
        place: Place = {"backend": "threads", "num_workers": 2, "fuse": fuse}
        pipe = Pipeline.from_dataset(range(200)).filter(odd, **place).flat_map(some, **place)
        return pipe.map(str, **place).filter(len, **place)

    whole = list(make(fused))
    for stop in range(0, len(whole), 9):
        with make(fused).run() as run:
            events(run, stop)
            state = saved(run)
        with make(later).run(state=state) as run:
            half = events(run, 10)
            again = saved(run)
        with make(fused).run(state=again) as run:
            assert [item for _, item in half + events(run)] == whole[stop:]
