"""A pipeline gives what plain lists say, wherever its steps run, and goes on from any state of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipeline_model import (
    CLOSED,
    JOINS,
    SEED,
    STEPS,
    Recipe,
    Settings,
    changed,
    combined,
    dataset,
    events,
    extended,
    fails_sometimes,
    goes_on,
    kept,
    recipes,
    several_and_fails,
)

from hybridloader import Pipeline

# It is true, and is not what is tested here.
CACHE = pytest.mark.filterwarnings("ignore:a pass in which items raised errors")

stops = st.lists(st.integers(0, 12), min_size=2, max_size=2)
seeds = st.lists(st.integers(0, 99), min_size=3, max_size=3)


@CACHE
@settings(deadline=None, max_examples=100)
@given(recipes, stops, seeds, st.sampled_from([0, 0, 3]))
def test_any_pipeline_gives_what_lists_give_and_goes_on_where_it_stopped(
    recipe: Recipe, stops: list[int], seeds: list[int], epoch: int
) -> None:
    goes_on(recipe, stops, seeds, epoch)


@CACHE
@settings(deadline=None, max_examples=15)
@given(recipes, stops, seeds)
def test_so_does_one_whose_steps_run_in_processes(
    recipe: Recipe, stops: list[int], seeds: list[int]
) -> None:
    goes_on(recipe, stops, seeds, processes=True)


def _with_another(recipe: Recipe, how: str) -> Recipe:
    return combined(how, recipe, extended(dataset(9, "shuffled"), "map, raise"))


EACH: dict[str, Callable[[Recipe], Recipe]] = {
    **{step: partial(extended, step=step) for step in [*STEPS, "repeat"]},
    **{how: partial(_with_another, how=how) for how in JOINS},
}


@CACHE
@pytest.mark.parametrize("step", EACH)
def test_each_step_goes_on_at_every_place(step: str) -> None:
    """Also behind a last batch that is not full, behind the last item of all, and in rows."""
    alone = EACH[step](dataset(7, "shuffled"))
    before_a_batch = extended(EACH[step](dataset(9, "failing")), "batch")
    in_rows = combined(
        "zip", extended(EACH[step](dataset(9, "in order")), "map, raise"), dataset(30, "iterable")
    )
    for stop in range(9):
        goes_on(alone, [stop, 1], [stop, stop + 1, stop + 2])
        if stop % 2:
            goes_on(before_a_batch, [stop // 2], [stop, stop + 1])
        if stop % 3 == 0:
            goes_on(in_rows, [stop], [stop, stop + 1])


@CACHE
@settings(deadline=None, max_examples=20)
@given(recipes, seeds, st.integers(0, 3))
def test_epochs_are_runs_with_the_number_of_the_epoch(
    recipe: Recipe, seeds: list[int], first: int
) -> None:
    if "c" in recipe.traits:  # later epochs give what the first one gave
        return
    with recipe.make(Settings(seeds[0])).epochs(2, first=first, seed=SEED) as epochs:
        for epoch, run in enumerate(epochs, first):
            assert run.epoch == epoch
            assert events(run) == recipe.events(epoch)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 40), st.integers(1, 3), st.sampled_from(["threads", "fork"]))
def test_an_unordered_pipeline_gives_the_same_in_any_order(
    count: int, workers: int, backend: str
) -> None:
    def made(**where: object) -> list[object]:
        pipe = Pipeline.from_dataset(range(count)).map(fails_sometimes, **where)
        pipe = pipe.filter(kept, **where).map(changed, **where)
        return events(pipe.flat_map(several_and_fails, **where).run())

    found = made(backend=backend, num_workers=workers, in_order=False)
    assert CLOSED not in found
    assert Counter(map(repr, found)) == Counter(map(repr, made()))
