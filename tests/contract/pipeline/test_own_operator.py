"""Steps of a user's own, by the recipe in docs/pipelines.md alone: they work wherever ours do."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.pipeline_model import events
from support.platforms import REPOSITORY

from hybridloader import Pipeline, StateError
from hybridloader.errors import CacheError
from hybridloader.pipeline import Operator
from hybridloader.sampling import DistributedShuffleSampler

PAGE = REPOSITORY / "docs" / "pipelines.md"
THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}

# -- three steps: with the defaults alone, one for one, and cheap --------------------------------------


@dataclass(frozen=True)
class Couples(Operator):
    """Every two items, and no third one."""

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return zip(items, items, strict=False)


@dataclass(frozen=True)
class Totals(Operator):
    """The sum of the items until now: where it begins depends on them, and none is left out."""

    factor: int = 1

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return TotalsIterator(map(self.factor.__mul__, items))

    def length(self, upstream: Any) -> Any:
        return upstream


class TotalsIterator(Iterator[Any]):
    def __init__(self, items: Iterator[Any]) -> None:
        self.items, self.total = items, 0

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
        return islice(items, 1, None, 2)

    def seek(self, n: int) -> int:
        return 2 * n

    def length(self, upstream: Any) -> Any:
        return None if upstream is None else upstream // 2


def couples(pipe: Pipeline) -> Pipeline:
    return pipe.batch(2, drop_last=True, collate_fn=tuple)


def totals(pipe: Pipeline) -> Pipeline:
    return Pipeline.from_iterable(lambda: accumulate(pipe))


def alternate(pipe: Pipeline) -> Pipeline:
    return couples(pipe).map(itemgetter(1))


OWN: dict[str, tuple[Operator, Callable[[Pipeline], Pipeline]]] = {
    "couples": (Couples(), couples),
    "totals": (Totals(), totals),
    "every_second": (Alternate(), alternate),
}
"""Each with steps of ours that do the same."""

Step = Callable[[Pipeline], Pipeline]


def numbers() -> Pipeline:
    return Pipeline.from_dataset(range(1, 14))


def up(item: int) -> int:
    return item + 100


PLACES: dict[str, Callable[[Step], Pipeline]] = {
    "alone": lambda own: own(numbers()),
    "after processes": lambda own: own(numbers().map(up, backend="fork", num_workers=1)),
    "between stages": lambda own: own(numbers().map(up, **THREADS)).map(repr, **THREADS),
    "before a shard": lambda own: own(numbers()).shard(2, 1),
    "in a zip": lambda own: own(numbers()).zip(numbers().map(up, **THREADS), strict=False),
    "in a concat": lambda own: own(numbers()).concat(own(numbers()), numbers()),
    "before a cache": lambda own: own(numbers()).cache(),
}


def stopped(pipe: Pipeline, stop: int, **how: Any) -> tuple[list[Any], Any]:
    """Return the first items, and the state behind them."""
    with pipe.run(**how) as run:
        return list(islice(run, stop)), json.loads(json.dumps(run.state_dict()))


@pytest.mark.parametrize("place", PLACES)
def test_steps_give_what_steps_of_ours_give_and_are_resumed_after_any_item(place: str) -> None:
    processes = "processes" in place
    for name, (own, ours) in OWN.items():
        if processes and name != "totals":  # starting them twice for each stop takes long
            continue

        def make(own: Operator = own) -> Pipeline:
            return PLACES[place](lambda pipe: pipe.apply(own))

        assert f"{name}()" in str(make())
        with make().run(observe=True) as run:
            items = list(run)
            assert str(run.stats())
        assert items == list(PLACES[place](ours))
        assert make().length in (None, len(items))
        for stop in range(0, len(items) + 1, 4 if processes else 1):
            begun, state = stopped(make(), stop)
            assert begun == items[:stop]
            assert any(f"{name}()" in step for step in state["operators"])
            assert list(make().run(state=state)) == items[stop:], (name, stop)
    assert numbers().apply(Totals(3)).operators[-1].describe() == "totals(factor=3)"


# -- what the recipe says of each member ---------------------------------------------------------------


def members() -> set[str]:
    text = PAGE.read_text()
    table = text[text.index("| member | default |") :].split("\n\n")[0]
    return {
        name for line in table.splitlines() for name in re.findall(r"`(\w+)", line.split("|")[1])
    }


def test_the_recipe_names_members_and_these_tests_have_each_of_them() -> None:
    assert {"open", "length", "seek", "cheap"} <= members() <= {*dir(Operator)}
    text = PAGE.read_text()
    others = text[text.index("Members for sources, joins") :].split("\n\n")[0]
    public = {name for name in dir(Operator) if not name.startswith("_")}
    assert members() | {*re.findall(r"`(\w+)`", others)} == public
    own = Path(__file__).read_text()
    for member in members():
        assert re.search(rf"    (def {member}\(|{member} = )", own), member


@pytest.mark.parametrize(("name", "thread"), [("totals", True), ("every_second", False)])
def test_a_cheap_step_gets_no_thread(name: str, thread: bool) -> None:
    rows = str(numbers().apply(OWN[name][0]).map(up, **THREADS)).splitlines()
    assert rows[-2].startswith(name)
    assert ("a separate thread" in rows[-2]) == thread
    assert ("with the next step" in rows[-2]) != thread


def fails_at_3(item: int) -> int:
    if item == 3:
        raise KeyError(item)
    return item


@dataclass(frozen=True)
class Needing(Totals):
    """Can't run without something."""

    def check_run(self) -> None:
        raise FileNotFoundError(f"{self.name}: it is not there")


