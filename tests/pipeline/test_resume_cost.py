"""Calls of the user's functions that a resumed run makes again."""

from __future__ import annotations

import random
import zlib
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
    "skip behind errors": lambda pipe, place: pipe.map(fails, **place).skip(30),
    "shard behind errors": lambda pipe, place: pipe.map(fails, **place).filter(odd).shard(3, 1),
    "skips behind skips": lambda pipe, place: pipe.map(fails, **place).skip(20).skip(9),
    "batch_by": lambda pipe, place: pipe.batch_by(size, 13, collate_fn=list),
    "bucket_by": lambda pipe, place: pipe.bucket_by(kind, 3, collate_fn=list),
    "shuffle": lambda pipe, place: pipe.shuffle(10),
    "interleave": lambda pipe, place: pipe.interleave(
        Pipeline.from_dataset(range(10**6, 10**6 + 50)).filter(odd, **place), block_length=2
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


@pytest.mark.parametrize(
    "place",
    [
        pytest.param({}, id="inline"),
        pytest.param({"backend": "threads", "num_workers": 2}, id="threads"),
    ],
)
def test_nothing_is_made_again_but_what_is_needed(place: Place) -> None:
    for step in STEPS:
        work = Counting()

        def make(step: str = step, work: Counting = work) -> Pipeline:
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
            if step in (
                "shuffle",
                "bucket_by",
            ):  # only the items in the buffer, whatever came between
                assert work.calls == len(needed)
                continue
            # One more, and those that `filter` has dropped before it: nobody knows that the item
            # that came before has given all.
            most = COUNT - min(needed) + _between(whole[:stop], min(needed)) + 3
            assert work.calls <= most


def _between(given: list[Any], oldest: int) -> int:
    """Return how many items came between the last one that was given and the oldest that is needed."""
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


@pytest.mark.parametrize(("fused", "later"), [(True, False), (False, True)])
def test_steps_may_share_a_node_in_one_run_and_not_in_the_other(fused: bool, later: bool) -> None:
    def make(fuse: bool) -> Pipeline:
        place: Place = {"backend": "threads", "num_workers": 2, "fuse": fuse}
        pipe = Pipeline.from_dataset(range(200)).filter(odd, **place).flat_map(some, **place)
        pipe = pipe.map(str, **place).filter(len, **place)
        # Only one of the two runs has this at the end of the node of the others.
        return pipe.map(str, **place) if fuse else pipe.map(str)

    whole = list(make(fused))
    for stop in range(0, len(whole), 30):
        with make(fused).run() as run:
            events(run, stop)
            state = saved(run)
        with make(later).run(state=state) as run:
            half = events(run, 10)
            again = saved(run)
        with make(fused).run(state=again) as run:
            assert [item for _, item in half + events(run)] == whole[stop:]


BUFFERS: dict[str, Callable[[Pipeline], Pipeline]] = {
    "shuffle": lambda pipe: pipe.shuffle(10),
    "bucket_by": lambda pipe: pipe.bucket_by(_kind_of, 3, collate_fn=list),
}


def _kind_of(item: Any) -> int:
    return zlib.crc32(repr(item).encode()) % 5


def drawn(item: Any) -> Any:
    return item, random.random()


def fails_at_times(item: int) -> int:
    if item % 29 == 5:
        raise ArithmeticError(item)
    return item


@pytest.mark.parametrize(
    ("buffer", "places"),
    [
        ("shuffle", [{}, {}]),
        ("bucket_by", [{}, {}]),
        (
            "shuffle",
            [
                {"backend": "threads", "num_workers": 2, "prefetch": 5},
                {"backend": "fork", "num_workers": 1, "fuse": False},
            ],
        ),
    ],
    ids=["shuffle-inline", "bucket_by-inline", "shuffle-workers"],
)
def test_the_buffered_items_alone_come_again_and_have_the_numbers_that_they_had(
    buffer: str, places: list[Place]
) -> None:
    """Through functions that are seeded by number, `enumerate`, `skip`, `take` and threads."""
    calls = Counting()

    def make(place: Place) -> Pipeline:
        pipe = Pipeline.from_dataset(range(256), seeding="sample", **place).skip(3)
        pipe = pipe.map(calls, **_seeded(place)).map(drawn, **_seeded(place)).enumerate()
        pipe = pipe.skip(2).take(250).prefetch(2).map(drawn, **_seeded(place))
        return BUFFERS[buffer](pipe)

    whole = list(make({}).run(seed=3))
    for number, stop in enumerate((4, 30)):
        with make(places[number % 2]).run(seed=3) as run:
            assert [item for _, item in events(run, stop)] == whole[:stop]
            state = saved(run)
        calls.calls = 0
        with make(places[(number + 1) % 2]).run(state=state) as run:
            found = [item for _, item in events(run, 3)]
            again = saved(run)
        assert found == whole[stop : stop + 3]
        calls.calls = 0
        with make(places[0]).run(state=again) as run:
            assert list(run) == whole[stop + 3 :]
        if places[0] == {} or places[0]["backend"] == "threads":
            left = sum(len(b) if isinstance(b, list) else 1 for b in whole[stop + 3 :])
            assert calls.calls <= left + 1


def _seeded(place: Place) -> Place:
    return {"seeding": "sample", **place}


def test_errors_before_a_buffer_are_neither_raised_nor_made_again() -> None:
    calls = Counting()
    place: Place = {"backend": "threads", "num_workers": 2}
    pipe = Pipeline.from_dataset(range(300)).map(calls, **place).map(fails_at_times, **place)
    pipe = pipe.shuffle(10)
    whole = events(pipe.run(seed=1))
    for stop in (3, 200):
        with pipe.run(seed=1) as run:
            events(run, stop)
            state = saved(run)
        calls.calls = 0
        with pipe.run(state=state) as run:
            assert events(run) == whole[stop:]
        assert calls.calls == len(whole) - stop


def always_fails(item: int) -> int:
    if item % 5:
        raise ArithmeticError(item)
    return item


def test_a_state_stays_small_behind_thousands_of_errors_and_with_a_large_buffer() -> None:
    pipe = Pipeline.from_dataset(range(10_000)).map(always_fails).shuffle(1_000)
    with pipe.run(seed=1) as run:
        events(run, 8_000)
        state, rest = saved(run), events(run)
    assert events(pipe.run(state=state)) == rest


@pytest.mark.parametrize("stop", [1, 4, 25])
def test_errors_that_are_raised_beside_the_items_have_no_number(stop: int) -> None:
    """`skip` raises the errors of skipped items, and `take` and `enumerate` don't count them."""

    def make() -> Pipeline:
        return Pipeline.from_dataset(range(60)).map(fails).skip(30).take(20).enumerate()

    whole = events(make().run(seed=1))
    assert [kind for kind, _ in whole].count("error") == 5
    with make().run(seed=1) as run:
        found = events(run, stop)
        state = saved(run)
    with make().run(state=state) as run:
        assert found + events(run) == whole
