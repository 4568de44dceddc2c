"""Steps of a user's own, by the recipe in docs/pipelines.md alone: they work wherever ours do."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from hybridloader import Pipeline, StateError
from hybridloader.errors import CacheError
from hybridloader.pipeline import Operator
from hybridloader.sampling import DistributedShuffleSampler

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


def in_a_fork(own: Step) -> Pipeline:
    one, other = numbers().tee()
    return Pipeline.zip(own(one), other.map(up, backend="threads", num_workers=1), strict=False)


PLACES: dict[str, Callable[[Step], Pipeline]] = {
    "alone": lambda own: own(numbers()),
    "after processes": lambda own: own(numbers().map(up, backend="fork", num_workers=1)),
    "between stages": lambda own: own(numbers().map(up, backend="threads", num_workers=1)).map(
        repr, backend="threads", num_workers=2
    ),
    "before a shard": lambda own: own(numbers()).shard(2, 1),
    "in a tee": in_a_fork,
    "in a concat": lambda own: own(numbers()).concat(own(numbers()), numbers()),
    "repeated": lambda own: own(numbers().shuffle(4, seed=2)).repeat(2),
    "before a cache": lambda own: own(numbers()).cache(),
    "twice": lambda own: own(numbers()).map(hash).apply(Alternate()),
}


def with_own(name: str, place: str) -> Pipeline:
    return PLACES[place](lambda pipe: pipe.apply(OWN[name][0]))


@pytest.mark.parametrize("place", PLACES)
def test_steps_give_what_steps_of_ours_give_and_are_resumed_after_any_item(place: str) -> None:
    processes = "processes" in place
    for name, (_, ours) in OWN.items():
        if processes and name != "totals":  # starting them twice for each stop takes long
            continue
        pipe = with_own(name, place)
        assert f"{name}()" in str(pipe)
        assert f"{name}()" in pipe.to_mermaid()
        items = list(pipe.run(seed=1))
        assert items == list(PLACES[place](ours).run(seed=1))
        assert pipe.length in (None, len(items))
        for stop in range(0, len(items) + 1, 4 if processes else 1):
            with with_own(name, place).run(seed=1, observe=True) as run:
                assert [next(run) for _ in range(stop)] == items[:stop]
                state = json.loads(json.dumps(run.state_dict()))
                assert str(run.stats())
            assert any(f"{name}()" in step for step in state["operators"])
            assert list(with_own(name, place).run(state=state)) == items[stop:], (name, stop)
    assert numbers().apply(Totals(3)).operators[-1].describe() == "totals(factor=3)"


# -- what the recipe says of each member ---------------------------------------------------------------


def members() -> set[str]:
    text = PAGE.read_text()
    table = text[text.index("| member | default |") :].split("\n\n")[0]
    return {
        name for line in table.splitlines() for name in re.findall(r"`(\w+)", line.split("|")[1])
    }


def test_the_recipe_names_members_and_these_tests_have_each_of_them() -> None:
    assert {"open", "length", "seek", "cheap", "keeps_count"} <= members() <= {*dir(Operator)}
    text = PAGE.read_text()
    others = text[text.index("Members for sources, joins") :].split("\n\n")[0]
    public = {name for name in dir(Operator) if not name.startswith("_")}
    assert members() | {*re.findall(r"`(\w+)`", others)} == public
    own = Path(__file__).read_text()
    for member in members():
        assert re.search(rf"    (def {member}\(|{member} = )", own), member


@pytest.mark.parametrize(("name", "thread"), [("totals", True), ("every_second", False)])
def test_a_cheap_step_gets_no_thread(name: str, thread: bool) -> None:
    rows = str(numbers().apply(OWN[name][0]).map(up, backend="threads", num_workers=1)).splitlines()
    assert rows[-2].startswith(name)
    assert ("a separate thread" in rows[-2]) == thread
    assert ("with the next step" in rows[-2]) != thread


def fails(item: int) -> int:
    if item == 3:
        raise ValueError(item)
    return item


def test_a_step_that_keeps_count_keeps_the_rows_of_a_zip() -> None:
    skipping = numbers().map(fails, on_error="skip")
    rows = list(skipping.apply(Totals()).zip(numbers()))
    assert rows[:4] == [(1, 1), (3, 2), (7, 4), (12, 5)]  # the third row is left out
    with pytest.raises(ValueError, match="after couples the number of that item is unknown"):
        skipping.apply(Couples()).zip(numbers(), strict=False)


@dataclass(frozen=True)
class Needing(Totals):
    """Can't run without something."""

    def check_run(self) -> None:
        raise FileNotFoundError(f"{self.name}: it is not there")


@pytest.mark.parametrize("place", ["in a tee", "between stages"])
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
    one, other = numbers().tee()
    with pytest.raises(
        ValueError, match="a branch of a tee is repeated, but not its other branches"
    ):
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


@dataclass(frozen=True)
class First(Alternate):
    goes_first = True


def test_a_step_that_goes_first_spares_the_work_before_it() -> None:
    for step, least in ((Alternate(), 12), (First(), 6)):
        calls: list[int] = []
        pipe = numbers().map(lambda item, calls=calls: calls.append(item) or item).apply(step)
        assert list(pipe) == [2, 4, 6, 8, 10, 12]
        assert len(calls) in (least, least + 1)  # the last item has no other


