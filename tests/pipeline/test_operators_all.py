"""Rules for every operator: errors pass through, lengths are true, descriptions are values."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operator_context import (
    Oops,
    Reference,
    Script,
    context,
    drain,
    errors_in,
    items_in,
    no_deadline,
    outcome,
    run,
    scripted,
)

from hybridloader.memory.limits import Memory
from hybridloader.pipeline.operators.batches import (
    Batch,
    BatchBy,
    BucketBy,
    Pad,
    PaddedBatch,
    Unbatch,
)
from hybridloader.pipeline.operators.cache import Cache
from hybridloader.pipeline.operators.joins import Branch, Concat, Interleave, Mix, TeePoint, Zip
from hybridloader.pipeline.operators.order import (
    Enumerate,
    Repeat,
    ShardByRank,
    Shuffle,
    SkipFirst,
    Take,
)
from hybridloader.pipeline.operators.sources import Indices, Items
from hybridloader.running.operator import INFINITE, Operator

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


CASES: dict[str, tuple[Operator, Reference]] = {
    "batch": (Batch(3, collate_fn=list), in_batches(3, False)),
    "batch of one": (Batch(1, collate_fn=list), in_batches(1, False)),
    "batch, full": (Batch(3, drop_last=True, collate_fn=list), in_batches(3, True)),
    "unbatch": (Unbatch(split=double), lambda given: [x for item in given for x in (item, item)]),
    "batch_by": (BatchBy(cost, 12, collate_fn=list), by_cost(12, False, None, False)),
    "batch_by, padded": (
        BatchBy(cost, 12, padded=True, collate_fn=list),
        by_cost(12, True, None, False),
    ),
    "batch_by, at most": (
        BatchBy(cost, 12, drop_last=True, max_size=4, collate_fn=list),
        by_cost(12, False, 4, True),
    ),
    "batch_by, alone": (
        BatchBy(cost, 4, collate_fn=list, oversize="alone"),
        by_cost(4, False, None, False),
    ),
    "bucket_by": (BucketBy(kind, 2, collate_fn=list), by_kind(lambda key: 2, False)),
    "bucket_by, full": (
        BucketBy(kind, 3, drop_last=True, collate_fn=list),
        by_kind(lambda key: 3, True),
    ),
    "bucket_by, sizes": (
        BucketBy(kind, SIZES, collate_fn=list),
        by_kind(SIZES.__getitem__, False),
    ),
    "bucket_by, function": (
        BucketBy(kind, size_of, collate_fn=list),
        by_kind(size_of, False),
    ),
    "skip": (SkipFirst(4), lambda given: given[4:]),
    "skip nothing": (SkipFirst(0), lambda given: given),
    "enumerate": (Enumerate(5), lambda given: list(enumerate(given, 5))),
    "shard": (ShardByRank(3, 1), lambda given: given[1::3]),
    "shard of one": (ShardByRank(), lambda given: given),
    "cache": (Cache(), lambda given: given),
    "take more": (Take(99), lambda given: given),
    "repeat once": (Repeat(1), lambda given: given),
}


BY_NUMBER = {"skip", "skip nothing", "enumerate", "shard", "shard of one", "take more"}
"""Cases that go by the numbers of items: one that raises has its own."""


@KEPT
@pytest.mark.parametrize("name", CASES)
@no_deadline
@given(script=scripts)
def test_items_are_those_of_the_reference_and_errors_pass_between_them(
    name: str, script: list[Any]
) -> None:
    operator, reference = CASES[name]
    if name == "cache":
        operator = Cache()  # one that has kept nothing
    found = outcome(operator, *script)
    if name in BY_NUMBER:
        places = reference(script)
        assert items_in(found) == [
            p for p in places if not errors_in(p if type(p) is tuple else [p])
        ]
    else:
        assert items_in(found) == reference(items_in(script))
    assert errors_in(found) == errors_in(script)


@pytest.mark.parametrize("name", CASES)
@no_deadline
@given(script=scripts)
def test_an_error_comes_before_what_was_pulled_behind_it(name: str, script: list[Any]) -> None:
    """And after what came before it: nothing is held back that could have been given."""
    operator, _ = CASES[name]
    if name == "cache":
        return
    told = run(operator, *script)
    pulls: list[tuple[Any, int]] = []
    source = told
    while not isinstance(source, Script):
        source = source._items  # type: ignore[attr-defined]
    while True:
        try:
            next(told)
        except StopIteration:
            break
        except Oops as error:
            pulls.append((error, source.pulled))
    assert pulls == [(step, at + 1) for at, step in enumerate(script) if isinstance(step, Oops)]


@pytest.mark.parametrize("name", [name for name in CASES if name != "cache"])
@no_deadline
@given(count=st.integers(0, 25))
def test_a_length_that_is_told_is_true(name: str, count: int) -> None:
    operator, _ = CASES[name]
    told = operator.length(count)
    assert told is None or told == len(outcome(operator, *range(count)))
    assert operator.length(0) == 0
    if name not in ("batch_by", "unbatch"):
        assert operator.length(None) is None
    assert operator.length(INFINITE) in (INFINITE, None, 99)


CHAINS = (scripted(1, 2, 3), scripted("a", "b", "c"))
FORK = TeePoint(CHAINS[0], 2)

DESCRIPTIONS: list[Any] = [
    *(operator for operator, _ in CASES.values()),
    PaddedBatch(3, padding_value=-1, drop_last=True, lengths=True, memory=Memory(limit=0.1)),
    Pad(1.5, True),
    Unbatch(columns=True),
    Shuffle(5, 3),
    Take(3),
    Repeat(),
    Zip(CHAINS, strict=False),
    Concat(CHAINS),
    Mix(CHAINS, (0.2, 0.8), 7, "first"),
    Interleave(CHAINS, 2),
    Cache("some/file", "of this"),
    Indices([1, 2, 3], shuffle=True, seed=3),
    Items([1, 2, 3]),
]


@pytest.mark.parametrize("operator", DESCRIPTIONS, ids=lambda operator: type(operator).__name__)
def test_a_description_is_a_value(operator: Any) -> None:
    again = pickle.loads(pickle.dumps(operator))
    assert again == operator
    assert repr(again) == repr(operator)
    with pytest.raises(dataclasses.FrozenInstanceError):
        operator.batch_size = 5
    if isinstance(operator, Operator):
        assert operator.describe().startswith(operator.name)


def test_a_fork_stays_one_fork_through_a_pickle() -> None:
    one, other = Branch(FORK, 0), Branch(FORK, 1)
    again, another = pickle.loads(pickle.dumps((one, other)))
    assert again.tee is another.tee
    assert (again.number, another.number) == (0, 1)
    assert TeePoint(CHAINS[0], 2) != FORK


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Batch(0), ValueError, "batch: batch_size must be at least 1, got 0"),
    (lambda: Batch(2.0), TypeError, "batch: batch_size must be a whole number, got 2.0"),  # type: ignore[arg-type]
    (lambda: Batch(True), TypeError, "batch_size must be a whole number, got True"),
    (lambda: Batch(2, drop_last=1), TypeError, "drop_last must be True or False, got 1"),  # type: ignore[arg-type]
    (lambda: Batch(2, collate_fn="list"), TypeError, "collate_fn must be a function"),  # type: ignore[arg-type]
    (lambda: Batch(2, memory=1), TypeError, r"Memory\(limit"),  # type: ignore[arg-type]
    (lambda: PaddedBatch(0), ValueError, "padded_batch: batch_size must be"),
    (
        lambda: PaddedBatch(2, padding_value="x"),
        TypeError,
        "padded_batch: padding_value must be a number",
    ),  # type: ignore[arg-type]
    (lambda: PaddedBatch(2, lengths=1), TypeError, "lengths must be True or False"),  # type: ignore[arg-type]
    (lambda: PaddedBatch(2, memory=None), TypeError, "memory must be"),  # type: ignore[arg-type]
    (lambda: Unbatch(columns="yes"), TypeError, "columns must be True or False"),  # type: ignore[arg-type]
    (lambda: Unbatch(split=3), TypeError, "split must be a function"),  # type: ignore[arg-type]
    (lambda: Unbatch(True, split=list), ValueError, "leave one of them out"),
    (lambda: BatchBy(3, 4), TypeError, "cost must be a function that takes an item"),  # type: ignore[arg-type]
    (lambda: BatchBy(len, "4"), TypeError, "max_cost must be a number"),  # type: ignore[arg-type]
    (lambda: BatchBy(len, 0), ValueError, "max_cost must be above 0 and finite, not 0"),
    (lambda: BatchBy(len, float("nan")), ValueError, "finite, not nan"),
    (lambda: BatchBy(len, INFINITE), ValueError, "finite, not inf"),
    (lambda: BatchBy(len, 4, padded=None), TypeError, "padded must be True"),  # type: ignore[arg-type]
    (lambda: BatchBy(len, 4, max_size=0), ValueError, "max_size must be at least 1"),
    (lambda: BatchBy(len, 4, oversize="cut"), ValueError, "'raise', 'skip' or 'alone', got 'cut'"),
    (lambda: BucketBy(None, 4), TypeError, "bucket_by: key must be a function"),  # type: ignore[arg-type]
    (lambda: BucketBy(len, "4"), TypeError, "batch_size must be a whole number"),  # type: ignore[arg-type]
    (lambda: BucketBy(len, {1: 0}), ValueError, r"batch_size\[1\] must be at least 1"),
    (lambda: Shuffle(0), ValueError, "shuffle: buffer_size must be at least 1"),
    (lambda: Shuffle(4, -1), ValueError, "seed must be at least 0"),
    (lambda: Shuffle(4, "x"), TypeError, "seed must be a whole number"),  # type: ignore[arg-type]
    (lambda: Take(-1), ValueError, "take: count must be at least 0"),
    (lambda: SkipFirst(None), TypeError, "skip: count must be a whole number"),  # type: ignore[arg-type]
    (lambda: Enumerate(0.5), TypeError, "start must be a whole number"),  # type: ignore[arg-type]
    (lambda: Repeat(-1), ValueError, "times must be at least 0"),
    (lambda: ShardByRank(0), ValueError, "give both, or neither"),
    (lambda: ShardByRank(None, 2), ValueError, "give both, or neither"),
    (lambda: ShardByRank(2, 2), ValueError, "ranks go from 0 to 1"),
    (lambda: ShardByRank(0, 0), ValueError, "num_replicas must be at least 1"),
    (lambda: Zip(()), ValueError, "zip: there are no pipelines"),
    (lambda: Zip(([1], [2])), TypeError, r"zip joins pipelines, not \[1\]; make one"),  # type: ignore[arg-type]
    (lambda: Zip((scripted(1), scripted(1, 2))), ValueError, r"different lengths: \[1, 2\]"),
    (lambda: Concat(["a"]), TypeError, "concat joins pipelines"),  # type: ignore[arg-type]
    (lambda: Mix(CHAINS, (1,)), ValueError, "one number for each of 2 pipelines"),
    (lambda: Mix(CHAINS, 1), ValueError, "one number for each of 2"),  # type: ignore[arg-type]
    (lambda: Mix(CHAINS, (1, "2")), TypeError, r"weights\[1\] must be a number"),  # type: ignore[arg-type]
    (lambda: Mix(CHAINS, (1, 0)), ValueError, r"weights\[1\] must be above 0"),
    (lambda: Mix(CHAINS, stop="any"), ValueError, "stop must be 'all' or 'first'"),
    (lambda: Interleave(CHAINS, 0), ValueError, "block_length must be at least 1"),
    (lambda: TeePoint([], 2), TypeError, "tee: pipeline must be a pipeline"),  # type: ignore[arg-type]
    (lambda: TeePoint(CHAINS[0], 0), ValueError, "tee: count must be at least 1"),
    (lambda: Branch(CHAINS[0], 0), TypeError, "tee must be a TeePoint"),
    (lambda: Branch(FORK, 2), ValueError, "there is no branch 2: a tee of 2 has branches 0 to 1"),
    (lambda: Cache(3), TypeError, "cache: path must be that of a file, not 3"),  # type: ignore[arg-type]
    (lambda: Cache("folder/"), ValueError, "names no file"),
    (lambda: Cache("x", 3), TypeError, "fingerprint must be a text"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "kind", "told"), BAD, ids=[told for _, _, told in BAD])
def test_bad_parameters_are_refused_when_they_are_given(
    make: Callable[[], Any], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        make()


@pytest.mark.parametrize("name", [*CASES, "shuffle"])
def test_closing_gives_up_what_is_left_and_closes_what_comes_before(name: str) -> None:
    operator = Shuffle(7) if name == "shuffle" else CASES[name][0]
    source = Script(*(step for step in [1, None, "a", 3] * 25))
    found = operator.begin(lambda *_, **__: source, context())
    list(itertools.islice(found, 2))
    for _ in range(2):
        found.close()  # type: ignore[attr-defined]
    assert source.closed
    assert drain(found) == []


@pytest.mark.parametrize("name", [*CASES, "shuffle"])
def test_what_has_ended_is_not_asked_again(name: str) -> None:
    """Even if what comes before would go on behind its end, which it should not."""
    operator, reference = (Shuffle(7), sorted) if name == "shuffle" else CASES[name]
    operator = Cache() if name == "cache" else operator
    found = outcome(operator, *[1] * 7, StopIteration(), *[1] * 40)
    assert found == reference([1] * 7)


def test_a_source_refuses_what_comes_before_it_and_a_repeat_a_single_pass() -> None:
    with pytest.raises(TypeError, match="from_iterable is a source"):
        Items([1]).open(iter([]), context())
    with pytest.raises(TypeError, match="open it by `begin`"):
        Repeat().open(iter([]), context())
