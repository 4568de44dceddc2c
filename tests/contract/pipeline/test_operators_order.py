"""Which items come, when and how often; what is closed; and what descriptions and lengths tell."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from support.scripts import Oops, Script, Step, begin, drain, outcome, scripted, steps

from hybridloader import Memory, Pipeline

INFINITE = float("inf")

STEPS: dict[str, Step] = {
    "batch": steps.batch(3, collate_fn=list),
    "batch, full": steps.batch(3, drop_last=True, collate_fn=list),
    "batch_by": steps.batch_by(lambda item: 1, 12, collate_fn=list),
    "batch_by, padded": steps.batch_by(lambda item: 1, 4, padded=True, collate_fn=list),
    "bucket_by": steps.bucket_by(type, 2, collate_fn=list),
    "batch, in slots": steps.batch(3, drop_last=True, memory=Memory(limit=0.1)),
    "pack": steps.pack(3),
    "shuffle": steps.shuffle(7, 3),
    "take": steps.take(99),
    "skip": steps.skip(4),
    "shard": steps.shard(3, 1),
    "enumerate": steps.enumerate(5),
    "repeat": steps.repeat(2),
    "cache": steps.cache(),
    "cache in a file": steps.cache("some/file", fingerprint="of this"),
}


# -- shuffle, take, skip, repeat, shard --------------------------------------------------------------


def test_what_fits_into_the_buffer_is_shuffled_uniformly() -> None:
    items = list(Pipeline.from_iterable([1, 2, 3]).shuffle(4, 0).repeat(3000))
    counts = Counter(tuple(items[at : at + 3]) for at in range(0, 9000, 3))
    assert len(counts) == 6
    # 500 each are expected, with a deviation of 20; the seed is fixed, so this is no coin toss.
    assert all(400 < count < 600 for count in counts.values())


def test_what_is_not_needed_is_not_asked_for() -> None:
    for script in ([], [1, Oops(2), 3]):
        for count in range(5):
            source = Script(*script)
            assert drain(begin(steps.take(count), source)) == script[:count]
            assert source.closed == 1
            assert source.pulled == (count if count <= len(script) else len(script) + 1)
    source = Script(1, 2, Oops(1), 3, 4)
    found = begin(steps.skip(3), source)
    assert source.pulled == 0
    assert next(found) == 3
    source = Script(1, 2, Oops(1), 3, 4, 5)
    found = begin(steps.batch(3, collate_fn=list), source)
    with pytest.raises(Oops):
        next(found)
    assert source.pulled == 3
    assert next(found) == [1, 2, 3]
    assert source.pulled == 4


def passes_of(*passes: Any) -> Pipeline:
    """A pipeline each of whose passes is another script; None can't be begun."""
    left = iter(passes)

    def begun() -> Script:
        script = next(left)
        if script is None:
            raise Oops("begin")
        return Script(*script)

    return Pipeline.from_iterable(begun)


def test_a_pass_begins_when_its_turn_comes_and_one_that_can_not_is_the_last() -> None:
    found = passes_of([1], None, [2]).repeat(3).run()
    assert next(found) == 1  # the second has not begun
    assert drain(found) == [Oops("begin")]
    assert list(passes_of().repeat(0)) == []
    endless = (
        passes_of([1, Oops(2)], [3], [Oops(4)], [5]).repeat().run()
    )  # a pass without items ends it
    assert drain(endless) == [1, Oops(2), 3, Oops(4)]


