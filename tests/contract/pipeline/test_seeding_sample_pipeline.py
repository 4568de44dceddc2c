"""``seeding="sample"`` in pipelines: an item draws by its place in a step's input, wherever it runs."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from support.pipeline_model import events, saved
from support.random_datasets import (
    Drawing,
    add,
    add_again,
    collate,
    digest,
    drawn,
    fails_at_times,
    often,
    several,
    states,
)

from hybridloader import Pipeline, SampleSeeding, Skip, get_worker_info

Step = tuple[str, Any]
FIVE: list[Step] = [
    ("map", add),
    ("map", add_again),
    ("filter", often),
    ("flat_map", several),
    ("map", add_again),
]
AGAIN: list[Step] = [("map", add_again)]
INLINE: dict[str, Any] = {}


def threads(workers: int = 2, **options: Any) -> dict[str, Any]:
    return {"backend": "threads", "num_workers": workers, **options}


def fork(workers: int = 2, **options: Any) -> dict[str, Any]:
    return {"backend": "fork", "num_workers": workers, **options}


def pipeline(steps: list[Step], *places: Any, count: int = 40) -> Pipeline:
    """A pipeline of the steps, in the places in turn."""
    pipe = Pipeline.from_dataset(range(count))
    for (kind, function), where in zip(steps, cycle(places), strict=False):
        pipe = getattr(pipe, kind)(function, **{"seeding": "sample", **where})
    return pipe


def run(pipe: Pipeline, epochs: int = 2, seed: int = 9) -> list[Any]:
    random.gauss(0, 1)
    before = states()
    found = [item for epoch in pipe.epochs(epochs, seed=seed) for item in epoch]
    assert states() == before
    return found


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def lines() -> Iterator[Any]:
    info = get_worker_info()
    opened = random.random()
    for number in range(info.id if info else 0, 40, info.num_workers if info else 1):
        yield number, opened, drawn()


ORDER = random.Random(4).sample(range(23), 23)
BATCHES = [ORDER[at : at + 4] for at in range(0, 23, 4)]


def dataset(where: Any, **how: Any) -> Pipeline:
    pipe = Pipeline.from_dataset(Drawing(), seeding="sample", **how, **where)
    return pipe.map(add_again, seeding="sample", **where)


def readers(where: Any, on_error: str) -> Pipeline:
    where = {"backend": where.get("backend", "inline"), "num_workers": 3}
    pipe = Pipeline.from_iterable(lines, seeding="sample", on_error=on_error, **where)
    return pipe.map(add_again, seeding="sample")


def failing(where: Any, policy: Any) -> Pipeline:
    return pipeline([("map", fails_at_times), *AGAIN], {**where, "on_error": policy})


SHAPES: dict[str, Callable[[Any], Pipeline]] = {
    "five steps": lambda where: pipeline(FIVE, where),
    "under a policy": lambda where: pipeline(FIVE, {**where, "on_error": "skip"}),
    "branches": lambda where: pipeline(AGAIN, where, count=9).zip(pipeline(AGAIN, where, count=9)),
    "dataset": lambda where: dataset(where, sampler=ORDER),
    "batches": lambda where: dataset(where, batch_sampler=BATCHES, collate_fn=collate),
    "readers": lambda where: readers(where, "raise"),
    "readers under a policy": lambda where: readers(where, "skip"),
    "items skipped": lambda where: failing(where, Skip(max_failures=None)),
}

PLACES = {
    "threads": threads(3),
    "fork": fork(),
    "not fused": threads(fuse=False),
    "not fused, in processes": fork(1, fuse=False),  # results pass unopened
    "threads in processes": fork(threads_per_worker=3),
}
CASES = [("five steps", place) for place in PLACES] + [
    (shape, ("threads", "fork")[number % 2]) for number, shape in enumerate([*SHAPES][1:])
]


@pytest.mark.parametrize(("shape", "place"), CASES)
def test_the_items_are_the_same_wherever_they_are_made(
    shape: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a place where another run was stopped, which may have been elsewhere."""
    if place == "threads in processes":  # with items of several tasks in work
        monkeypatch.setattr("hybridloader.engine.worker._LEAST", 0.0)
    make, where = SHAPES[shape], PLACES[place]
    expected = run(make(INLINE))
    assert len({*map(repr, expected)}) == len(expected), "epochs and passes differ"
    found = run(make(where))
    assert digest(found) == digest(expected)
    one, other = (INLINE, where) if "fork" in place else (where, INLINE)
    with make(one).run(epoch=1, seed=9) as first:
        begun = list(islice(first, 5))
        state = first.state_dict()
    begun += make(other).run(state=state)
    assert digest(begun) == digest(expected[-len(begun) :])


