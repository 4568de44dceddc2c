"""Batches: collated as torch collates, by number, by budget and by key."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import same
from support.programs import output
from support.scripts import (
    Oops,
    Script,
    Step,
    begin,
    errors_in,
    items_in,
    outcome,
    steps,
)
from torch.utils.data import default_collate

from hybridloader import Memory
from hybridloader.pipeline import Pad

SAMPLES: list[Any] = [
    {"x": torch.full((3,), float(i)), "y": i, "name": f"n{i}", "pair": (i, np.full(2, i))}
    for i in range(7)
]


@pytest.mark.parametrize("collate_fn", [None, default_collate])
def test_batches_are_those_of_default_collate(collate_fn: Any) -> None:
    theirs = [default_collate(SAMPLES[at : at + 3]) for at in (0, 3, 6)]
    same(outcome(steps.batch(3, collate_fn=collate_fn), *SAMPLES), theirs)


GROUPING: dict[str, Step] = {
    "batch": steps.batch(2),
    "padded": steps.batch(2, collate_fn=Pad()),
    "batch_by": steps.batch_by(lambda sample: 1, 2),
    "bucket_by": steps.bucket_by(lambda sample: 0, 2),
}


@pytest.mark.parametrize("name", GROUPING)
def test_large_batches_are_made_in_slots_that_are_used_again_unless_they_are_kept(
    name: str,
) -> None:
    samples = [torch.full((300_000,), float(i)) for i in range(8)]
    places = set()
    for number, batch in enumerate(begin(GROUPING[name], Script(*samples))):
        assert batch.shape == (2, 300_000)
        assert batch[:, 7].tolist() == [2.0 * number, 2.0 * number + 1]
        places.add(batch.data_ptr())
        del batch
    assert len(places) <= 2  # one that is being made, one that the loop still holds
    kept = outcome(GROUPING[name], *(sample[:100_000] for sample in samples))
    gc.collect()
    assert [batch[:, 0].tolist() for batch in kept] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_full_slots_are_told_once_and_lose_nothing() -> None:
    samples = [torch.full((100_000,), float(i)) for i in range(10)]
    for collate_fn in (None, Pad()):
        step = steps.batch(2, collate_fn=collate_fn, memory=Memory(1 << 20))
        with pytest.warns(UserWarning, match="ordinary memory") as told:
            kept = outcome(step, *samples)
        assert len(told) == 1
        assert [batch[:, 0].tolist() for batch in kept] == [[i, i + 1] for i in range(0, 10, 2)]


def test_a_plain_list_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from hybridloader import Pipeline\n"
        "pipe = Pipeline.from_iterable([1, 2, 1])\n"
        "assert list(pipe.batch(2, collate_fn=list)) == [[1, 2], [1]]\n"
        "assert list(pipe.batch_by(int, 3, collate_fn=tuple)) == [(1, 2), (1,)]\n"
        "assert list(pipe.bucket_by(int, 2, collate_fn=list)) == [[1, 1], [2]]\n"
        "assert list(pipe.zip(pipe).concat(pipe.take(1).cache()).enumerate().skip(3)) == [(3, 1)]\n"
        "assert 'torch' not in sys.modules\n"
    )
    output("-c", code)


@pytest.mark.parametrize("name", ["batch", "batch_by", "bucket_by"])
def test_a_collate_fn_that_raises_costs_its_batch_and_no_other(name: str) -> None:
    def collate(samples: list[int]) -> list[int]:
        if 2 in samples:
            raise Oops(2)
        if 4 in samples:
            raise StopIteration
        return samples

    operators = {
        "batch": steps.batch(2, collate_fn=collate),
        "batch_by": steps.batch_by(lambda sample: 1, 2, collate_fn=collate),
        "bucket_by": steps.bucket_by(lambda sample: 0, 2, collate_fn=collate),
    }
    found = outcome(operators[name], *range(7))
    assert found[0] == [0, 1]
    assert found[1] == Oops(2)
    assert found[1].__notes__ == [
        f"In stage {name!r}, the calling thread, collating batch 2 of this run (2 items)."
    ]
    assert isinstance(found[2], RuntimeError)
    assert "collate_fn raised StopIteration" in str(found[2])
    assert found[3:] == [[6]]


# -- by a budget ---------------------------------------------------------------------------------


def by_cost() -> Step:
    return steps.batch_by(lambda item: item, 10, collate_fn=list)


def test_an_item_that_alone_costs_too_much_is_an_error_that_names_it() -> None:
    found = outcome(by_cost(), 4, 11, 5, 6)
    assert items_in(found) == [[4, 5], [6]]
    (error,) = errors_in(found)
    assert isinstance(error, ValueError)
    assert str(error).startswith("batch_by: an item costs 11, more than max_cost=10: 11 (a int)")


def test_a_cost_may_be_in_an_array_or_a_tensor() -> None:
    costs = [torch.tensor(4), np.array(6.0), np.int64(9)]
    assert outcome(by_cost(), *costs) == [costs[:2], costs[2:]]


@pytest.mark.parametrize(
    ("cost", "kind", "told"),
    [
        (-1, ValueError, "from 0 up, not -1"),
        (float("nan"), ValueError, "from 0 up, not nan"),
        ("7", TypeError, "must give a number, not '7'"),
        (True, TypeError, "must give a number, not True"),
        (float("inf"), ValueError, "costs inf, more than max_cost=10"),
    ],
)
def test_a_bad_cost_is_an_error_at_its_item(cost: Any, kind: type[Exception], told: str) -> None:
    found = outcome(by_cost(), 3, cost, 4)
    assert items_in(found) == [[3, 4]]
    (error,) = errors_in(found)
    assert type(error) is kind
    assert told in str(error)


def test_a_function_that_raises_costs_its_item_and_no_other() -> None:
    def raises_at_2(error: BaseException) -> Any:
        def function(item: Any) -> Any:
            if item == 2:
                raise error
            return 1

        return function

    for step in (steps.batch_by, steps.bucket_by):
        error, batch = outcome(step(raises_at_2(Oops(2)), 9), 1, 2, 3)
        assert (error, batch.tolist()) == (Oops(2), [1, 3])
        error, batch = outcome(step(raises_at_2(StopIteration()), 9), 1, 2, 3)
        assert type(error) is RuntimeError
        assert "raised StopIteration" in str(error)
        assert batch.tolist() == [1, 3]


# -- by a key ------------------------------------------------------------------------------------


def test_a_key_without_a_hash_or_a_size_is_an_error_at_its_item() -> None:
    def key(found: Any) -> Any:
        return lambda item: found if item == 2 else 0

    no_hash = "which has no hash by value, for the item 2"
    for given, size, told in [
        ([1], 2, no_hash),
        ({}, 2, no_hash),
        (torch.tensor(1), 2, no_hash),
        ("a", {0: 2}.get, "batch_size('a') must be"),
        ("a", lambda found: 2 if found == 0 else next(iter("")), "batch_size raised StopIteration"),
        ("a", lambda found: 0 if found == "a" else 2, "batch_size('a') must be at least 1"),
    ]:
        found = outcome(steps.bucket_by(key(given), size, collate_fn=list), 1, 2, 3)
        assert items_in(found) == [[1, 3]]
        (error,) = errors_in(found)
        assert told in str(error)
        assert isinstance(error, TypeError) or told is not no_hash


def test_full_buckets_are_forgotten_so_that_many_keys_do_not_fill_the_memory() -> None:
    @dataclass(frozen=True)
    class Key:
        number: int

    alive = weakref.WeakSet[Key]()

    def key(item: int) -> Key:
        made = Key(item // 2)
        alive.add(made)
        return made

    found = begin(steps.bucket_by(key, 2, collate_fn=list), Script(*range(100)))
    assert sum(1 for _ in found) == 50
    gc.collect()
    assert len(alive) <= 2