def test_a_shard_asks_torch_when_the_pass_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Pipeline.from_iterable(range(7)).shard()
    assert list(shard) == [*range(7)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert list(shard) == [1, 4]
    assert shard.length == 2
    assert outcome(steps.shard(2, 0), *range(4)) == [0, 2]
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert list(shard) == [*range(7)]


def test_a_shard_is_taken_before_work_that_would_be_thrown_away_and_behind_what_chooses() -> None:
    called: list[int] = []

    def counted(item: int) -> int:
        called.append(item)
        return item

    pipe, where = Pipeline.from_dataset(range(20)), {"backend": "threads", "num_workers": 1}
    made: Any = pipe.map(counted, **where).shard(4, 1)  # type: ignore[arg-type]
    assert list(made) == called == [1, 5, 9, 13, 17]
    odd: Any = pipe.filter(lambda item: item % 2 == 1, **where)  # type: ignore[arg-type]
    assert list(odd.shard(4, 1)) == [3, 11, 19]
    assert list(odd.map(counted).shard(5, 0)) == [1, 11]
    assert list(pipe.flat_map(lambda k: [k, k]).shard(20, 1)) == [0, 10]


# -- closing -----------------------------------------------------------------------------------------


def test_closing_gives_up_what_is_left_and_closes_what_comes_before() -> None:
    for name, step in STEPS.items():
        if name in ("repeat", "pack", "cache in a file"):
            continue
        source = Script(*[1, 5, 2, 3] * 25)
        found = begin(lambda pipe, step=step: step(pipe).prefetch(1), source)
        assert len(list(islice(found, 2))) == 2
        for _ in range(2):
            found.close()
        assert source.closed == 1, name


# -- lengths -----------------------------------------------------------------------------------------


def two() -> Pipeline:
    return Pipeline.from_iterable(range(2))


def three() -> Pipeline:
    return Pipeline.from_dataset(range(3))


UNKNOWN = scripted(1)
LENGTHS: list[tuple[Callable[[], Pipeline], float | None]] = [
    (lambda: UNKNOWN, None),
    (lambda: Pipeline.from_iterable(range(7), backend="threads", num_workers=1), None),
    (lambda: Pipeline.from_dataset(range(7), sampler=[1, 2]), 2),
    (lambda: three().batch(2), 2),
    (lambda: three().batch(2, drop_last=True), 1),
    (lambda: three().filter(bool), None),
    (lambda: three().batch_by(int, 3), None),
    (lambda: three().map(str).shuffle(2).enumerate().cache(), 3),
    (lambda: three().skip(1), 2),
    (lambda: three().shard(2, 1), 1),
    (lambda: three().take(2), 2),
    (lambda: UNKNOWN.take(0), 0),
    (lambda: three().repeat(3), 9),
    (lambda: two().repeat(), INFINITE),
    (lambda: two().repeat().repeat(0), 0),
    (lambda: two().take(0).repeat(), 0),
    (lambda: two().repeat().batch(2).skip(3).shard(2, 0).enumerate(), INFINITE),
    (lambda: two().repeat().pack(3), INFINITE),
    (lambda: three().pack(3), None),
    (lambda: Pipeline.from_iterable([]).pack(3), 0),
    (lambda: UNKNOWN.zip(two()), 2),
    (lambda: three().zip(two(), strict=False), 2),
    (lambda: two().repeat().zip(two(), strict=False), 2),
    (lambda: UNKNOWN.zip(two(), strict=False), None),
    (lambda: UNKNOWN.zip(two().take(0), strict=False), 0),
    *(
        (lambda how=how, one=one: getattr(one, how)(two()), length)
        for how in ("concat", "mix", "interleave")
        for one, length in ((three(), 5), (UNKNOWN, None), (two().repeat(), INFINITE))
    ),
    (lambda: two().mix(three(), stop="first"), None),
    (lambda: two().repeat().mix(two().repeat(), stop="first"), INFINITE),
]


def test_lengths_are_told_where_they_are_known() -> None:
    for number, (make, length) in enumerate(LENGTHS):
        pipe = make()
        assert pipe.length == length, number
        assert bool(pipe)
        if length is None or length == INFINITE:
            with pytest.raises(TypeError, match=r"no len\(\): '"):
                len(pipe)
        else:
            assert len(pipe) == length
    with pytest.raises(TypeError, match=r"no len.*'repeat' never ends"):
        len(two().map(str).repeat().batch(2))
    with pytest.raises(TypeError, match=r"no len.*'filter\(str\)'.*not known"):
        len(two().filter(str).batch(2))


# -- descriptions ------------------------------------------------------------------------------------


def numbers() -> Iterator[int]:
    return iter([1, 2, 3])


JOINS: list[Step] = [
    lambda pipe: pipe.zip(Pipeline.from_iterable(numbers), strict=False),
    lambda pipe: pipe.concat(Pipeline.from_iterable(numbers)),
    lambda pipe: pipe.mix(Pipeline.from_iterable(numbers), weights=(0.2, 0.8), stop="first"),
    lambda pipe: pipe.interleave(Pipeline.from_iterable(numbers)),
]


def test_a_description_is_a_value_and_a_pickle_of_it_another_one() -> None:
    functions = {"batch_by", "batch_by, padded"}
    for step in [*(step for name, step in STEPS.items() if name not in functions), *JOINS]:
        pipe = step(Pipeline.from_iterable(numbers))
        again = pickle.loads(pickle.dumps(pipe))
        assert step in JOINS or again.operators == pipe.operators
        assert (repr(again), str(again), again.length) == (repr(pipe), str(pipe), pipe.length)
        operator = pipe.operators[-1]
        assert operator.describe().startswith(operator.name)
        with pytest.raises(dataclasses.FrozenInstanceError):
            operator.batch_size = 5
    for change in (setattr, lambda pipe, name, _: delattr(pipe, name)):
        with pytest.raises(AttributeError, match="can't be changed"):
            change(pipe, "operators", ())
