"""Several pipelines as one."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operator_context import (
    Oops,
    Script,
    ScriptedContext,
    drain,
    errors_in,
    items_in,
    no_deadline,
    scripted,
)

from hybridloader import Pipeline
from hybridloader._support.user_objects import no_answer
from hybridloader.errors import WorkerTimeout
from hybridloader.pipeline.operators.joins import Concat, Interleave, Mix, Zip
from hybridloader.pipeline.operators.order import Enumerate, ShardByRank, SkipFirst, Take
from hybridloader.running.operator import INFINITE, Chain, Operator

errors = st.builds(Oops, st.integers(0, 99))
scripts = st.lists(st.one_of(st.integers(0, 9), st.none(), st.integers(), errors), max_size=8)
several = st.lists(scripts, min_size=1, max_size=4)


def lines(scripts: list[list[Any]]) -> tuple[Any, ...]:
    """Pipelines whose lengths are not known."""
    return tuple(scripted(*script, known=False) for script in scripts)


def begin(operator: Operator, stand: ScriptedContext | None = None) -> Iterator[Any]:
    def none() -> Iterator[Any]:
        raise AssertionError("a source has nothing before it")

    return operator.begin(none, stand or ScriptedContext())


def outcome(operator: Operator) -> list[Any]:
    return drain(begin(operator))


def marked(scripts: list[list[Any]]) -> list[list[Any]]:
    """Each item with the number of its pipeline, and its place."""
    return [
        [step if isinstance(step, Oops) else (number, at) for at, step in enumerate(script)]
        for number, script in enumerate(scripts)
    ]


# -- zip ---------------------------------------------------------------------------------------------


def rows_of(scripts: list[list[Any]], *, strict: bool) -> list[Any]:
    """Return the rows and errors of a zip: row `i` is of item `i` of each, or its first error."""
    shortest = min(map(len, scripts))
    found: list[Any] = []
    for at in range(shortest):
        row = [script[at] for script in scripts]
        found.append(next(iter(errors_in(row)), tuple(row)))
    longer = [script for script in scripts if len(script) > shortest]
    if longer:
        ended = next(number for number, script in enumerate(scripts) if len(script) == shortest)
        # Whoever is asked before it is known that one has ended, or at all if it was the first.
        asked = scripts[:ended] if ended else (longer[:1] if strict else [])
        found += errors_in(script[shortest] for script in asked)[:1]
        found += [ValueError] if strict else []
    return found


@no_deadline
@given(several, st.booleans())
def test_a_zip_is_that_of_python_in_which_what_fails_takes_its_row_along(
    scripts: list[list[Any]], strict: bool
) -> None:
    found = outcome(Zip(lines(scripts), strict=strict))
    expected = rows_of(scripts, strict=strict)
    if expected and expected[-1] is ValueError:
        shortest = min(map(len, scripts))
        ended = next(number for number, each in enumerate(scripts) if len(each) == shortest)
        *found, uneven = found
        expected.pop()
        assert str(uneven).startswith(f"zip: pipeline {ended} ended after {shortest} items")
    assert found == expected


def test_a_row_that_fails_twice_raises_once_and_tells_of_both() -> None:
    row = lines([[Oops(1), 2], [Oops(2), "b"], [Oops(1), "y"]])
    first, second = outcome(Zip(row))
    assert first == Oops(1)
    assert first.__notes__ == ["In the same row of zip, pipeline 1 raised Oops(2)."]
    assert second == (2, "b", "y")


def test_what_is_no_answer_leaves_the_row_as_far_as_it_came() -> None:
    late = no_answer(WorkerTimeout("late"))
    for make in (Zip, Interleave, Mix, Concat):
        scripts = [[1, 2, late, 3], ["a", late, "b", Oops(1)]]
        without = [[step for step in script if step is not late] for script in scripts]
        found = outcome(make(lines(scripts)))
        assert [step for step in found if step is not late] == outcome(make(lines(without)))
    for operator in (Take(2), SkipFirst(1), Enumerate(), ShardByRank(2, 1)):
        found = drain(operator.open(Script(1, late, 2, late, 3), ScriptedContext()))
        without_late = drain(operator.open(Script(1, 2, 3), ScriptedContext()))
        assert [step for step in found if step is not late] == without_late


def test_lengths_of_joins() -> None:
    two, three, unknown = scripted(1, 2), scripted(1, 2, 3), scripted(1, known=False)
    assert Zip((two, two)).length(None) == 2
    assert Zip((unknown, two)).length(None) == 2
    assert Zip((three, two), strict=False).length(None) == 2
    assert Zip((unknown, two), strict=False).length(None) is None
    assert Zip((unknown, scripted()), strict=False).length(None) == 0
    assert Zip((unknown, unknown)).length(None) is None
    assert Zip((scripted(known=INFINITE), scripted(known=INFINITE))).length(None) == INFINITE
    assert Zip((scripted(known=INFINITE), two), strict=False).length(None) == 2
    with pytest.raises(ValueError, match="different lengths"):
        Zip((scripted(known=INFINITE), two))
    for make in (Concat, Mix, Interleave):
        assert make((two, three)).length(None) == 5
        assert make((two, unknown)).length(None) is None
        assert make((unknown, scripted(known=INFINITE))).length(None) == INFINITE
    assert Mix((two, three), stop="first").length(None) is None
    assert Mix((two,), stop="first").length(None) == 2
    endless = scripted(known=INFINITE)
    assert Mix((endless, endless), stop="first").length(None) == INFINITE
    for operator in (Zip((two, two)), Concat((two,)), Mix((two,)), Interleave((two,))):
        assert operator.branches() == operator.pipelines


# -- concat ------------------------------------------------------------------------------------------


@no_deadline
@given(several)
def test_a_concat_is_one_after_the_other(scripts: list[list[Any]]) -> None:
    assert outcome(Concat(lines(scripts))) == list(itertools.chain(*scripts))


class Broken(Chain):
    """A chain that can't be opened."""

    length = None
    operators = ()

    def __call__(self) -> Any:
        raise Oops("open")


