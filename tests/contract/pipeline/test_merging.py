"""One state of those of all ranks: together, other ranks get each item that was left, and none twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipeline_model import Counting, Settings, events, kind, saved

from hybridloader import Pipeline, PipelineLoader, StateError
from hybridloader.sampling import BlockShuffleSampler, DistributedShuffleSampler


def odd(item: Any) -> bool:
    return number(item) % 7 not in (0, 3, 4)


def several(item: Any) -> list[Any]:
    return [(item, k) for k in range(number(item) % 4)]


def cost(item: Any) -> int:
    return number(item) % 6 + 1


def number(item: Any) -> int:
    while isinstance(item, tuple):
        item = item[0]
    return int(item)


def same(item: Any) -> Any:
    return item


def fails(item: Any) -> Any:
    if number(item) % 11 == 5:
        raise ArithmeticError(item)
    return item


THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 1}
Step = Callable[[Pipeline, Settings], Pipeline]
EARLY: dict[str, Step] = {  # in any number and order
    "map": lambda pipe, settings: pipe.map(same, **settings.place()),
    "filter": lambda pipe, settings: pipe.filter(odd, **settings.place()),
    "prefetch": lambda pipe, _: pipe.prefetch(2),
    "skip": lambda pipe, settings: pipe.map(fails, on_error="skip", **settings.place()),
}
SEVERAL: dict[str, Step] = {  # one of these
    "none": lambda pipe, _: pipe,
    "flat_map": lambda pipe, settings: pipe.flat_map(several, **settings.place()),
    "flat_map and filter": lambda pipe, settings: pipe.flat_map(several).filter(odd),
    "flat_map of lists": lambda pipe, _: pipe.map(several).flat_map(list),
}
LATE: dict[str, Step] = {  # in any number and order after it
    "map": EARLY["map"],
    "batch_by": lambda pipe, _: pipe.batch_by(_costs, 13, collate_fn=list),
    "batch": lambda pipe, _: pipe.batch(3, collate_fn=list),
}


def _costs(item: Any) -> int:
    return cost(item[0] if isinstance(item, list) else item)


def flat(items: Any) -> list[Any]:
    """Return the items in batches, and batches of batches."""
    return [one for item in items for one in (flat(item) if isinstance(item, list) else [item])]


def sampler_of(count: int, ranks: int, rank: int, blocks: bool) -> DistributedShuffleSampler:
    if blocks:
        return BlockShuffleSampler(
            [count],
            3,
            block_size=4,
            window_blocks=2,
            num_canonical_ranks=2,
            num_replicas=ranks,
            rank=rank,
            uneven="exact",
        )
    return DistributedShuffleSampler(count, 3, num_replicas=ranks, rank=rank, uneven="exact")


Make = Callable[[int, int, Any], Pipeline]
"""Makes the pipeline of a rank; takes the number of ranks, that of the rank, and settings."""


class NamedShards:
    """Numbers below `count`, in shards of 0 to 12."""

    def __init__(self, count: int, ranks: int, rank: int) -> None:
        self.num_replicas, self.rank = ranks, rank
        self.shards = dict[str, list[int]]()
        first = 0
        while first < count:
            size = min(len(self.shards) * 7 % 13, count - first)
            self.shards[f"{len(self.shards)}.txt"] = list(range(first, first + size))
            first += size

    @property
    def shard_names(self) -> list[str]:
        return [*self.shards]

    def read_shard(self, name: str, start: int) -> Iterator[int]:
        yield from self.shards[name][start:]

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it is read by shards")


def readers(ranks: int, rank: int, chosen: Settings) -> Any:
    count = (ranks + 2 * rank) % 4  # the same, wherever they run
    backend = "threads" if chosen.place() else "inline"
    return {"num_workers": count, "backend": backend} if count else {}


def maker(count: int, steps: list[Step], *, source: str = "order") -> Make:
    def make(ranks: int, rank: int, chosen: Settings) -> Pipeline:
        if "shards" in source:
            numbers = NamedShards(count, ranks, rank)
            more = {"on_error": "skip"} if "skipping" in source else {}
            pipe = Pipeline.from_iterable(numbers, **readers(ranks, rank, chosen), **more)
        else:
            sampler = sampler_of(count, ranks, rank, source == "blocks")
            pipe = Pipeline.from_dataset(range(count), sampler=sampler, **chosen.place())
        for step in steps:
            pipe = step(pipe, chosen)
        return pipe

    return make


def stop_and_merge(make: Make, legs: list[list[int]], seed: int = 0) -> list[Any]:
    """Return the items of all legs: each has a rank for each number of items that it takes.

    After the last, ranks go on to the end.
    """
    state, had = None, list[Any]()
    for leg in legs:
        states = []
        for rank, most in enumerate(leg):
            with make(len(leg), rank, Settings(seed)).run(
                seed=None if state else 1, state=state
            ) as run:
                had += flat(islice(run, most))
                states.append(saved(run))
            # Each goes on by itself, too, wherever it was stopped.
            with make(len(leg), rank, Settings(seed + 1)).run(state=states[-1]) as run:
                had += flat(islice(run, 1))
                states[-1] = saved(run)
            seed += 2
        merged = None
        while merged is None:
            try:
                merged = make(1, 0, Settings(seed)).merge_states(states[::-1])
            except StateError as error:  # as it says: at another item
                if "save the states at another item" not in str(error):
                    raise
                for rank, before in enumerate(states):
                    with make(len(leg), rank, Settings(seed)).run(state=before) as run:
                        had += flat(islice(run, 1))
                        states[rank] = saved(run)
        state = json.loads(json.dumps(merged))
        assert len(json.dumps(merged)) < 10_000
    for rank in range(3):
        with make(3, rank, Settings(seed)).run(state=state) as run:
            had += flat(run)
    return had


Legs = list[list[int]]
cases = st.tuples(
    st.integers(0, 90),
    st.lists(st.sampled_from(sorted(EARLY)), max_size=3),
    st.sampled_from(sorted(SEVERAL)),
    st.lists(st.sampled_from(sorted(LATE)), max_size=2),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 99),
    st.sampled_from(["order", "blocks", "shards"]),
)
Case = tuple[int, list[str], str, list[str], Legs, int, str]


def each_item_once(case: Case) -> None:
    count, early, middle, late, legs, seed, source = case
    steps = [*(EARLY[name] for name in early), SEVERAL[middle], *(LATE[name] for name in late)]
    make = maker(count, steps, source=source)
    wanted = flat(make(1, 0, Settings(seed)).run(seed=1))
    assert sorted(stop_and_merge(make, legs, seed), key=repr) == sorted(wanted, key=repr)


@settings(deadline=None, max_examples=15)
@given(cases)
def test_other_ranks_get_what_was_left_and_nothing_twice(case: Case) -> None:
    each_item_once(case)


BUFFERS: dict[str, Step] = {
    "shuffle": lambda pipe, _: pipe.shuffle(9),
    "bucket_by": lambda pipe, _: pipe.bucket_by(kind, 3, collate_fn=list),
}


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("legs", [[[0, 3]], [[7, 4, 5]], [[2, 9], [5, 1, 1], [9]]])
def test_the_items_in_a_buffer_are_left(buffer: str, legs: list[list[int]]) -> None:
    make = maker(101, [EARLY["map"], BUFFERS[buffer], LATE["map"]])
    assert sorted(stop_and_merge(make, legs)) == list(range(101))


def test_no_function_is_called_again_for_what_was_given() -> None:
    work = Counting()

    def make(ranks: int, rank: int) -> Pipeline:
        sampler = sampler_of(1000, ranks, rank, False)
        return Pipeline.from_dataset(range(1000), sampler=sampler).map(work).filter(odd)

    states, given = [], 0
    for rank, most in enumerate((150, 250)):
        with make(2, rank).run(seed=1) as run:
            given += len(list(islice(run, most)))
            states.append(saved(run))
    assert given == 400
    before, work.calls = work.calls, 0
    state = make(3, 0).merge_states(states)
    for rank in range(3):
        list(make(3, rank).run(state=state))
    assert work.calls == 1000 - before


def test_a_state_of_hundreds_of_ranks_is_small() -> None:
    def make(ranks: int, rank: int) -> Pipeline:
        sampler = sampler_of(10**6, ranks, rank, False)
        return Pipeline.from_dataset(range(10**6), sampler=sampler).flat_map(_twice)

    states = []
    for rank in range(300):
        with make(300, rank).run(seed=1) as run:
            list(islice(run, 20 + number(rank) * 7919 % 30))
            states.append(saved(run))
    assert len(json.dumps(make(2, 0).merge_states(states))) < 5_000


def _twice(item: int) -> list[int]:
    return [item, item]


def test_ranks_that_have_ended_have_nothing_left_and_the_next_epoch_is_whole() -> None:
    make = maker(20, [EARLY["filter"]])
    wanted = sorted(make(1, 0, Settings(0)).run(seed=1))
    loaders = [PipelineLoader(make(2, rank, Settings(0)), seed=1) for rank in range(2)]
    had = list(loaders[0])
    had += islice(loaders[1], 2)
    states = [loader.state_dict() for loader in loaders]
    state = loaders[0].pipeline.merge_states(states)  # type: ignore[attr-defined]
    others = [PipelineLoader(make(4, rank, Settings(0)), seed=1) for rank in range(4)]
    for loader in others:
        loader.load_state_dict(state)
        had += list(loader)
    assert sorted(had) == wanted
    ended = others[0].pipeline.merge_states([one.state_dict() for one in others])  # type: ignore[attr-defined]
    assert ended["finished"]
    assert sorted(item for loader in others for item in loader) == wanted
    others[0].load_state_dict(state)
    with pytest.warns(UserWarning, match=r"set_epoch\(5\) drops the position"):
        others[0].set_epoch(5)


def test_a_rank_that_has_not_begun_has_all_left() -> None:
    make = maker(20, [EARLY["map"]])
    loaders = [PipelineLoader(make(2, rank, Settings(0)), seed=1) for rank in range(2)]
    had = list(islice(loaders[1], 4))
    state = make(1, 0, Settings(0)).merge_states([loader.state_dict() for loader in loaders])
    for rank in range(3):
        had += make(3, rank, Settings(0)).run(state=state)
    assert sorted(had) == list(range(20))


def both(make: Make, most: tuple[int, int] = (3, 5)) -> list[Any]:
    states = []
    for rank in range(2):
        with make(2, rank, Settings(0)).run(seed=1) as run:
            events(run, most[rank])
            states.append(saved(run))
    return states


TWICE: dict[str, Step] = {
    "on threads": lambda pipe, _: pipe.flat_map(_twice, **THREADS),
    "inline": lambda pipe, _: pipe.flat_map(_twice),
    "seeded": lambda pipe, _: pipe.map(fails).flat_map(_twice, seeding="sample"),
}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([lambda pipe, _: pipe.take(9)], r"take\(9\) depends on the numbers of its items"),
        ([lambda pipe, _: pipe.enumerate()], "enumerate.* depends on the numbers"),
        (
            [lambda pipe, _: pipe.zip(Pipeline.from_dataset(range(99)), strict=False)],
            "zip.* does not share",
        ),
        (
            [EARLY["filter"], BUFFERS["shuffle"]],
            "does not make one item of each, before a step with",
        ),
        (
            [LATE["batch"], lambda pipe, _: pipe.flat_map(list)],
            r"has returned a part of its results of a batch",
        ),
        (
            [TWICE["on threads"], TWICE["inline"]],
            "has returned a part of its results of one item",
        ),
    ],
)
def test_what_other_ranks_can_not_go_on_with_is_refused(steps: list[Step], message: str) -> None:
    make = maker(60, steps)
    with pytest.raises(StateError, match=message):
        make(3, 0, Settings(0)).merge_states(both(make))


@pytest.mark.parametrize(
    ("source", "steps", "most", "message"),
    [
        (
            "order",
            [TWICE["on threads"], TWICE["inline"]],
            (1, 2),
            "and :2-2 have returned a part of an item, on different ranks",
        ),
        ("order", [TWICE["seeded"]], (50, 3), r"flat_map\(_twice\)' would run from the beginning"),
        ("shards", [BUFFERS["shuffle"]], (3, 5), "a step with a buffer, and its shards have no"),
        ("skipping shards", [TWICE["inline"]], (3, 5), "and the source skips items"),
    ],
)
def test_what_no_order_of_the_rest_can_tell_is_refused(
    source: str, steps: list[Step], most: tuple[int, int], message: str
) -> None:
    make = maker(60, steps, source=source)
    with pytest.raises(StateError, match=message):
        make(3, 0, Settings(0)).merge_states(both(make, most))


def test_states_that_are_not_those_of_all_ranks_are_refused() -> None:
    make = maker(60, [EARLY["filter"]])
    states, pipe = both(make, (1, 20)), make(3, 0, Settings(0))  # no read-ahead makes them level
    with pytest.raises(
        StateError, match=r"1 states were passed, and one of them is of \[2\] ranks"
    ):
        pipe.merge_states(states[:1])
    with pytest.raises(StateError, match=r"the states are of the ranks \[0, 0\]"):
        pipe.merge_states([states[0], states[0]])
    later = maker(60, [EARLY["filter"]])(2, 1, Settings(0)).run(seed=1, epoch=3)
    list(islice(later, 2))
    with pytest.raises(StateError, match=r"the ranks are in epochs \[0, 3\]"):
        pipe.merge_states([states[0], saved(later)])
    later.close()
    state: Any = pipe.merge_states(states)
    state["marks"][":0"]["value"]["left"][0][1] = "x"
    with pytest.raises(StateError, match="left: the positions that ranks had left are damaged"):
        pipe.run(state=state)
