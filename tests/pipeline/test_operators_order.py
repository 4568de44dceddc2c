"""Which items come, when and how often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.scripts import (
    Oops,
    Script,
    begin,
    drain,
    errors_in,
    items_in,
    no_deadline,
    outcome,
    scripted,
    steps,
)

from hybridloader import Pipeline

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
    found = outcome(steps.shuffle(buffer, seed), *numbered)
    assert sorted(items_in(found), key=items.index) == items
    assert errors_in(found) == errors_in(numbered)
    for place, item in enumerate(items_in(found)):
        assert items.index(item) - place <= buffer - 1
    if buffer == 1:
        assert items_in(found) == items
    assert Pipeline.from_iterable(items).shuffle(buffer).length == len(items)


@no_deadline
@given(st.lists(st.integers(0, 19), max_size=5, unique=True), st.integers(1, 8))
def test_the_order_does_not_depend_on_errors_between(places: list[int], buffer: int) -> None:
    script: list[Any] = list(range(20))
    for place in places:
        script.insert(place, Oops(place))
    found = outcome(steps.shuffle(buffer, 3), *script)
    assert items_in(found) == outcome(steps.shuffle(buffer, 3), *range(20))


def test_the_order_is_a_function_of_seed_and_pass() -> None:
    def order(seed: int | None, epoch: int) -> list[int]:
        return outcome(steps.shuffle(10, seed), *range(50), epoch=epoch)

    assert order(1, 0) == order(1, 0)
    orders = [order(seed, epoch) for seed in (None, 1, 2) for epoch in (0, 1)]
    assert len({tuple(found) for found in orders}) == 6
    assert outcome(steps.shuffle(10), *range(50), seed=7) != order(None, 0)


def test_what_fits_into_the_buffer_is_shuffled_uniformly() -> None:
    items = list(Pipeline.from_iterable([1, 2, 3]).shuffle(4, 0).repeat(3000))
    counts = Counter(tuple(items[at : at + 3]) for at in range(0, 9000, 3))
    assert len(counts) == 6
    # 500 each are expected, with a deviation of 20; the seed is fixed, so this is no coin toss.
    assert all(400 < count < 600 for count in counts.values())


# -- take --------------------------------------------------------------------------------------------


@no_deadline
@given(scripts, st.integers(0, 8))
def test_a_take_pulls_what_it_gives_and_then_closes(script: list[Any], count: int) -> None:
    source = Script(*script)
    assert drain(begin(steps.take(count), source)) == script[:count]  # what raises has its place
    assert source.closed == 1
    assert source.pulled == (count if count <= len(script) else len(script) + 1)
    for known in (Pipeline.from_iterable(script), Pipeline.from_iterable([1]).repeat()):
        assert known.take(count).length == min(count, known.length or 0)
    assert scripted().take(count).length == (None if count else 0)


# -- repeat ------------------------------------------------------------------------------------------


def passes_of(*passes: Any) -> Pipeline:
    """A pipeline each of whose passes is another script; None can't be begun."""
    left = iter(passes)

    def begun() -> Script:
        script = next(left)
        if script is None:
            raise Oops("begin")
        return Script(*script)

    return Pipeline.from_iterable(begun)


@no_deadline
@given(st.lists(scripts.filter(items_in), max_size=4), st.lists(errors, max_size=3))
def test_a_repeat_without_end_ends_with_a_pass_that_gives_nothing(
    passes: list[list[Any]], last: list[Any]
) -> None:
    found = drain(passes_of(*passes, last, [1, 2, 3]).repeat().run())
    assert found == [step for steps in [*passes, last] for step in steps]


def test_a_pass_begins_when_its_turn_comes_and_one_that_can_not_is_the_last() -> None:
    found = passes_of([1], None, [2]).repeat(3).run()
    assert next(found) == 1  # the second has not begun
    assert drain(found) == [Oops("begin")]
    assert list(passes_of().repeat(0)) == []


def test_lengths_of_repeats() -> None:
    five, none, endless = (Pipeline.from_iterable(range(count)) for count in (5, 0, 1))
    endless = endless.repeat()
    assert five.repeat(3).length == 15
    assert five.repeat().length == endless.repeat(2).length == float("inf")
    assert none.repeat().length == endless.repeat(0).length == 0
    assert scripted(1).repeat().length is None


# -- shard -------------------------------------------------------------------------------------------


def test_a_shard_asks_torch_when_the_pass_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Pipeline.from_iterable(range(7)).shard()
    assert list(shard) == [*range(7)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert list(shard) == [1, 4]
    assert shard.length == 2
    assert outcome(steps.shard(2, 0), *range(4)) == [0, 2]
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert list(shard) == [*range(7)]


def test_a_skip_asks_for_nothing_before_it_is_asked() -> None:
    source = Script(1, 2, Oops(1), 3, 4)
    found = begin(steps.skip(3), source)
    assert source.pulled == 0
    with pytest.raises(Oops):
        next(found)
    assert next(found) == 3
    assert outcome(steps.skip(9), 1, Oops(2), 3) == [Oops(2)]