def test_a_pipeline_is_opened_in_its_turn_and_one_that_cannot_be_is_passed_over() -> None:
    stand = ScriptedContext()

    broken: Any = Broken()
    found = begin(Concat((scripted(1, 2), broken, scripted(3))), stand)
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
    pair = (scripted(*"a" * 50), scripted(*"b" * 50))

    def order(seed: int | None, epoch: int) -> str:
        return "".join(drain(begin(Mix(pair, seed=seed), ScriptedContext(epoch))))

    assert order(1, 0) == order(1, 0)
    assert len({order(seed, epoch) for seed in (None, 1, 2) for epoch in (0, 1)}) == 6


def test_the_weights_are_the_shares_also_when_one_has_ended() -> None:
    endless = (scripted(*"a" * 4000), scripted(*"b" * 100), scripted(*"c" * 4000))
    found = "".join(outcome(Mix(endless, (1, 1, 2), seed=0)))
    first, later = found[: found.rindex("b")], found[found.rindex("b") + 1 :][:1000]
    # Of 400 and of 1000 draws, deviations of 10 and 15; the seed is fixed.
    assert abs(first.count("a") - len(first) / 4) < 40
    assert abs(first.count("c") - len(first) / 2) < 40
    assert abs(later.count("a") - len(later) / 3) < 60


def test_weights_are_kept_as_given() -> None:
    assert Mix((scripted(1), scripted(2)), [1, 3]).weights == (1.0, 3.0)  # type: ignore[arg-type]


# -- interleave --------------------------------------------------------------------------------------


