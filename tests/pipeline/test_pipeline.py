"""Pipelines give what a plain loop gives, wherever their steps run."""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridloader import Pipeline
from hybridloader.errors import CacheError

property_test = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


# -- functions that take whatever the steps before have made ---------------------------------------


class Trip(Exception):
    pass


def number(item: Any) -> int:
    """One that depends on nothing but the value."""
    return zlib.crc32(repr(item).encode())


def tag(item: Any) -> Any:
    return "m", item


def keep_some(item: Any) -> bool:
    return number(item) % 3 > 0


def several(item: Any) -> list[Any]:
    return [("f", item, k) for k in range(number(item) % 4)]


def opened(item: Any) -> list[Any]:
    return item if isinstance(item, list) else [item]


def trip(item: Any) -> Any:
    if number(item) % 4 == 0:
        raise Trip(item, "tripped")
    return "t", item


def give_and_trip(item: Any) -> Iterator[Any]:
    for k in range(number(item) % 3):
        yield "g", item, k
    if number(item) % 2:
        raise Trip(item, "on the way")


# -- what a plain loop makes of the same steps -----------------------------------------------------


class Op(NamedTuple):
    """A step: the name of the method, and its parameters."""

    kind: str
    args: tuple[Any, ...]
    where: tuple[tuple[str, Any], ...] = ()


Outcome = tuple[str, Any]
"""``("item", value)`` or ``("error", (type, args))``, which counts as the item whose place it has.

``"beside"`` is an error whose place was left out, so that it stands between two others."""


def plain(ops: tuple[Op, ...], count: int, epoch: int) -> Iterator[Outcome]:
    """The outcomes of one pass, by loops over them."""
    for kind, value in _plain(ops, count, epoch):
        yield "error" if kind == "beside" else kind, value


def _plain(ops: tuple[Op, ...], count: int, epoch: int) -> Iterator[Outcome]:
    if not ops:
        return (("item", k) for k in range(count))
    *before, (kind, args, _) = ops
    if kind == "repeat":
        passes = (_plain(tuple(before), count, epoch * args[0] + k) for k in range(args[0]))
        return itertools.chain.from_iterable(passes)
    return PLAIN[kind](_plain(tuple(before), count, epoch), epoch, *args)


def _each(
    function: Callable[[Any], Any],
) -> Callable[[Iterator[Outcome], int, Callable[[Any], Any]], Iterator[Outcome]]:
    """A step that does `function(user's function, item)` for each item, which gives an iterable."""

    def step(
        outcomes: Iterator[Outcome], epoch: int, users: Callable[[Any], Any]
    ) -> Iterator[Outcome]:
        for kind, value in outcomes:
            if kind != "item":
                yield kind, value
                continue
            try:
                for result in function(users, value):
                    yield "item", result
            except Trip as error:
                yield "error", (Trip, error.args)

    return step


def plain_batch(outcomes: Iterator[Outcome], epoch: int, size: int) -> Iterator[Outcome]:
    batch: list[Any] = []
    for kind, value in outcomes:
        if kind != "item":
            yield kind, value
            continue
        batch.append(value)
        if len(batch) == size:
            yield "item", batch
            batch = []
    if batch:
        yield "item", batch


def plain_unbatch(outcomes: Iterator[Outcome], epoch: int) -> Iterator[Outcome]:
    return _each(lambda f, x: f(x))(outcomes, epoch, opened)


def plain_take(outcomes: Iterator[Outcome], epoch: int, count: int) -> Iterator[Outcome]:
    left = count
    while left:
        try:
            kind, value = next(outcomes)
        except StopIteration:
            return
        left -= kind != "beside"
        yield kind, value


def plain_skip(
    outcomes: Iterator[Outcome], epoch: int, first: int, step: int = 1
) -> Iterator[Outcome]:
    seen = 0
    for kind, value in outcomes:
        given = seen >= first and (seen - first) % step == 0
        if kind == "beside" or given:
            yield kind, value
        elif kind == "error":
            yield "beside", value
        seen += kind != "beside"


def plain_shard(
    outcomes: Iterator[Outcome], epoch: int, replicas: int, rank: int
) -> Iterator[Outcome]:
    return plain_skip(outcomes, epoch, rank, replicas)