def test_a_step_may_refuse_before_anything_is_started() -> None:
    threads = threading.active_count()
    for place in ("in a zip", "between stages"):
        pipe = PLACES[place](lambda pipe: pipe.apply(Needing()))
        for run in (pipe.run, pipe.epochs):
            with pytest.raises(FileNotFoundError, match="needing: it is not there"):
                run()
    assert threading.active_count() == threads


@dataclass(frozen=True)
class Twice(Operator):
    """All items, and all of another pass."""

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        raise AssertionError("`begin` is asked")

    def begin(self, upstream: Any, context: Any) -> Iterator[Any]:
        return iter([*upstream(), *upstream()])


def test_a_step_may_pass_over_its_items_several_times() -> None:
    pipe = Pipeline.from_dataset("abc", shuffle=True, seed=1)
    assert list(pipe.apply(Twice())) == [*pipe.run(epoch=0), *pipe.run(epoch=1)]


@dataclass(frozen=True)
class OfRank(Alternate):
    """The items of this rank."""

    note: str = field(default="", compare=False, repr=False)

    @property
    def share(self) -> tuple[int, int]:
        return RANKS

    def identity(self) -> str:
        return f"{super().identity()} of {RANKS[0]} ranks"


RANKS = (2, 0)


def test_states_and_cache_files_are_refused_where_a_step_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, file = numbers().apply(OfRank()), tmp_path / "kept"
    items, state = stopped(pipe, 4)
    assert items + list(pipe.run(state=state)) == list(pipe.cache(file))
    assert list(numbers().apply(OfRank(note="of no effect")).cache(file)) == list(pipe)
    monkeypatch.setattr(sys.modules[__name__], "RANKS", (2, 1))
    with pytest.raises(CacheError, match=r"another pipeline, .* rank 0 of 2.* rank 1 of 2"):
        list(pipe.cache(file))
    monkeypatch.setattr(sys.modules[__name__], "RANKS", (3, 0))
    with pytest.raises(StateError, match=r" of 2 ranks' in the state and .* of 3 ranks'"):
        pipe.run(state=state)


@dataclass(frozen=True)
class Sentences(Operator):
    """Lists of items up to one that ends in zero; it marks where it holds nothing."""

    marks_inputs = True

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return SentencesIterator(items, context)


@dataclass(frozen=True)
class Counted(Sentences):
    counts_errors = True


class SentencesIterator(Iterator[Any]):
    def __init__(self, items: Iterator[Any], context: Any) -> None:
        self.items, self.kept = items, list[Any]()
        self.given, self.taken, self.mark = context.start, context.first, context.mark

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


