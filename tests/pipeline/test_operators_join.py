"""Several pipelines as one."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripts import Oops, Script, drain, errors_in, items_in, no_deadline, scripted

from hybridloader import Pipeline

errors = st.builds(Oops, st.integers(0, 99))
scripts = st.lists(st.one_of(st.integers(0, 9), st.none(), st.integers(), errors), max_size=8)
several = st.lists(scripts, min_size=1, max_size=4)


def joined(how: str, scripts: list[list[Any]], **more: Any) -> Pipeline:
    """Join pipelines whose lengths are not known."""
    first, *others = [scripted(*script) for script in scripts]
    return getattr(first, how)(*others, **more)  # type: ignore[no-any-return]


def outcome(how: str, scripts: list[list[Any]], **more: Any) -> list[Any]:
    return drain(joined(how, scripts, **more).run())


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
    found = outcome("zip", scripts, strict=strict)
    expected = rows_of(scripts, strict=strict)
    if expected and expected[-1] is ValueError:
        shortest = min(map(len, scripts))
        ended = next(number for number, each in enumerate(scripts) if len(each) == shortest)
        *found, uneven = found
        expected.pop()
        assert str(uneven).startswith(f"zip: pipeline {ended} ended after {shortest} items")
    assert found == expected


def test_a_row_that_fails_twice_raises_once_and_tells_of_both() -> None:
    first, second = outcome("zip", [[Oops(1), 2], [Oops(2), "b"], [Oops(1), "y"]])
    assert first == Oops(1)
    assert first.__notes__ == ["In the same row of zip, pipeline 1 raised Oops(2)."]
    assert second == (2, "b", "y")


def test_lengths_of_joins() -> None:
    none, two, three = (Pipeline.from_iterable(range(count)) for count in (0, 2, 3))
    unknown, endless = scripted(1), two.repeat()
    assert two.zip(two).length == unknown.zip(two).length == 2
    assert three.zip(two, strict=False).length == endless.zip(two, strict=False).length == 2
    assert unknown.zip(two, strict=False).length is unknown.zip(unknown).length is None
    assert unknown.zip(none, strict=False).length == 0
    assert endless.zip(endless).length == float("inf")
    for how in ("concat", "mix", "interleave"):
        assert getattr(two, how)(three).length == 5
        assert getattr(two, how)(unknown).length is None
        assert getattr(unknown, how)(endless).length == float("inf")
    assert two.mix(three, stop="first").length is None
    assert two.mix(stop="first").length == 2
    assert endless.mix(endless, stop="first").length == float("inf")


# -- concat ------------------------------------------------------------------------------------------


def test_a_pipeline_is_opened_in_its_turn_and_one_that_cannot_be_is_passed_over() -> None:
    opened: list[int] = []

    def opens(number: int) -> Pipeline:
        def begun() -> Script:
            opened.append(number)
            if number == 1:
                raise Oops("open")
            return Script(number, number)

        return Pipeline.from_iterable(begun)

    found = opens(0).concat(opens(1), opens(2)).run()
    assert opened == []
    assert next(found) == 0
    assert opened == [0]
    assert drain(found) == [0, Oops("open"), 2, 2]
    for how in ("zip", "mix", "interleave"):
        with pytest.raises(Oops):
            getattr(opens(0), how)(opens(1), opens(2)).run()


# -- mix ---------------------------------------------------------------------------------------------


@no_deadline
@given(several, st.integers(0, 5))
def test_a_mix_loses_nothing_and_keeps_each_in_order(scripts: list[list[Any]], seed: int) -> None:
    scripts = marked(scripts)
    found = outcome("mix", scripts, seed=seed)
    for number, script in enumerate(scripts):
        assert [item for item in items_in(found) if item[0] == number] == items_in(script)
    assert Counter(errors_in(found)) == Counter(e for s in scripts for e in errors_in(s))


@no_deadline
@given(several, st.integers(0, 5))
def test_a_mix_may_end_with_the_first(scripts: list[list[Any]], seed: int) -> None:
    scripts = marked(scripts)
    found = outcome("mix", scripts, seed=seed, stop="first")
    ended = False
    for number, script in enumerate(scripts):
        given = [item for item in items_in(found) if item[0] == number]
        assert given == items_in(script)[: len(given)]
        ended = ended or len(given) == len(items_in(script))
    assert ended
    whole = outcome("mix", scripts, seed=seed)
    assert found == whole[: len(found)]


def test_the_order_of_a_mix_is_a_function_of_seed_and_pass() -> None:
    def order(seed: int | None, epoch: int) -> str:
        return "".join(joined("mix", [["a"] * 50, ["b"] * 50], seed=seed).run(epoch=epoch))

    assert order(1, 0) == order(1, 0)
    assert len({order(seed, epoch) for seed in (None, 1, 2) for epoch in (0, 1)}) == 6


def test_the_weights_are_the_shares_also_when_one_has_ended() -> None:
    letters = [["a"] * 4000, ["b"] * 100, ["c"] * 4000]
    found = "".join(outcome("mix", letters, weights=(1, 1, 2), seed=0))
    first, later = found[: found.rindex("b")], found[found.rindex("b") + 1 :][:1000]
    # Of 400 and of 1000 draws, deviations of 10 and 15; the seed is fixed.
    assert abs(first.count("a") - len(first) / 4) < 40
    assert abs(first.count("c") - len(first) / 2) < 40
    assert abs(later.count("a") - len(later) / 3) < 60


# -- interleave --------------------------------------------------------------------------------------


@no_deadline
@given(several, st.integers(1, 3))
def test_an_interleave_gives_blocks_in_turn(scripts: list[list[Any]], block: int) -> None:
    scripts = marked(scripts)
    rounds = max(map(len, scripts)) // block + 1
    assert outcome("interleave", scripts, block_length=block) == [
        step
        for turn in range(rounds)
        for each in scripts
        for step in each[turn * block : (turn + 1) * block]
    ]


def curriculum(epoch: int) -> Any:
    return [(1, 0, 0), (1, 3, 0), (0, 0, 0), (1, 1), 5][epoch]


def test_the_weights_of_a_mix_may_be_those_of_the_epoch() -> None:
    mix = joined("mix", [["a"] * 400, ["b"] * 400, ["c"] * 400], weights=curriculum, seed=0)
    assert mix.length is None
    assert "".join(mix.run(epoch=0)) == "a" * 400
    found = "".join(mix.run(epoch=1))
    assert len(found) == 800
    assert 60 < found[:400].count("a") < 140
    for epoch, told in [(2, "weights are all 0"), (3, "one number for each of 3"), (4, "not 5")]:
        with pytest.raises(ValueError, match=told) as failed:
            list(mix.run(epoch=epoch))
        assert failed.value.__notes__[0] == f"mix: weights({epoch})"


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


# -- closing -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["zip", "concat", "interleave"])
def test_closing_closes_what_was_opened_although_closing_one_fails(how: str) -> None:
    class Failing(Script):
        def close(self) -> None:
            super().close()
            raise Oops("close")

    opened = [Failing(*range(9)), Script(*range(9)), Script(*range(9))]
    first, *others = [Pipeline.from_iterable(lambda source=source: source) for source in opened]
    found = getattr(first, how)(*others).prefetch(1).run()
    next(found)
    found.close()
    assert [source.closed for source in opened] == ([1, 0, 0] if how == "concat" else [1, 1, 1])