def plain_enumerate(outcomes: Iterator[Outcome], epoch: int, start: int) -> Iterator[Outcome]:
    for kind, value in outcomes:
        yield kind, ((start, value) if kind == "item" else value)
        start += kind != "beside"


def plain_shuffle(
    outcomes: Iterator[Outcome], epoch: int, size: int, seed: int
) -> Iterator[Outcome]:
    generator, held = random.Random(f"{seed}/{epoch}"), list[Any]()
    for kind, value in outcomes:
        if kind != "item":
            yield kind, value
            continue
        held.append(value)
        if len(held) == size:
            yield "item", _draw(generator, held)
    while held:
        yield "item", _draw(generator, held)


def _draw(generator: random.Random, held: list[Any]) -> Any:
    place = int(generator.random() * len(held))
    held[place], held[-1] = held[-1], held[place]
    return held.pop()


PLAIN: dict[str, Any] = {
    "map": _each(lambda f, x: [f(x)]),
    "flat_map": _each(lambda f, x: f(x)),
    "filter": _each(lambda f, x: [x] if f(x) else []),
    "batch": plain_batch,
    "unbatch": plain_unbatch,
    "take": plain_take,
    "skip": plain_skip,
    "shard": plain_shard,
    "enumerate": plain_enumerate,
    "shuffle": plain_shuffle,
}


# -- the same by the engine ------------------------------------------------------------------------


def built(ops: tuple[Op, ...], count: int) -> Pipeline:
    pipe = Pipeline.from_dataset(range(count))
    for kind, args, where in ops:
        more: dict[str, Any] = dict(where)
        if kind == "batch":
            more["collate_fn"] = list
        if kind == "unbatch":
            pipe = pipe.unbatch(split=opened)
            continue
        pipe = getattr(pipe, kind)(*args, **more)
    return pipe


def outcomes_of(run: Iterator[Any]) -> Iterator[Outcome]:
    while True:
        try:
            item = next(run)
        except StopIteration:
            return
        except Trip as error:
            notes = [note for note in error.__notes__ if note.startswith("In stage ")]
            yield "error", (Trip, error.args) if len(notes) == 1 else error.__notes__
        else:
            yield "item", item


@st.composite
def placements(draw: st.DrawFn, *, ordered: bool = True) -> tuple[tuple[str, Any], ...]:
    backends = ["inline", "threads", "threads", "threads", "fork", "shared-memory"]
    where: dict[str, Any] = {"backend": draw(st.sampled_from(backends))}
    where["num_workers"] = draw(st.integers(1, 3))
    where["prefetch"] = draw(st.sampled_from([None, None, 1, 2, 7]))
    where["buffer_bytes"] = draw(st.sampled_from([None, None, 1, 500]))
    where["threads_per_worker"] = draw(st.sampled_from([1, 1, 1, 3]))
    where["fuse"] = draw(st.booleans())
    if not ordered:
        where["in_order"] = draw(st.booleans())
    return tuple(where.items())


def works(functions: dict[str, list[Any]], *, ordered: bool = True) -> st.SearchStrategy[Op]:
    kinds = [
        st.builds(
            Op,
            st.just(kind),
            st.sampled_from(found).map(lambda f: (f,)),
            st.one_of(st.just(()), placements(ordered=ordered)),
        )
        for kind, found in functions.items()
    ]
    return st.one_of(*kinds)


def step(kind: str, *args: Any) -> st.SearchStrategy[Op]:
    return st.builds(Op, st.just(kind), st.tuples(*args), st.just(()))


SMALL = st.integers(1, 5)
QUIET = {"map": [tag], "flat_map": [several], "filter": [keep_some]}
REORDERING = st.one_of(
    step("batch", SMALL),
    step("unbatch"),
    step("take", st.integers(0, 30)),
    step("skip", st.integers(0, 4)),
    step("enumerate", SMALL),
    step("shuffle", SMALL, SMALL),
    step("repeat", st.integers(0, 3)),
)
SHARDING = st.integers(1, 3).flatmap(
    lambda replicas: step("shard", st.just(replicas), st.integers(0, replicas - 1))
)


