"""Steps of a user's own, by the recipe in docs/pipelines.md alone: they work wherever ours do."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from hybridloader import Pipeline, StateError
from hybridloader.pipeline import Operator

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"

# -- three steps: with the defaults alone, one for one, and cheap --------------------------------------


class OwnIterator(Iterator[Any]):
    def __init__(self, items: Iterator[Any], start: int = 0) -> None:
        self.items, self.given, self.total = items, start, 0
        self.kept: list[Any] = []

    def close(self) -> None:
        close = getattr(self.items, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True)
class Couples(Operator):
    """Every two items, and no third one."""

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return CouplesIterator(items)


class CouplesIterator(OwnIterator):
    def __next__(self) -> Any:
        while len(self.kept) < 2:
            self.kept.append(next(self.items))
        couple, self.kept = tuple(self.kept), []
        return couple


@dataclass(frozen=True)
class Totals(Operator):
    """The sum of the items until now: where it begins depends on them, and none is left out."""

    factor: int = 1

    keeps_count = True

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return TotalsIterator(map(self.factor.__mul__, items))

    def length(self, upstream: Any) -> Any:
        return upstream


class TotalsIterator(OwnIterator):
    def __next__(self) -> Any:
        self.total += next(self.items)
        return self.total


@dataclass(frozen=True)
class Alternate(Operator):
    """Every second item."""

    cheap = True

    @property
    def name(self) -> str:
        return "every_second"

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return AlternateIterator(items, context.start)

    def seek(self, n: int) -> int:
        return 2 * n

    def length(self, upstream: Any) -> Any:
        return None if upstream is None else upstream // 2


class AlternateIterator(OwnIterator):
    def __next__(self) -> Any:
        while len(self.kept) < 2:
            self.kept.append(next(self.items))
        _, item = self.kept
        self.kept = []
        return item


def couples(pipe: Pipeline) -> Pipeline:
    return pipe.batch(2, drop_last=True, collate_fn=tuple)


class Summing:
    def setup(self) -> None:
        self.total = 0

    def __call__(self, item: int) -> int:
        self.total += item
        return self.total


def totals(pipe: Pipeline) -> Pipeline:
    return pipe.map(Summing(), backend="inline").filter(bool)  # before which no shard is moved


def alternate(pipe: Pipeline) -> Pipeline:
    return pipe.batch(2, drop_last=True, collate_fn=list).map(itemgetter(1))


OWN: dict[str, tuple[Operator, Callable[[Pipeline], Pipeline]]] = {
    "couples": (Couples(), couples),
    "totals": (Totals(), totals),
    "every_second": (Alternate(), alternate),
}
"""Each with the steps of ours that do the same."""

Step = Callable[[Pipeline], Pipeline]


def numbers() -> Pipeline:
    return Pipeline.from_dataset(range(1, 14))


def up(item: int) -> int:
    return item + 100


def read() -> Iterator[int]:
    return iter(range(1, 14))


def beside_another(own: Step) -> Pipeline:
    return Pipeline.zip(own(numbers()), numbers().map(up), strict=False)


def in_a_fork(own: Step) -> Pipeline:
    one, other = numbers().fork()
    return Pipeline.zip(own(one), other.map(up, backend="threads", num_workers=1), strict=False)


PLACES: dict[str, Callable[[Step], Pipeline]] = {
    "alone": lambda own: own(numbers()),
    "after a function": lambda own: own(numbers().map(up)),
    "before a function": lambda own: own(numbers()).map(repr),
    "after threads": lambda own: own(numbers().map(up, backend="threads", num_workers=2)),
    "before threads": lambda own: own(numbers()).map(repr, backend="threads", num_workers=2),
    "after processes": lambda own: own(numbers().map(up, backend="fork", num_workers=2)),
    "before processes": lambda own: own(numbers()).map(repr, backend="fork", num_workers=1),
    "between stages": lambda own: own(numbers().map(up, backend="threads", num_workers=1)).map(
        repr, backend="threads", num_workers=2
    ),
    "after a reader": lambda own: own(
        Pipeline.from_iterable(read, backend="threads", num_workers=1)
    ),
    "after an iterable": lambda own: own(Pipeline.from_iterable(read)),
    "after a shuffle": lambda own: own(numbers().shuffle(5, seed=1)),
    "before a shard": lambda own: own(numbers()).shard(2, 1),
    "before a batch": lambda own: own(numbers()).batch(3, collate_fn=list),
    "before a prefetch": lambda own: own(numbers()).prefetch(2),
    "in a zip": beside_another,
    "in a fork": in_a_fork,
    "in a concat": lambda own: own(numbers()).concat(own(numbers()), numbers()),
    "repeated": lambda own: own(numbers().shuffle(4, seed=2)).repeat(2),
    "over a repetition": lambda own: own(numbers().repeat(2)),
    "before a cache": lambda own: own(numbers()).cache(),
    "twice": lambda own: own(numbers()).map(hash).apply(Alternate()),
}

everywhere = pytest.mark.parametrize("place", PLACES)
each = pytest.mark.parametrize("name", OWN)


def with_own(name: str, place: str) -> Pipeline:
    return PLACES[place](lambda pipe: pipe.apply(OWN[name][0]))


@everywhere
@each
def test_it_gives_what_steps_of_ours_give(name: str, place: str) -> None:
    pipe = with_own(name, place)
    items = list(pipe.run(seed=1))
    assert items == list(PLACES[place](OWN[name][1]).run(seed=1))
    assert items
    assert pipe.length in (None, len(items))
    with pipe.epochs(2, seed=1) as epochs:
        assert list(next(epochs)) == items
        assert len(list(next(epochs))) == len(items)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            name,
            place,
            # A run with processes for each item takes seconds.
            marks=pytest.mark.full if "processes" in place and name != "totals" else (),
        )
        for name in OWN
        for place in PLACES
    ],
)
def test_it_is_resumed_after_any_item(name: str, place: str) -> None:
    items = list(with_own(name, place).run())
    every = 4 if "processes" in place else 1  # starting them twice for each stop takes long
    for stop in range(0, len(items) + 1, every):
        with with_own(name, place).run() as run:
            assert [next(run) for _ in range(stop)] == items[:stop]
            state = json.loads(json.dumps(run.state_dict()))
        assert list(with_own(name, place).run(state=state)) == items[stop:]


@everywhere
@each
def test_it_is_told_by_its_name(name: str, place: str) -> None:
    pipe = with_own(name, place)
    assert f"{name}()" in str(pipe)
    assert f"{name}()" in pipe.to_mermaid()
    with pipe.run(observe=True) as run:
        assert any(f"{name}()" in step for step in run.state_dict()["operators"])
        list(run)
        assert str(run.stats())
    assert pipe.apply(Totals(3)).operators[-1].describe() == "totals(factor=3)"


def test_a_state_is_of_the_same_parameters() -> None:
    with numbers().apply(Totals(2)).run() as run:
        state = run.state_dict()
    with pytest.raises(StateError, match=r"number 2 is 'totals\(factor=2\)' in the state"):
        numbers().apply(Totals(3)).run(state=state)


def test_statistics_name_the_thread_that_runs_it() -> None:
    pipe = numbers().map(up, backend="threads", num_workers=1)
    with pipe.apply(Couples()).run(observe=True) as run:
        list(run)
        assert [row.name for row in run.stats().stages] == ["map(up)", "couples()", "your loop"]


# -- what the recipe says of each member ---------------------------------------------------------------


def members() -> set[str]:
    text = PAGE.read_text()
    table = text[text.index("| member | default |") :].split("\n\n")[0]
    return {
        name for line in table.splitlines() for name in re.findall(r"`(\w+)", line.split("|")[1])
    }


def test_the_recipe_names_members_and_these_tests_have_each_of_them() -> None:
    assert {"open", "length", "seek", "cheap", "keeps_count"} <= members() <= {*dir(Operator)}
    own = Path(__file__).read_text()
    for member in members():
        assert re.search(rf"    (def {member}\(|{member} = )", own), member


@pytest.mark.parametrize(("name", "thread"), [("totals", True), ("every_second", False)])
def test_a_cheap_step_gets_no_thread(name: str, thread: bool) -> None:
    rows = str(numbers().apply(OWN[name][0]).map(up, backend="threads", num_workers=1)).splitlines()
    assert rows[-2].startswith(name)
    assert ("a thread of its own" in rows[-2]) == thread
    assert ("with the next step" in rows[-2]) != thread


def fails(item: int) -> int:
    if item == 3:
        raise ValueError(item)
    return item


def test_a_step_that_keeps_count_keeps_the_rows_of_a_zip() -> None:
    skipping = numbers().map(fails, on_error="skip")
    rows = list(skipping.apply(Totals()).zip(numbers()))
    assert rows[:4] == [(1, 1), (3, 2), (7, 4), (12, 5)]  # the third row is left out
    with pytest.raises(ValueError, match="behind couples nobody knows which item that was"):
        skipping.apply(Couples()).zip(numbers(), strict=False)


@dataclass(frozen=True)
class Needing(Totals):
    """Can't run without something."""

    def check_run(self) -> None:
        raise FileNotFoundError(f"{self.name}: it is not there")