def test_epochs_seeds_steps_branches_and_items_differ() -> None:
    two = pipeline([*AGAIN, *AGAIN], INLINE)
    found = run(two) + run(two, 1, 8)
    numbers = [number for (inner, *mine) in found for number in (inner[1], mine[0])]
    assert len(set(numbers)) == 2 * 3 * 40
    pairs = run(SHAPES["branches"](INLINE), 1)
    assert len({item[1] for pair in pairs for item in pair}) == 18
    assert len({repr(item[0][2]) for item in run(SHAPES["readers"](INLINE))}) == 80
    assert 40 < len(run(SHAPES["items skipped"](INLINE))) < 72


@pytest.mark.parametrize("data", [[3, 4], np.arange(2)], ids=repr)
def test_looking_up_an_index_does_not_seed_the_calling_process(data: Any) -> None:
    gc.collect()  # workers of an earlier test keep the random functions replaced until then
    pipe = Pipeline.from_dataset(data).map(repr, backend="fork", num_workers=1).prefetch(2)
    with pipe.run() as run:
        assert next(run) == repr(data[0])
        assert type(random._inst) is random.Random  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "backend", ["threads", "fork", pytest.param("spawn", marks=pytest.mark.full)]
)
def test_readers_that_start_in_a_later_epoch_draw_its_numbers(backend: str) -> None:
    pipe = Pipeline.from_iterable(lines, backend=backend, num_workers=2, seeding="sample").repeat(2)
    epochs = [digest(list(epoch)) for epoch in pipe.epochs(3, seed=5)]
    assert len(set(epochs)) == 3
    assert [digest(list(pipe.run(epoch=number, seed=5))) for number in (0, 2)] == epochs[::2]
    for taken in (7, 53):  # in the first and in the second repetition
        with pipe.run(epoch=2, seed=5) as run:
            begun = [next(run) for _ in range(taken)]
            state = run.state_dict()
        assert digest(begun + list(pipe.run(state=state))) == epochs[2]


def fails(item: int) -> int:
    if item % 4 == 1:
        raise ArithmeticError(f"no {item}")
    return item


@pytest.mark.parametrize("where", [INLINE, threads(fuse=False)], ids=["inline", "threads"])
@pytest.mark.parametrize("stop", [2, 5])
def test_nor_do_errors_before_the_place_change_that(where: Any, stop: int) -> None:
    """They did not come through to the step, so its numbers are not those of what was given."""
    pipe = Pipeline.from_iterable(range(12)).map(fails, **threads(1, fuse=False))
    pipe = pipe.map(add, seeding="sample", **where)
    with pipe.run(seed=9) as first:
        events(first, stop)
        state, rest = saved(first), events(first)
    with pipe.run(state=state) as second:
        assert digest(events(second)) == digest(rest)


def test_a_seed_of_its_own_makes_a_step_apart_from_the_run() -> None:
    def made(seed: int, seeding: Any) -> str:
        pipe = pipeline(AGAIN, {**threads(), "seeding": seeding})
        return digest(run(pipe, 1, seed))

    assert made(1, SampleSeeding(5)) == made(2, SampleSeeding(5)) != made(2, SampleSeeding(6))
    assert made(1, "sample") != made(2, "sample")


def test_what_is_no_seeding_is_refused_by_the_step() -> None:
    with pytest.raises(ValueError, match="stage 'map\\(add\\)': seeding must be"):
        Pipeline.from_dataset(range(3)).map(add, seeding="samples")
