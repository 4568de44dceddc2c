"""Rules for every step: its items are those of a list, errors pass through, lengths are true."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripts import (
    Oops,
    Reference,
    Script,
    Step,
    begin,
    errors_in,
    items_in,
    no_deadline,
    scripted,
    steps,
)

from hybridloader import Memory, Pipeline

KEPT = pytest.mark.filterwarnings("ignore:a pass in which items raised")

items = st.one_of(st.integers(0, 9), st.none(), st.text(max_size=2))
errors = st.builds(Oops, st.integers(0, 99))
scripts = st.lists(st.one_of(items, items, errors), max_size=20)


def cost(item: Any) -> int:
    return item if isinstance(item, int) else 1


def kind(item: Any) -> str:
    return type(item).__name__


def double(item: Any) -> Any:
    return [item, item]


def in_batches(size: int, drop_last: bool) -> Reference:
    def batches(given: list[Any]) -> list[Any]:
        found = [given[at : at + size] for at in range(0, len(given), size)]
        return [batch for batch in found if len(batch) == size] if drop_last else found

    return batches


def by_cost(limit: int, padded: bool, most: int | None, drop_last: bool) -> Reference:
    def batches(given: list[Any]) -> list[Any]:
        found: list[list[Any]] = []
        batch: list[Any] = []
        for item in given:
            costs = [cost(other) for other in [*batch, item]]
            total = max(costs) * len(costs) if padded else sum(costs)
            if batch and total > limit:
                found.append(batch)
                batch = []
            batch = [*batch, item]
            if len(batch) == most:
                found.append(batch)
                batch = []
        return found if drop_last or not batch else [*found, batch]

    return batches


def by_kind(sizes: Callable[[str], int], drop_last: bool) -> Reference:
    def batches(given: list[Any]) -> list[Any]:
        found = []
        for at, item in enumerate(given):  # a batch is full where its last item is
            same = [i for i, other in enumerate(given[: at + 1]) if kind(other) == kind(item)]
            if len(same) % sizes(kind(item)) == 0:
                found.append([given[i] for i in same[-sizes(kind(item)) :]])
        left = []
        for name in {kind(item): None for item in given}:
            same = [i for i, other in enumerate(given) if kind(other) == name]
            left.append(same[len(same) // sizes(name) * sizes(name) :])
        left = sorted(part for part in left if part)
        return found if drop_last else found + [[given[i] for i in part] for part in left]

    return batches


SIZES = {"int": 2, "NoneType": 3, "str": 1}


def size_of(key: str) -> int:
    return SIZES[key]


CASES: dict[str, tuple[Step, Reference]] = {
    "batch": (steps.batch(3, collate_fn=list), in_batches(3, False)),
    "batch, full": (steps.batch(3, drop_last=True, collate_fn=list), in_batches(3, True)),
    "unbatch": (
        steps.unbatch(split=double),
        lambda given: [x for item in given for x in (item, item)],
    ),
    "batch_by": (steps.batch_by(cost, 12, collate_fn=list), by_cost(12, False, None, False)),
    "batch_by, padded": (
        steps.batch_by(cost, 12, padded=True, collate_fn=list),
        by_cost(12, True, None, False),
    ),
    "batch_by, at most": (
        steps.batch_by(cost, 12, drop_last=True, max_size=4, collate_fn=list),
        by_cost(12, False, 4, True),
    ),
    "batch_by, alone": (
        steps.batch_by(cost, 4, collate_fn=list, oversize="alone"),
        by_cost(4, False, None, False),
    ),
    "bucket_by": (steps.bucket_by(kind, 2, collate_fn=list), by_kind(lambda key: 2, False)),
    "bucket_by, full": (
        steps.bucket_by(kind, 3, drop_last=True, collate_fn=list),
        by_kind(lambda key: 3, True),
    ),
    "bucket_by, sizes": (
        steps.bucket_by(kind, SIZES, collate_fn=list),
        by_kind(SIZES.__getitem__, False),
    ),
    "bucket_by, function": (
        steps.bucket_by(kind, size_of, collate_fn=list),
        by_kind(size_of, False),
    ),
    "skip": (steps.skip(4), lambda given: given[4:]),
    "enumerate": (steps.enumerate(5), lambda given: list(enumerate(given, 5))),
    "shard": (steps.shard(3, 1), lambda given: given[1::3]),
    "cache": (steps.cache(), lambda given: given),
    "take more": (steps.take(99), lambda given: given),
}


BY_NUMBER = {"skip", "enumerate", "shard", "take more"}
"""Cases that go by the numbers of items: one that raises has its own."""


@KEPT
@pytest.mark.parametrize("name", CASES)
@no_deadline
@given(script=scripts)
def test_items_are_those_of_the_reference_and_errors_come_where_they_were_met(
    name: str, script: list[Any]
) -> None:
    """After the items before it, and before those that are pulled after it."""
    step, reference = CASES[name]
    source = Script(*script)
    run, items, errors = begin(step, source), [], []
    while True:
        try:
            items.append(next(run))
        except StopIteration:
            break
        except Oops as error:
            errors.append((error, source.pulled))
    if name in BY_NUMBER:
        places = reference(script)
        assert items == [p for p in places if not errors_in(p if type(p) is tuple else [p])]
    else:
        assert items == reference(items_in(script))
    assert errors == [(step, at + 1) for at, step in enumerate(script) if isinstance(step, Oops)]
    assert next(run, None) is None


def test_a_length_that_is_told_is_true() -> None:
    for name, (step, _) in CASES.items():
        for count in range(26):
            pipe = step(Pipeline.from_iterable([4] * count))
            assert pipe.length in ([0] if count == 0 else [None, len(list(pipe))]), name
        if name not in ("batch_by", "unbatch"):
            assert step(scripted(1)).length is None, name
        endless = step(Pipeline.from_iterable([1]).repeat()).length
        assert endless in (float("inf"), None, 99), name


def numbers() -> Iterator[int]:
    return iter([1, 2, 3])


def joined(how: str, **more: Any) -> Step:
    others = Pipeline.from_iterable(numbers)
    return lambda pipe: getattr(pipe, how)(others, **more)


DESCRIPTIONS: list[Step] = [
    *(step for step, _ in CASES.values()),
    steps.padded_batch(3, padding_value=-1, drop_last=True, lengths=True, memory=Memory(limit=0.1)),
    steps.unbatch(columns=True),
    steps.shuffle(5, 3),
    steps.repeat(),
    steps.cache("some/file", fingerprint="of this"),
    lambda pipe: Pipeline.from_dataset([1, 2, 3], shuffle=True, seed=3),
]

JOINS = [
    joined("zip", strict=False),
    joined("concat"),
    joined("mix", weights=(0.2, 0.8), seed=7, stop="first"),
    joined("interleave", block_length=2),
]


def test_a_description_is_a_value() -> None:
    for step in [*DESCRIPTIONS, *JOINS]:
        pipe = step(Pipeline.from_iterable(numbers))
        again = pickle.loads(pickle.dumps(pipe))
        assert step in JOINS or again.operators == pipe.operators
        assert (repr(again), str(again)) == (repr(pipe), str(pipe))
        operator = pipe.operators[-1]
        assert operator.describe().startswith(operator.name)
        with pytest.raises(dataclasses.FrozenInstanceError):
            operator.batch_size = 5


READ: list[int] = []


def read() -> Iterator[int]:
    for item in (1, 2, 3):
        READ.append(item)
        yield item


def test_a_fork_stays_one_fork_through_a_pickle() -> None:
    one, other = Pipeline.from_iterable(read).tee()
    again = pickle.loads(pickle.dumps(one.zip(other)))
    READ.clear()
    assert list(again) == [(1, 1), (2, 2), (3, 3)]
    assert READ == [1, 2, 3]


def test_closing_gives_up_what_is_left_and_closes_what_comes_before() -> None:
    for name, step in [
        *((name, step) for name, (step, _) in CASES.items()),
        ("", steps.shuffle(7)),
    ]:
        source = Script(*[1, None, "a", 3] * 25)
        found = begin(lambda pipe, step=step: step(pipe).prefetch(1), source)
        list(itertools.islice(found, 2))
        for _ in range(2):
            found.close()
        assert source.closed == 1, name