@settings(property_test, max_examples=50)
@given(
    st.lists(st.one_of(works(QUIET), works(QUIET), REORDERING, SHARDING), max_size=5),
    st.integers(0, 30),
    st.integers(0, 3),
)
def test_a_pipeline_gives_what_a_plain_loop_gives(ops: list[Op], count: int, epoch: int) -> None:
    expected = list(plain(tuple(ops), count, epoch))
    pipe = built(tuple(ops), count)
    assert list(outcomes_of(pipe.run(epoch=epoch, seed=1))) == expected
    if pipe.length is not None:
        assert pipe.length == len(expected)
        assert len(pipe) == len(expected)


@settings(property_test, max_examples=15)
@given(
    # Behind a flat_map of the same task, an error takes more along than its item: see below.
    st.lists(st.one_of(works({"map": [tag, trip], "filter": [keep_some]}), REORDERING), max_size=4),
    works({"flat_map": [give_and_trip], "map": [trip]}),
    st.integers(0, 30),
)
def test_exceptions_come_out_in_the_place_of_their_items(
    ops: list[Op], last: Op, count: int
) -> None:
    whole = (*ops, last)
    expected = list(plain(whole, count, 0))
    assert list(outcomes_of(built(whole, count).run(seed=1))) == expected


@settings(property_test, max_examples=10)
@given(
    st.lists(works({"map": [tag, trip], "filter": [keep_some]}, ordered=False), max_size=3),
    works({"flat_map": [several, give_and_trip]}, ordered=False),
    st.integers(0, 30),
)
def test_an_unordered_pipeline_gives_the_same_in_any_order(
    ops: list[Op], last: Op, count: int
) -> None:
    whole = (*ops, last)
    expected = Counter(map(repr, plain(whole, count, 0)))
    assert Counter(map(repr, outcomes_of(built(whole, count).run()))) == expected


@settings(property_test, max_examples=12)
@given(st.data(), st.sampled_from(["zip", "concat", "interleave"]), st.integers(0, 20))
def test_forks_and_joins_give_what_plain_loops_give(
    data: st.DataObject, join: str, count: int
) -> None:
    def work() -> tuple[Op, ...]:
        return tuple(data.draw(st.lists(works({"map": [tag]}), max_size=2)))

    before, left, right, behind = work(), work(), work(), work()
    forked = data.draw(st.booleans())
    a, b = built(before, count).tee(2) if forked else (built(before, count), built(before, count))
    for one in left:
        a = a.map(tag, **dict(one.where))
    for one in right:
        b = b.map(tag, **dict(one.where))
    pipe = getattr(a, join)(b)
    for one in behind:
        pipe = pipe.map(tag, **dict(one.where))

    one = [item for _, item in plain((*before, *left), count, 0)]
    other = [item for _, item in plain((*before, *right), count, 0)]
    joined: list[Any] = list(zip(one, other, strict=True))
    if join == "concat":
        joined = one + other
    elif join == "interleave":
        joined = [item for pair in joined for item in pair]
    for _ in behind:
        joined = list(map(tag, joined))
    assert list(pipe) == joined


def test_a_cache_is_of_no_use_to_another_pipeline_however_alike_they_look(tmp_path: Path) -> None:
    long = "a name that is cut where it is shown, because it takes so many characters: "
    base = Pipeline.from_dataset(range(4))

    def behind(*names: str) -> Pipeline:
        return base.zip(*(base.map(abs, name=name) for name in names)).cache(tmp_path / "kept")

    assert len(list(behind(long + "one"))) == 4
    assert len(list(behind(long + "one"))) == 4
    with pytest.raises(CacheError, match="another"), behind(long + "two").run() as run:
        list(run)


def test_a_shard_is_taken_before_work_that_would_be_thrown_away_and_behind_what_chooses() -> None:
    called: list[int] = []

    def counted(item: int) -> int:
        called.append(item)
        return item

    def odd(item: int) -> bool:
        return item % 2 == 1

    pipe = Pipeline.from_dataset(range(20))
    assert list(pipe.map(counted, backend="threads", num_workers=1).shard(4, 1)) == [
        1,
        5,
        9,
        13,
        17,
    ]
    assert called == [1, 5, 9, 13, 17]
    where: dict[str, Any] = {"backend": "threads", "num_workers": 1}
    assert list(pipe.filter(odd, **where).shard(4, 1)) == [3, 11, 19]
    assert list(pipe.filter(odd).map(counted, **where).shard(5, 0)) == [1, 11]
    assert list(pipe.flat_map(lambda k: [k, k], **where).shard(20, 1)) == [0, 10]