@dataclass(frozen=True)
class Apart(Operator):
    """Items that are marked as those of this step."""

    begins_anew = True
    anew: bool = field(default=True, compare=False, repr=False)

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return zip(repeat("apart"), items, strict=False)

    def seek(self, n: int) -> int:
        return n


@dataclass(frozen=True)
class Bound(Apart):
    begins_anew = False


def of_rank(step: Operator, rank: int, ranks: int) -> Pipeline:
    sampler = DistributedShuffleSampler(12, seed=0, num_replicas=ranks, rank=rank, uneven="exact")
    return Pipeline.from_dataset(range(12), sampler=sampler).apply(step)


def test_a_step_that_begins_with_any_item_is_resumed_on_other_ranks() -> None:
    def had_and_states(step: Operator) -> tuple[list[Any], list[Any]]:
        had, states = [], []
        for rank, count in enumerate((1, 3)):
            with of_rank(step, rank, 2).run(seed=1) as run:
                had += [next(run) for _ in range(count)]
                states.append(run.state_dict())
        return had, states

    had, states = had_and_states(Apart())
    state = of_rank(Apart(), 0, 3).merge_states(states)
    rest = [item for rank in range(3) for item in of_rank(Apart(), rank, 3).run(state=state)]
    assert sorted(had + rest) == [("apart", item) for item in range(12)]
    with pytest.raises(StateError, match=r"bound\(\) depends on the numbers of its items"):
        of_rank(Bound(), 0, 3).merge_states(had_and_states(Bound())[1])


RANK = 0


@dataclass(frozen=True)
class OfRank(Alternate):
    """The items of this rank."""

    note: str = field(default="", compare=False, repr=False)

    @property
    def share(self) -> tuple[int, int]:
        return 2, RANK


def test_a_file_of_a_cache_is_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = numbers().apply(OfRank()).cache(tmp_path / "kept")
    items = list(pipe)
    assert list(numbers().apply(OfRank(note="of no effect")).cache(tmp_path / "kept")) == items
    monkeypatch.setattr(sys.modules[__name__], "RANK", 1)
    with pytest.raises(CacheError, match=r"another pipeline, .* rank 0 of 2.* rank 1 of 2"):
        list(pipe)


@dataclass(frozen=True)
class Counted(Sentences):
    counts_errors = True


@pytest.mark.parametrize(("step", "again"), [(Sentences(), True), (Counted(), False)])
def test_a_step_that_counts_errors_is_resumed_at_its_mark_after_one(
    step: Operator, again: bool
) -> None:
    calls: list[int] = []

    def work(item: int) -> int:
        calls.append(item)
        if item == 3:
            raise KeyError(item)
        return item

    def drained(run: Iterator[Any], most: int = 99) -> list[Any]:
        found: list[Any] = []
        while len(found) < most:
            try:
                found.append(next(run))
            except KeyError:
                found.append("error")
            except StopIteration:
                break
        return found

    pipe = Pipeline.from_dataset(range(40)).map(work).apply(step)
    whole = drained(pipe.run())
    with pipe.run() as run:
        assert drained(run, 3) == whole[:3] == [[0], "error", [*range(1, 3), *range(4, 11)]]
        state = run.state_dict()
    calls.clear()
    assert drained(pipe.run(state=state)) == whole[3:]
    assert (3 in calls) == again


@dataclass(frozen=True)
class Drawn(Operator):
    """Pairs of an item and a random number."""

    seed: int | None = None

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return DrawnIterator(items, context.random(self.seed))

    def length(self, upstream: Any) -> Any:
        return upstream


class DrawnIterator(OwnIterator):
    def __init__(self, items: Iterator[Any], generator: random.Random) -> None:
        super().__init__(items)
        self.generator = generator

    def __next__(self) -> Any:
        return next(self.items), self.generator.random()


@pytest.mark.parametrize("backend", [None, "fork"])
def test_a_step_with_work_on_a_backend_draws_resumes_and_has_statistics(
    backend: str | None,
) -> None:
    where: Any = {"backend": backend, "num_workers": 2} if backend else {}

    def drawn(pipe: Pipeline, seed: int | None = None) -> Pipeline:
        return pipe.map(up, **where).apply(Drawn(seed))

    pipe = numbers().apply(drawn)
    with pipe.epochs(2, seed=7, observe=True) as epochs:
        first, second = map(list, epochs)
    inline = list(numbers().map(up).apply(Drawn()).run(seed=7))
    assert first == inline
    assert [item for item, _ in first] == [item for item, _ in second] == list(range(101, 114))
    assert len({number for _, number in first + second}) == 26
    assert list(pipe.run(seed=8)) != first
    mine = [list(numbers().apply(lambda pipe: drawn(pipe, 3)).run(seed=seed)) for seed in (7, 8)]
    assert mine[0] == mine[1] != first
    with pipe.run(seed=7, observe=True) as run:
        assert [next(run) for _ in range(5)] == first[:5]
        state = json.loads(json.dumps(run.state_dict()))
        assert any("drawn()" in row.name for row in run.stats().stages)
    assert list(pipe.run(state=state)) == first[5:]