@pytest.mark.parametrize("place", [{}, THREADS], ids=["inline", "threads"])
def test_a_step_that_marks_its_inputs_is_resumed_there(place: dict[str, Any]) -> None:
    calls: list[int] = []

    def work(item: int) -> int:
        calls.append(item)
        return item

    pipe = Pipeline.from_dataset(range(200)).map(work, **place).apply(Sentences())
    whole = list(pipe)
    for stop in range(len(whole) + 1):
        _, state = stopped(pipe, stop)
        calls.clear()
        with pipe.run(state=state) as run:
            assert list(run) == whole[stop:]
        assert sorted(calls) == [item for sentence in whole[stop:] for item in sentence]


@pytest.mark.parametrize(("step", "again"), [(Sentences(), True), (Counted(), False)])
def test_a_step_that_counts_errors_is_resumed_at_its_mark_after_one(
    step: Operator, again: bool
) -> None:
    calls: list[int] = []

    def work(item: int) -> int:
        calls.append(item)
        return fails_at_3(item)

    pipe = Pipeline.from_dataset(range(40)).map(work).apply(step)
    whole = events(pipe.run())
    assert whole[1:3] == [("error", "3"), ("item", [1, 2, *range(4, 11)])]
    with pipe.run() as run:
        assert events(run, 3) == whole[:3]
        state = run.state_dict()
    calls.clear()
    assert events(pipe.run(state=state)) == whole[3:]
    assert (3 in calls) == again


class Marking(Operator):
    """All items, with a mark before each."""

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        for number, item in enumerate(items):
            context.mark(number, Value())
            yield item


class Value:
    kept: ClassVar = weakref.WeakSet[Any]()

    def __init__(self) -> None:
        self.kept.add(self)


@pytest.mark.parametrize("after", [Totals(), Alternate()], ids=["made again", "found again"])
def test_marks_that_no_state_can_need_any_more_are_let_go(after: Operator) -> None:
    pipe = Pipeline.from_iterable(lambda: iter(range(2000)), backend="inline", num_workers=1)
    counts = [len(Value.kept) for _ in pipe.filter(str).apply(Marking()).apply(after)]
    assert 2 <= max(counts) < 600


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

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return zip(repeat("apart"), items, strict=False)

    def seek(self, n: int) -> int:
        return n


@dataclass(frozen=True)
class Bound(Apart):
    begins_anew = False


def test_a_step_that_begins_with_any_item_is_resumed_on_other_ranks() -> None:
    def of_rank(step: Operator, rank: int, ranks: int) -> Pipeline:
        sampler = DistributedShuffleSampler(
            12, seed=0, num_replicas=ranks, rank=rank, uneven="exact"
        )
        return Pipeline.from_dataset(range(12), sampler=sampler).apply(step)

    def merged(step: Operator) -> tuple[list[Any], Any]:
        ranks = [stopped(of_rank(step, rank, 2), 1 + 2 * rank, seed=1) for rank in range(2)]
        state = of_rank(step, 0, 3).merge_states([state for _, state in ranks])
        return [item for items, _ in ranks for item in items], state

    had, state = merged(Apart())
    rest = [item for rank in range(3) for item in of_rank(Apart(), rank, 3).run(state=state)]
    assert sorted(had + rest) == [("apart", item) for item in range(12)]
    with pytest.raises(StateError, match=r"bound\(\) depends on the numbers of its items"):
        merged(Bound())


@dataclass(frozen=True)
class Drawn(Operator):
    """Pairs of an item and a random number."""

    seed: int | None = None

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        generator: random.Random = context.random(self.seed)
        return ((item, generator.random()) for item in items)


def test_a_step_with_work_on_a_backend_draws_resumes_and_has_statistics() -> None:
    def drawn(pipe: Pipeline, seed: int | None = None) -> Pipeline:
        return pipe.map(up, backend="fork", num_workers=2).apply(Drawn(seed))

    pipe = numbers().apply(drawn)
    whole = list(numbers().map(up).apply(Drawn()).run(seed=7))
    assert list(pipe.run(seed=8)) != whole
    mine = [list(numbers().apply(lambda pipe: drawn(pipe, 3)).run(seed=seed)) for seed in (7, 8)]
    assert mine[0] == mine[1] != whole
    with pipe.run(seed=7, observe=True) as run:
        assert list(islice(run, 5)) == whole[:5]
        state = json.loads(json.dumps(run.state_dict()))
        assert any("drawn()" in row.name for row in run.stats().stages)
    assert list(pipe.run(state=state)) == whole[5:]