@pytest.mark.parametrize("place", ["alone", "in a fork", "in a concat", "between stages"])
def test_a_step_may_refuse_before_anything_is_started(place: str) -> None:
    pipe, threads = PLACES[place](lambda pipe: pipe.apply(Needing())), threading.active_count()
    for run in (pipe.run, pipe.epochs):
        with pytest.raises(FileNotFoundError, match="needing: it is not there"):
            run()
    assert threading.active_count() == threads


@dataclass(frozen=True)
class Twice(Operator):
    """All items, and all of another pass."""

    many_passes = True

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        raise AssertionError("`begin` is asked")

    def begin(self, upstream: Any, context: Any) -> Iterator[Any]:
        return iter([*upstream(), *upstream()])


def test_a_step_may_pass_over_its_items_several_times() -> None:
    pipe = Pipeline.from_dataset("abc", shuffle=True, seed=1)
    assert list(pipe.apply(Twice())) == [*pipe.run(epoch=0), *pipe.run(epoch=1)]
    assert pipe.apply(Twice()).repeats
    one, other = numbers().fork()
    with pytest.raises(ValueError, match="a branch of a fork is repeated apart from the others"):
        one.apply(Twice()).zip(other, strict=False).run()


RANKS = 2


@dataclass(frozen=True)
class Ranked(Totals):
    """The same totals, which belong to so many ranks."""

    def identity(self) -> str:
        return f"{super().identity()} of {RANKS} ranks"


