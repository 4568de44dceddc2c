"""Which items come, when and how often."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operator_context import (
    Oops,
    Script,
    context,
    drain,
    errors_in,
    items_in,
    no_deadline,
    outcome,
    run,
)

from hybridloader.pipeline.operators.order import Repeat, ShardByRank, Shuffle, SkipFirst, Take
from hybridloader.running.operator import INFINITE

errors = st.builds(Oops, st.integers(0, 99))
scripts = st.lists(st.one_of(st.integers(), st.none(), errors), max_size=20)


# -- shuffle ---------------------------------------------------------------------------------------


@no_deadline
@given(scripts, st.integers(1, 8), st.integers(0, 5))
def test_a_shuffle_loses_nothing_and_takes_nothing_forward_too_far(
    script: list[Any], buffer: int, seed: int
) -> None:
    numbered = [step if isinstance(step, Oops) else (at, step) for at, step in enumerate(script)]
    items = items_in(numbered)
    found = outcome(Shuffle(buffer, seed), *numbered)
    assert sorted(items_in(found), key=items.index) == items
    assert errors_in(found) == errors_in(numbered)
    for place, item in enumerate(items_in(found)):
        assert items.index(item) - place <= buffer - 1
    if buffer == 1:
        assert items_in(found) == items
    assert Shuffle(buffer).length(len(items)) == len(items)


@no_deadline
@given(st.lists(st.integers(0, 19), max_size=5, unique=True), st.integers(1, 8))
def test_the_order_does_not_depend_on_errors_between(places: list[int], buffer: int) -> None:
    script: list[Any] = list(range(20))
    for place in places:
        script.insert(place, Oops(place))
    found = outcome(Shuffle(buffer, 3), *script)
    assert items_in(found) == outcome(Shuffle(buffer, 3), *range(20))


def test_the_order_is_a_function_of_seed_and_pass() -> None:
    def order(seed: int | None, epoch: int) -> list[int]:
        return outcome(Shuffle(10, seed), *range(50), epoch=epoch)

    assert order(1, 0) == order(1, 0)
    orders = [order(seed, epoch) for seed in (None, 1, 2) for epoch in (0, 1)]
    assert len({tuple(found) for found in orders}) == 6
    other = Shuffle(10).begin(lambda: Script(*range(50)), context(seed=7))
    assert drain(other) != order(None, 0)


def test_what_fits_into_the_buffer_is_shuffled_uniformly() -> None:
    counts = Counter(tuple(outcome(Shuffle(4, seed), 1, 2, 3)) for seed in range(3000))
    assert len(counts) == 6
    # 500 each are expected, with a deviation of 20; the seeds are fixed, so this is no coin toss.
    assert all(400 < count < 600 for count in counts.values())


def test_a_shuffle_fills_its_buffer_and_no_more() -> None:
    source = Script(*range(10))
    found = Shuffle(4).open(source, context())
    assert source.pulled == 0
    next(found)
    assert source.pulled == 4
    next(found)
    assert source.pulled == 5


# -- take --------------------------------------------------------------------------------------------


@no_deadline
@given(scripts, st.integers(0, 8))
def test_a_take_pulls_what_it_gives_and_then_closes(script: list[Any], count: int) -> None:
    source = Script(*script)
    found = drain(Take(count).open(source, context()))
    items = items_in(script)
    assert found == script[:count]  # what raises has its place among them
    assert source.closed == 1
    assert source.pulled == (count if count <= len(script) else len(script) + 1)
    assert Take(count).length(len(items)) == min(count, len(items))
    assert Take(count).length(None) == (None if count else 0)
    assert Take(count).length(INFINITE) == count


# -- repeat ------------------------------------------------------------------------------------------


class Passes:
    """Makes a pass after the other, of scripts; None can't be begun."""

    def __init__(self, *passes: Any) -> None:
        self.left = list(passes)
        self.begun: list[Script] = []

    def __call__(self, epoch: int, start: int) -> Iterator[Any]:
        assert (epoch, start) == (len(self.begun), 0)
        steps = self.left.pop(0)
        if steps is None:
            raise Oops("begin")
        self.begun.append(Script(*steps))
        return self.begun[-1]


@no_deadline
@given(st.lists(scripts, min_size=1, max_size=4))
def test_a_repeat_gives_one_pass_after_the_other(passes: list[list[Any]]) -> None:
    found = drain(Repeat(len(passes)).begin(Passes(*passes), context()))
    assert found == [step for steps in passes for step in steps]


@no_deadline
@given(st.lists(scripts.filter(items_in), max_size=4), st.lists(errors, max_size=3))
def test_a_repeat_without_end_ends_with_a_pass_that_gives_nothing(
    passes: list[list[Any]], last: list[Any]
) -> None:
    source = Passes(*passes, last, [1, 2, 3])
    found = drain(Repeat().begin(source, context()))
    assert found == [step for steps in [*passes, last] for step in steps]
    assert source.left == [[1, 2, 3]]


def test_a_pass_begins_when_its_turn_comes() -> None:
    source = Passes([1], [2], [3])
    found = Repeat(2).begin(source, context())
    assert len(source.begun) == 1
    assert next(found) == 1
    assert len(source.begun) == 1
    assert next(found) == 2
    found.close()  # type: ignore[attr-defined]
    assert [script.closed for script in source.begun] == [0, 1]
    assert drain(found) == []
    none = Passes()
    assert drain(Repeat(0).begin(none, context())) == []


def test_a_pass_that_cannot_be_begun_is_an_error_and_the_end() -> None:
    found = Repeat().begin(Passes([1], None, [2]), context())
    assert drain(found) == [1, Oops("begin")]


def test_lengths_of_repeats() -> None:
    assert Repeat(3).length(5) == 15
    assert Repeat().length(5) == INFINITE
    assert Repeat().length(0) == 0
    assert Repeat(0).length(INFINITE) == 0
    assert Repeat(2).length(INFINITE) == INFINITE
    assert Repeat().length(None) is None


# -- shard -------------------------------------------------------------------------------------------


@no_deadline
@given(scripts, st.integers(1, 5))
def test_shards_make_up_the_whole(script: list[Any], replicas: int) -> None:
    shards = [outcome(ShardByRank(replicas, rank), *script) for rank in range(replicas)]
    items = items_in(script)
    for rank, shard in enumerate(shards):
        assert items_in(shard) == items_in(script[rank::replicas])
        assert errors_in(shard) == errors_in(script)
        assert ShardByRank(replicas, rank).length(len(items)) == len(items[rank::replicas])


def test_a_shard_asks_torch_when_the_pass_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ShardByRank()
    monkeypatch.delitem(sys.modules, "torch")
    assert shard.share == (1, 0)
    state = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=state))
    assert outcome(shard, *range(7)) == [1, 4]
    assert shard.length(7) == 2
    assert outcome(ShardByRank(2, 0), *range(4)) == [0, 2]
    state.is_initialized = lambda: False
    assert outcome(shard, *range(3)) == [0, 1, 2]
    state.is_available = lambda: False
    state.is_initialized = pytest.fail
    assert outcome(shard, *range(3)) == [0, 1, 2]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert outcome(shard, *range(3)) == [0, 1, 2]


def test_a_skip_asks_for_nothing_before_it_is_asked() -> None:
    source = Script(1, 2, Oops(1), 3, 4)
    found = SkipFirst(3).open(source, context())
    assert source.pulled == 0
    with pytest.raises(Oops):
        next(found)
    assert next(found) == 3
    assert drain(run(SkipFirst(9), 1, Oops(2), 3)) == [Oops(2)]