@no_deadline
@given(several, st.integers(1, 3))
def test_an_interleave_gives_blocks_in_turn(scripts: list[list[Any]], block: int) -> None:
    scripts = marked(scripts)
    rounds = max(map(len, scripts)) // block + 1
    assert outcome(Interleave(lines(scripts), block)) == [
        step
        for turn in range(rounds)
        for each in scripts
        for step in each[turn * block : (turn + 1) * block]
    ]


# -- closing -----------------------------------------------------------------------------------------


def curriculum(epoch: int) -> Any:
    return [(1, 0, 0), (1, 3, 0), (0, 0, 0), (1, 1), 5][epoch]


def test_the_weights_of_a_mix_may_be_those_of_the_epoch() -> None:
    three = scripted(*"a" * 400), scripted(*"b" * 400), scripted(*"c" * 400)
    mix = Mix(three, curriculum, seed=0)
    assert mix.length(None) is None
    assert "".join(drain(begin(mix, ScriptedContext(0)))) == "a" * 400
    found = "".join(drain(begin(mix, ScriptedContext(1))))
    assert len(found) == 800
    assert 60 < found[:400].count("a") < 140
    for epoch, told in [(2, "weights are all 0"), (3, "one number for each of 3"), (4, "not 5")]:
        with pytest.raises(ValueError, match=told) as failed:
            begin(mix, ScriptedContext(epoch))
        assert failed.value.__notes__ == [f"mix: weights({epoch})"]


@pytest.mark.parametrize("stop", ["all", "first"])
def test_a_mix_of_unequal_pipelines_resumes_anywhere_in_each_epoch(stop: str) -> None:
    """`repeat` says how often each comes; the pass of a repetition shuffles anew."""
    large = Pipeline.from_dataset(range(30), shuffle=True, seed=1)
    small = Pipeline.from_dataset(range(100, 104), shuffle=True, seed=2)
    small = small.repeat(3) if stop == "all" else small.repeat()
    pipe = Pipeline.mix(large, small, weights=[(1, 1), (5, 1)].__getitem__, seed=0, stop=stop)
    epochs = [list(pipe.run(epoch=epoch)) for epoch in range(2)]
    for epoch, whole in enumerate(epochs):
        assert sorted(n for n in whole if n < 100) == [*range(30)]
        passes = [n for n in whole if n >= 100]
        if stop == "all":
            assert len(passes) == 12
            assert sorted(passes[:4]) == sorted(passes[4:8]) == [*range(100, 104)]
        for at in range(len(whole)):
            begun = pipe.run(epoch=epoch)
            assert [next(begun) for _ in range(at)] == whole[:at]
            state = json.loads(json.dumps(begun.state_dict()))
            begun.close()
            assert list(pipe.run(state=state)) == whole[at:]
    if stop == "first":
        counts = [sum(n >= 100 for n in whole) for whole in epochs]
        assert counts[0] > 15 > counts[1]


@pytest.mark.parametrize("make", [Zip, Concat, Mix, Interleave])
def test_closing_closes_what_was_opened(make: Any) -> None:
    stand = ScriptedContext()
    found: Any = begin(make((scripted(1, 2, 3), scripted(4, 5, 6))), stand)
    next(found)
    found.close()
    found.close()
    assert stand.opened
    assert all(script.closed for script in stand.opened)
    assert drain(found) == []


@pytest.mark.parametrize("make", [Zip, Mix, Interleave])
def test_what_was_opened_is_closed_when_another_cannot_be(make: Any) -> None:
    stand = ScriptedContext()

    with pytest.raises(Oops):
        begin(make((scripted(1), Broken(), scripted(2))), stand)
    assert [script.closed for script in stand.opened] == [1]


def test_all_are_closed_although_closing_one_fails() -> None:
    stand = ScriptedContext()
    found: Any = begin(Interleave((scripted(1), scripted(2), scripted(3))), stand)

    def fail() -> None:
        raise Oops("close")

    stand.opened[0].close = fail  # type: ignore[method-assign]
    with pytest.raises(Oops):
        found.close()
    assert [script.closed for script in stand.opened[1:]] == [1, 1]
