"""Several pipelines as one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_context import Oops, Stand, drain, errors_in, items_in, line, no_deadline

from hybridloader.operators.base import INFINITE, Operator
from hybridloader.operators.join import Concat, Interleave, Mix, Zip

errors = st.builds(Oops, st.integers(0, 99))
scripts = st.lists(st.one_of(st.integers(0, 9), st.none(), st.integers(), errors), max_size=8)
several = st.lists(scripts, min_size=1, max_size=4)


def lines(scripts: list[list[Any]]) -> tuple[Any, ...]:
    """Pipelines whose lengths are not known."""
    return tuple(line(*script, known=False) for script in scripts)


def begin(operator: Operator, stand: Stand | None = None) -> Iterator[Any]:
    def none() -> Iterator[Any]:
        raise AssertionError("a source has nothing before it")

    return operator.begin(none, stand or Stand())


def outcome(operator: Operator) -> list[Any]:
    return drain(begin(operator))


def marked(scripts: list[list[Any]]) -> list[list[Any]]:
    """Each item with the number of its pipeline, and its place."""
    return [
        [step if isinstance(step, Oops) else (number, at) for at, step in enumerate(script)]
        for number, script in enumerate(scripts)
    ]


# -- zip ---------------------------------------------------------------------------------------------


@no_deadline
@given(several)
def test_a_zip_is_that_of_python_with_errors_between(scripts: list[list[Any]]) -> None:
    items = [items_in(script) for script in scripts]
    found = outcome(Zip(lines(scripts), strict=False))
    assert items_in(found) == list(zip(*items, strict=False))

    found = outcome(Zip(lines(scripts)))
    shortest = min(map(len, items))
    assert items_in(found) == list(zip(*items, strict=False))
    even = all(len(each) == shortest for each in items)
    uneven = [error for error in errors_in(found) if isinstance(error, ValueError)]
    assert len(uneven) == (0 if even else 1)
    if even:
        assert Counter(errors_in(found)) == Counter(e for s in scripts for e in errors_in(s))
    else:
        ended = next(number for number, each in enumerate(items) if len(each) == shortest)
        assert str(uneven[0]).startswith(f"zip: pipeline {ended} ended after {shortest} items")
        assert found[-1] is uneven[0]


def test_an_error_leaves_the_row_as_far_as_it_came() -> None:
    assert outcome(Zip(lines([[1, 2], [Oops(1), "a", "b"]]), strict=False)) == [
        Oops(1),
        (1, "a"),
        (2, "b"),
    ]


def test_errors_behind_the_end_of_the_first_are_told() -> None:
    found = outcome(Zip(lines([[1], ["a", Oops(1)], ["x", Oops(2), Oops(3)]])))
    assert found == [(1, "a", "x"), Oops(1), Oops(2), Oops(3)]
    found = outcome(Zip(lines([[1, StopIteration(), 2], ["a", Oops(1)]])))
    assert found == [(1, "a"), Oops(1)]
    *_, uneven = found = outcome(Zip(lines([[1], ["a"], ["x", Oops(2), "y"]])))
    assert found[:-1] == [(1, "a", "x"), Oops(2)]
    assert str(uneven).startswith("zip: pipeline 0 ended after 1 items and pipeline 2 goes on")


def infinite() -> Any:
    endless: Any = line(known=False)
    object.__setattr__(endless, "length", INFINITE)
    return endless


def test_lengths_of_joins() -> None:
    two, three, unknown = line(1, 2), line(1, 2, 3), line(1, known=False)
    assert Zip((two, two)).length(None) == 2
    assert Zip((unknown, two)).length(None) == 2
    assert Zip((three, two), strict=False).length(None) == 2
    assert Zip((unknown, two), strict=False).length(None) is None
    assert Zip((unknown, line()), strict=False).length(None) == 0
    assert Zip((unknown, unknown)).length(None) is None
    assert Zip((infinite(), infinite())).length(None) == INFINITE
    assert Zip((infinite(), two), strict=False).length(None) == 2
    with pytest.raises(ValueError, match="different lengths"):
        Zip((infinite(), two))
    for make in (Concat, Mix, Interleave):
        assert make((two, three)).length(None) == 5
        assert make((two, unknown)).length(None) is None
        assert make((unknown, infinite())).length(None) == INFINITE
    assert Mix((two, three), stop="first").length(None) is None
    assert Mix((two,), stop="first").length(None) == 2
    assert Mix((infinite(), infinite()), stop="first").length(None) == INFINITE
    for operator in (Zip((two, two)), Concat((two,)), Mix((two,)), Interleave((two,))):
        assert operator.branches() == operator.pipelines


# -- concat ------------------------------------------------------------------------------------------


@no_deadline
@given(several)
def test_a_concat_is_one_after_the_other(scripts: list[list[Any]]) -> None:
    assert outcome(Concat(lines(scripts))) == list(itertools.chain(*scripts))


def test_a_pipeline_is_opened_in_its_turn_and_one_that_cannot_be_is_passed_over() -> None:
    stand = Stand()

    class Broken:
        length = None

        def __call__(self) -> Any:
            raise Oops("open")

    broken: Any = Broken()
    found = begin(Concat((line(1, 2), broken, line(3))), stand)
    assert stand.opened == []
    assert next(found) == 1
    assert len(stand.opened) == 1
    assert drain(found) == [2, Oops("open"), 3]


# -- mix ---------------------------------------------------------------------------------------------


@no_deadline
@given(several, st.integers(0, 5))
def test_a_mix_loses_nothing_and_keeps_each_in_order(scripts: list[list[Any]], seed: int) -> None:
    scripts = marked(scripts)
    found = outcome(Mix(lines(scripts), seed=seed))
    for number, script in enumerate(scripts):
        assert [item for item in items_in(found) if item[0] == number] == items_in(script)
    assert Counter(errors_in(found)) == Counter(e for s in scripts for e in errors_in(s))


@no_deadline
@given(several, st.integers(0, 5))
def test_a_mix_may_end_with_the_first(scripts: list[list[Any]], seed: int) -> None:
    scripts = marked(scripts)
    found = outcome(Mix(lines(scripts), seed=seed, stop="first"))
    ended = False
    for number, script in enumerate(scripts):
        given = [item for item in items_in(found) if item[0] == number]
        assert given == items_in(script)[: len(given)]
        ended = ended or len(given) == len(items_in(script))
    assert ended
    whole = outcome(Mix(lines(scripts), seed=seed))
    assert found == whole[: len(found)]


def test_the_order_of_a_mix_is_a_function_of_seed_and_pass() -> None:
    pair = (line(*"a" * 50), line(*"b" * 50))

    def order(seed: int | None, epoch: int) -> str:
        return "".join(drain(begin(Mix(pair, seed=seed), Stand(epoch))))

    assert order(1, 0) == order(1, 0)
    assert len({order(seed, epoch) for seed in (None, 1, 2) for epoch in (0, 1)}) == 6


def test_the_weights_are_the_shares_also_when_one_has_ended() -> None:
    endless = (line(*"a" * 4000), line(*"b" * 100), line(*"c" * 4000))
    found = "".join(outcome(Mix(endless, (1, 1, 2), seed=0)))
    first, later = found[: found.rindex("b")], found[found.rindex("b") + 1 :][:1000]
    # Of 400 and of 1000 draws, deviations of 10 and 15; the seed is fixed.
    assert abs(first.count("a") - len(first) / 4) < 40
    assert abs(first.count("c") - len(first) / 2) < 40
    assert abs(later.count("a") - len(later) / 3) < 60


def test_weights_are_kept_as_given() -> None:
    assert Mix((line(1), line(2)), [1, 3]).weights == (1.0, 3.0)  # type: ignore[arg-type]


# -- interleave --------------------------------------------------------------------------------------


@no_deadline
@given(several, st.integers(1, 3))
def test_an_interleave_gives_blocks_in_turn(scripts: list[list[Any]], block: int) -> None:
    scripts = marked(scripts)
    items = [items_in(script) for script in scripts]
    rounds = max(map(len, items)) // block + 1
    expected = [
        item
        for turn in range(rounds)
        for each in items
        for item in each[turn * block : (turn + 1) * block]
    ]
    found = outcome(Interleave(lines(scripts), block))
    assert items_in(found) == expected
    assert Counter(errors_in(found)) == Counter(e for s in scripts for e in errors_in(s))


# -- closing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Zip, Concat, Mix, Interleave])
def test_closing_closes_what_was_opened(make: Any) -> None:
    stand = Stand()
    found: Any = begin(make((line(1, 2, 3), line(4, 5, 6))), stand)
    next(found)
    found.close()
    found.close()
    assert stand.opened
    assert all(script.closed for script in stand.opened)
    assert drain(found) == []


@pytest.mark.parametrize("make", [Zip, Mix, Interleave])
def test_what_was_opened_is_closed_when_another_cannot_be(make: Any) -> None:
    stand = Stand()

    class Broken:
        length = None

        def __call__(self) -> Any:
            raise Oops("open")

    with pytest.raises(Oops):
        begin(make((line(1), Broken(), line(2))), stand)
    assert [script.closed for script in stand.opened] == [1]


def test_all_are_closed_although_closing_one_fails() -> None:
    stand = Stand()
    found: Any = begin(Interleave((line(1), line(2), line(3))), stand)

    def fail() -> None:
        raise Oops("close")

    stand.opened[0].close = fail  # type: ignore[method-assign]
    with pytest.raises(Oops):
        found.close()
    assert [script.closed for script in stand.opened[1:]] == [1, 1]