def test_a_state_is_refused_where_a_step_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = numbers().apply(Ranked())
    with pipe.run() as run:
        items = [next(run) for _ in range(4)]
        state = run.state_dict()
    assert items + list(pipe.run(state=state)) == list(pipe)
    monkeypatch.setattr(sys.modules[__name__], "RANKS", 3)
    with pytest.raises(StateError, match=r"'ranked.* of 2 ranks' in the state and .* of 3 ranks'"):
        pipe.run(state=state)


@dataclass(frozen=True)
class Sentences(Operator):
    """Lists of items up to one that ends in zero; it marks where it holds nothing."""

    marks_inputs = True

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return SentencesIterator(items, context)


class SentencesIterator(OwnIterator):
    def __init__(self, items: Iterator[Any], context: Any) -> None:
        super().__init__(items, context.start)
        self.taken, self.mark = context.first, context.mark

    def __next__(self) -> Any:
        try:
            while not self.kept or self.kept[-1] % 10:
                self.kept.append(next(self.items))
                self.taken += 1
        except StopIteration:
            if not self.kept:
                raise
        found, self.kept = self.kept, []
        self.given += 1
        self.mark(self.given, self.taken)
        return found


@pytest.mark.parametrize("place", [{}, {"backend": "threads", "num_workers": 2}])
def test_a_step_that_marks_its_inputs_is_resumed_there(place: dict[str, Any]) -> None:
    calls: list[int] = []

    def work(item: int) -> int:
        calls.append(item)
        return item

    pipe = Pipeline.from_dataset(range(200)).map(work, **place).apply(Sentences())
    whole = list(pipe)
    for stop in range(len(whole) + 1):
        with pipe.run() as run:
            for _ in range(stop):
                next(run)
            state = json.loads(json.dumps(run.state_dict()))
        calls.clear()
        with pipe.run(state=state) as run:
            assert list(run) == whole[stop:]
        assert sorted(calls) == [item for sentence in whole[stop:] for item in sentence]
