"""Rows of a `zip` when something fails: image `i` is never paired with label `j`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader import Pipeline, Replace, Retry, Skip, TooManyErrors, get_worker_info
from hybridloader.errors import IteratorClosed, ShardLost

GAP = ("gap", None)
Event = tuple[str, Any]
"""An item; an error in the place of one, or beside them; or the place of one that was left out."""


def events(run: Iterator[Any], most: int = 1000) -> list[Event]:
    """Return the items and errors of a run, until it ends or is closed."""
    found: list[Event] = []
    while len(found) < most:
        try:
            found.append(("item", next(run)))
        except StopIteration:
            break
        except IteratorClosed:
            found.append(("closed", None))
            break
        except Exception as error:
            found.append(("error", f"{type(error).__name__}: {str(error)[:40]}"))
    return found


def fails_at(*numbers: int) -> Callable[[Any], Any]:
    def function(item: Any) -> Any:
        if item in numbers:
            raise ValueError(item)
        return item

    return function


class Failing:
    """An iterable that raises in the places of some numbers, and goes on."""

    def __init__(self, count: int, *numbers: int) -> None:
        self.count, self.numbers = count, numbers

    def __iter__(self) -> Iterator[int]:
        get_worker_info()  # each of several readers is to have all of it
        failing = fails_at(*self.numbers)
        return map(failing, range(self.count))


def pairs(*numbers: int) -> list[Event]:
    return [("item", (number, number)) for number in numbers]


# -- one row -----------------------------------------------------------------------------------------

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}
PLACES = [{}, {"backend": "inline"}, THREADS, {"backend": "fork", "num_workers": 2}]


def test_sources_and_readers_that_fail_and_go_on_keep_their_rows() -> None:
    numbers = Pipeline.from_dataset(range(6))
    source = Pipeline.from_iterable(Failing(6, 2))
    assert events(iter(source.zip(numbers))) == [
        *pairs(0, 1),
        ("error", "ValueError: 2"),
        *pairs(3, 4, 5),
    ]
    for policy in ("raise", "skip"):
        readers = Pipeline.from_iterable(
            Failing(3, 1), num_workers=2, backend="threads", on_error=policy
        )
        found = events(iter(Pipeline.zip(readers, numbers)))
        errors = [("error", "ValueError: 1")] * 2 if policy == "raise" else []
        assert found == [
            ("item", (0, 0)),
            ("item", (0, 1)),
            *errors,
            ("item", (2, 4)),
            ("item", (2, 5)),
        ]


# -- budgets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES[:3], ids=["nobody", "inline", "threads"])
def test_a_budget_that_runs_out_shifts_no_row(place: dict[str, Any]) -> None:
    numbers = Pipeline.from_dataset(range(5))
    skipping = numbers.map(fails_at(1, 3), on_error=Skip(1), **place)
    with skipping.zip(numbers).run() as run:
        found = events(run)
        assert [item for kind, item in found if kind == "item"] == [(0, 0), (2, 2), (4, 4)]
        assert [kind for kind, _ in found] == ["item", "item", "error", "item"]
        assert len(run.skipped) == 2
    replacing = numbers.map(
        fails_at(1, 3), on_error=Replace(lambda item, error: -item, max_failures=1), **place
    )
    with replacing.zip(numbers).run() as run:
        found = events(run)
        rows = [item for kind, item in found if kind == "item"]
        assert rows == [(0, 0), (-1, 1), (2, 2), (-3, 3), (4, 4)]
        assert [kind for kind, _ in found].index("error") == 3
    with pytest.raises(TooManyErrors), replacing.enumerate().run() as run:
        list(run)


# -- where the number is not known -------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        lambda pipe: pipe.batch(2, collate_fn=list),
        lambda pipe: pipe.filter(bool),
        lambda pipe: pipe.flat_map(lambda item: [item]),
        lambda pipe: pipe.shuffle(3),
        lambda pipe: pipe.unbatch(split=lambda item: [item]),
        lambda pipe: pipe.cache(),
    ],
)
def test_what_is_left_out_and_not_counted_is_refused_when_the_pipeline_is_made(step: Any) -> None:
    numbers = Pipeline.from_dataset(range(6))
    bad = step(numbers.map(fails_at(2), on_error="skip"))
    with pytest.raises(ValueError, match=r"zip: in pipeline 1, map\(function\) skips items"):
        numbers.zip(bad)
    behind = step(numbers.map(fails_at(2))).map(abs, on_error="skip")
    numbers.zip(behind, strict=False)


def tens(item: int) -> list[int]:
    return [10 * item, 10 * item + 1]


def cost(item: int) -> int:
    return 1 + item % 3


def is_even(item: int) -> bool:
    return item % 2 == 0


UNCOUNTED: list[Callable[[Pipeline], Pipeline]] = [
    lambda pipe: pipe.filter(is_even),
    lambda pipe: pipe.flat_map(tens),
    lambda pipe: pipe.unbatch(split=tens),
    lambda pipe: pipe.shuffle(4, seed=1),
    lambda pipe: pipe.batch(2, collate_fn=tuple),
    lambda pipe: pipe.batch_by(cost, 4, collate_fn=tuple),
    lambda pipe: pipe.bucket_by(cost, 2, collate_fn=tuple),
]


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]], ids=["nobody", "threads"])
@pytest.mark.parametrize("step", UNCOUNTED)
def test_an_item_skipped_after_a_step_that_changes_the_count_takes_its_row_along(
    step: Callable[[Pipeline], Pipeline], place: dict[str, Any]
) -> None:
    given = list(step(Pipeline.from_dataset(range(12))))
    bad = [given[at] for at in (0, 2, 3, len(given) - 1)]
    expected: list[Event] = [
        ("item", (item, number)) for number, item in enumerate(given) if item not in bad
    ]
    branch = step(Pipeline.from_dataset(range(12))).map(fails_at(*bad), on_error="skip", **place)
    joined = branch.zip(Pipeline.from_dataset(range(len(given))))
    for taken in (0, 1, 2, len(expected)):
        with joined.run(seed=1) as run:
            found = events(run, most=taken)
            state = json.loads(json.dumps(run.state_dict()))
            found += events(run)
            assert len(run.skipped) == len(bad)
        assert found == expected
        assert events(joined.run(state=state)) == expected[taken:]


def test_a_batch_that_comes_short_or_a_filter_that_leaves_out_is_refused_too() -> None:
    numbers = Pipeline.from_dataset(range(6))
    batches = Pipeline.from_dataset(
        range(6), batch_sampler=[[0, 1], [2]], collate_fn=list, on_error="skip"
    )
    for bad in (batches, numbers.filter(bool, on_error="skip")):
        with pytest.raises(ValueError, match="makes no one item of one"):
            numbers.zip(bad)
        bad.zip()


def test_an_error_behind_which_nobody_knows_the_rows_ends_them() -> None:
    numbers = Pipeline.from_dataset(range(6))
    batches = numbers.map(fails_at(3)).batch(2, collate_fn=list)
    with batches.zip(numbers.batch(2, collate_fn=list)).run() as run:
        assert next(run) == ([0, 1], [0, 1])
        with pytest.raises(ValueError, match="3") as caught:
            next(run)
        assert "zip: after batch, it is unknown to which row" in caught.value.__notes__[-1]
        with pytest.raises(IteratorClosed):
            next(run)


def test_a_generator_that_fails_is_over_and_says_so() -> None:
    def three() -> Iterator[int]:
        yield from map(fails_at(1), range(3))

    numbers = Pipeline.from_dataset(range(6))
    for source in (
        Pipeline.from_iterable(three),
        Pipeline.from_iterable(three, backend="threads", num_workers=1),
    ):
        lost = events(iter(source.concat(numbers)))
        assert lost[:2] == [("item", 0), ("error", "ValueError: 1")]
        assert lost[2][1].startswith(ShardLost.__name__)
        assert lost[3:] == [("item", number) for number in range(6)]
        found = events(iter(source.concat(numbers).zip(numbers, strict=False)))
        assert [kind for kind, _ in found] == ["item", "error", "error", "closed"]


# -- tasks that fail as a whole ----------------------------------------------------------------------


class SetUpOnce:
    """A function that the first worker alone can set up."""

    def __init__(self) -> None:
        self.setups: list[int] = []

    def setup(self) -> None:
        self.setups.append(0)
        if len(self.setups) > 1:
            raise ValueError("no second")

    def __call__(self, item: int) -> int:
        return item


def test_every_item_of_a_worker_that_can_not_be_set_up_fails_in_its_place() -> None:
    numbers = Pipeline.from_dataset(range(1500))
    found = events(iter(numbers.map(SetUpOnce(), **THREADS).zip(numbers)), most=5000)
    assert len(found) == 1500
    items = [item for kind, item in found if kind == "item"]
    assert items
    assert all(one == other for one, other in items)


@pytest.mark.parametrize("seeding", [None, "sample"])
@pytest.mark.parametrize("backend", ["inline", "threads", "fork"])
def test_a_reader_that_can_not_be_opened_says_so_once_and_the_others_go_on(
    backend: str, seeding: Any
) -> None:
    from hybridloader import get_worker_info

    def part() -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            raise ValueError("open")
        return iter(range(3))

    pipe = Pipeline.from_iterable(part, backend=backend, num_workers=2, seeding=seeding)
    with pipe.run() as run:
        assert events(run) == [("error", "ValueError: open"), *(("item", n) for n in range(3))]


# -- any pipeline ------------------------------------------------------------------------------------


def hits(item: Any, tag: str) -> bool:
    return zlib.crc32(f"{tag}{item!r}".encode()) % 4 == 0


def failing(tag: str) -> Callable[[Any], Any]:
    def function(item: Any) -> Any:
        if hits(item, tag):
            raise ArithmeticError(tag)
        return item

    return function


def instead(item: Any, error: Exception) -> Any:
    return ("instead", item)


@dataclass(frozen=True)
class Branch:
    """A pipeline, and what is expected of it when a zip pulls it."""

    told: str
    pipe: Pipeline
    events: tuple[Event, ...]

    def __repr__(self) -> str:
        return self.told


def source(count: int) -> Branch:
    return Branch(
        f"numbers({count})",
        Pipeline.from_iterable(range(count)),
        tuple(("item", n) for n in range(count)),
    )


def in_places(events: tuple[Event, ...]) -> Iterator[tuple[list[Event], Event]]:
    """Each that takes a place, with what came beside before it."""
    before: list[Event] = []
    for event in events:
        if event[0] == "beside":
            before.append(event)
        else:
            yield before, event
            before = []
    if before:
        yield before, ("end", None)


def extended(before: Branch, step: str, place: dict[str, Any]) -> Branch:
    pipe, given = before.pipe, before.events
    tag = f"{step}{len(before.told)}"
    found: list[Event] = []
    if step in ("raise", "skip", "retry", "replace"):
        policy = {
            "raise": "raise",
            "skip": Skip(max_failures=None),
            "retry": Retry(1, backoff=0, then=Skip(max_failures=None)),
            "replace": Replace(instead, max_failures=None),
        }[step]
        pipe = pipe.map(failing(tag), on_error=policy, **place)
        for kind, item in given:
            if kind != "item" or not hits(item, tag):
                found.append((kind, item))
            elif step == "raise":
                found.append(("error", f"ArithmeticError: {tag}"))
            else:
                found.append(("item", instead(item, ValueError())) if step == "replace" else GAP)
    else:
        number = -1
        for before_it, (kind, item) in in_places(given):
            number += 1
            if step == "take" and number == 5:
                break
            found += before_it
            dropped = (step == "drop" and number < 2) or (step == "shard" and number % 2)
            if dropped and kind == "error":
                found.append(("beside", item))
            elif kind == "item" and step in ("enumerate", "shard") and not dropped:
                found.append(("item", (number, item)))
            elif not dropped and kind != "end":
                found.append((kind, item))
        steps: dict[str, Callable[[], Pipeline]] = {
            "take": lambda: pipe.take(5),
            "drop": lambda: pipe.skip(2),
            "enumerate": lambda: pipe.enumerate().prefetch(2),
            "shard": lambda: pipe.enumerate().shard(2, 0),
        }
        pipe = steps[step]()
    return Branch(f"{before.told}.{step}", pipe, tuple(found))


def zipped(*branches: Branch) -> Branch:
    found: list[Event] = []
    lines = [iter(branch.events) for branch in branches]
    while True:
        row: list[Event] = []
        for line in lines:
            for event in line:
                if event[0] != "beside":
                    row.append(event)
                    break
                found.append(event)
            else:
                break
        errors = [event for event in row if event[0] == "error"]
        if len(row) < len(lines):
            found += errors[:1]
            break
        if errors or GAP in row:
            found.append((errors or [GAP])[0])
        else:
            found.append(("item", tuple(item for _, item in row)))
    pipe = Pipeline.zip(*(branch.pipe for branch in branches), strict=False)
    return Branch(f"zip{branches}", pipe, tuple(found))


def in_turn(one: Branch, other: Branch) -> Branch:
    """An interleave of both, as far as nothing comes beside the items of either."""
    if any(kind == "beside" for branch in (one, other) for kind, _ in branch.events):
        return one
    found = []
    for at in range(max(len(one.events), len(other.events))):
        found += [*one.events[at : at + 1], *other.events[at : at + 1]]
    return Branch(f"turns{one, other}", one.pipe.interleave(other.pipe), tuple(found))


def in_a_row(one: Branch, other: Branch) -> Branch:
    return Branch(f"row{one, other}", one.pipe.concat(other.pipe), (*one.events, *other.events))


STEPS = ["raise", "skip", "retry", "replace", "take", "drop", "enumerate", "shard"]
places = st.sampled_from([{}, {"backend": "inline"}, THREADS])


def wider(inner: st.SearchStrategy[Branch]) -> st.SearchStrategy[Branch]:
    steps = st.builds(extended, inner, st.sampled_from(STEPS), places)
    joins = st.sampled_from([zipped, in_turn, in_a_row])
    return steps | steps | st.builds(lambda join, a, b: join(a, b), joins, inner, inner)


lines = st.recursive(st.builds(source, st.integers(0, 12)), wider, max_leaves=4)


@settings(deadline=None, max_examples=80)
@given(st.lists(lines, min_size=2, max_size=3), st.integers(0, 10))
def test_rows_are_those_of_plain_python_and_go_on_behind_any_of_them(
    branches: list[Branch], taken: int
) -> None:
    whole = zipped(*branches)
    expected = [
        ("error" if kind == "beside" else kind, item)
        for kind, item in whole.events
        if kind != "gap"
    ]
    run = whole.pipe.run(seed=1)
    found = events(run, most=taken)
    state = json.loads(json.dumps(run.state_dict()))
    found += events(run)
    assert found == expected
    assert events(whole.pipe.run(state=state)) == expected[taken:]
