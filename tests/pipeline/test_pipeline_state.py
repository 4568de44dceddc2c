"""A run that goes on from a state gives exactly what the first one would have given."""

from __future__ import annotations

import gc
import json
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_pipelines import (
    STEPS,
    Counting,
    Recipe,
    Settings,
    _extended,
    changed,
    dataset,
    events,
    recipes,
    saved,
)

from hybridloader import Pipeline
from hybridloader.sampling import ShuffleSampler

# It is true, and is not what is tested here.
CACHE = pytest.mark.filterwarnings("ignore:a pass in which items raised errors")

many = settings(deadline=None, max_examples=120)


def resumed_exactly(recipe: Recipe, stops: list[int], seeds: list[int], epoch: int = 0) -> None:
    """Stop after each of `stops` items in turn; the last run goes on to its end."""
    closed = ("closed", "")  # not an item; every `next` from there on raises it again
    with recipe.make(Settings(seeds[0])).run(epoch=epoch) as whole:
        found = events(whole, stops[0])
        state = saved(whole)
        expected = found if closed in found else found + events(whole, 500)
        assert saved(whole) == saved(whole)
    for number, seed in enumerate(seeds[1:], 1):
        if closed in found:
            break
        with recipe.make(Settings(seed)).run(state=state) as run:
            assert saved(run)["given"] == len(found)
            most = stops[number] if number < len(stops) else 500 + stops[0] - len(found)
            found += events(run, most)
            state = saved(run)
    assert found == expected


@CACHE
@many
@given(
    recipes,
    st.lists(st.integers(0, 12), min_size=2, max_size=2),
    st.lists(st.integers(0, 99), min_size=3, max_size=3),
    st.sampled_from([0, 0, 3]),
)
def test_any_pipeline_goes_on_where_it_stopped(
    recipe: Recipe, stops: list[int], seeds: list[int], epoch: int
) -> None:
    resumed_exactly(recipe, stops, seeds, epoch)


@CACHE
@pytest.mark.full
@pytest.mark.parametrize("order", ["shuffled", "generator"])
@pytest.mark.parametrize("step", STEPS)
def test_each_operator_goes_on_at_every_place(step: str, order: str) -> None:
    """Also behind a last batch that is not full, and behind the last item of all."""
    alone = _extended(dataset(7, order), step)
    for recipe in (alone, _extended(alone, "batch")):
        for stop in range(9):
            resumed_exactly(recipe, [stop, 1], [stop, stop + 1, stop + 2])


# -- what resuming costs -----------------------------------------------------------------------------


def test_work_is_not_done_again_where_the_parameters_say_what_was_had() -> None:
    work, behind = Counting(), Counting()

    def make() -> Pipeline:
        pipe = Pipeline.from_dataset(range(100), shuffle=True, seed=1).shuffle(20, seed=2).map(work)
        pipe = pipe.enumerate().skip(3).take(90).shard(2, 0).batch(4, collate_fn=list)
        other = Pipeline.from_dataset(range(1000)).prefetch(3)
        return pipe.zip(other, strict=False).map(behind)

    whole = list(make())
    assert (work.calls, behind.calls) == (93, 12)
    with make().run() as run:
        assert events(run, 9) == [("item", item) for item in whole[:9]]
        state = saved(run)
    work.calls = behind.calls = 0
    assert list(make().run(state=state)) == whole[9:]
    # Batch 9 has the items 72, 74, ... of those behind the first 3, and nothing before them is made.
    assert (work.calls, behind.calls) == (93 - (3 + 71), 3)


def test_both_branches_of_a_fork_go_on_without_what_they_had() -> None:
    before, one, other = Counting(), Counting(), Counting()
    left, right = Pipeline.from_dataset(range(50)).map(before).tee()
    pipe = left.map(one).zip(right.map(other)).batch(5, collate_fn=list)
    run = pipe.run()
    events(run, 8)
    state, rest = saved(run), list(run)
    before.calls = one.calls = other.calls = 0
    assert list(pipe.run(state=state)) == rest
    assert (before.calls, one.calls, other.calls) == (10, 10, 10)


def test_passes_that_are_over_are_not_made_again() -> None:
    work = Counting()
    part = Pipeline.from_dataset(range(10)).map(work)
    pipe = part.repeat(3).concat(part.shuffle(3)).repeat()
    with pipe.run() as run:
        events(run, 65)
        state, rest = saved(run), events(run, 100)
    work.calls = 0
    with pipe.run(state=state) as run:
        assert run.resuming is None
        assert events(run, 100) == rest
    assert work.calls == 100


def test_what_has_to_be_done_again_is_told_while_it_is() -> None:
    work = Counting()
    pipe = Pipeline.from_dataset(range(100)).map(work).cache().batch(5, collate_fn=list)
    run = pipe.run()
    events(run, 6)
    state = saved(run)
    run.close()
    work.calls, told = 0, list[Any]()
    again = Pipeline.from_dataset(range(100)).map(
        lambda x: (told.append(resumed.resuming) if resumed else None, work(x))[1],
        name="map(Counting)",
    )
    resumed: Any = None
    resumed = again.cache().batch(5, collate_fn=list).run(state=state)
    assert resumed.resuming == (0, 30)
    assert [item for batch in resumed for item in batch] == list(range(30, 100))
    assert resumed.resuming is None
    assert told == [(k, 30) for k in range(30)] + [None] * 70
    assert work.calls == 100


def test_a_state_is_taken_in_few_steps_and_starts_nothing() -> None:
    for step in STEPS:
        recipe = _extended(
            Recipe("all", lambda s: Pipeline.from_dataset(range(3000), shuffle=True)), step
        )
        with recipe.make(Settings(0)).run() as run:
            events(run, 100)
            run.state_dict()
            calls, threads = list[int](), threading.active_count()

            def count(frame: Any, event: str, arg: Any, calls: list[int] = calls) -> None:
                calls[-1] += event == "call"

            for _ in range(3):  # a collection in between only adds calls
                calls.append(0)
                sys.setprofile(count)
                try:
                    state = run.state_dict()
                finally:
                    sys.setprofile(None)
            assert min(calls) < 250
            assert threading.active_count() <= threads
            assert len(json.dumps(state)) < 2000


def test_a_state_is_a_new_dict_each_time() -> None:
    run = Pipeline.from_dataset(range(9), sampler=ShuffleSampler(9, seed=1)).batch(2).run()
    state = run.state_dict()
    kept = json.dumps(state)
    state["marks"][":0"]["value"]["position"] = 7
    for value in (state["operators"], state["marks"], state["draws"]):
        value.clear()
    state["given"] = 7
    assert json.dumps(run.state_dict()) == kept
    run.close()


# -- when and where ----------------------------------------------------------------------------------


def test_a_state_counts_what_was_given_and_not_what_lies_ready() -> None:
    pipe = Pipeline.from_dataset(range(40)).map(
        changed, backend="threads", num_workers=2, prefetch=9
    )
    with pipe.prefetch(5).run() as run:
        assert saved(run)["given"] == 0
        for number in range(1, 10):
            next(run)
            assert saved(run)["given"] == number
    assert saved(run)["given"] == 9  # also when it is closed
    assert not saved(run)["finished"]
    assert list(pipe.run(state=saved(run))) == [changed(k) for k in range(9, 40)]


def test_a_state_can_be_taken_from_any_thread() -> None:
    pipe = Pipeline.from_dataset(range(1000), shuffle=True).shuffle(9)
    pipe = pipe.map(changed, backend="threads", num_workers=1).batch(2, collate_fn=list)
    states: list[Any] = []
    with pipe.run() as run:
        over = threading.Event()

        def take() -> None:
            while not over.is_set():
                states.append(run.state_dict())

        thread = threading.Thread(target=take)
        thread.start()
        whole = list(run)
        over.set()
        thread.join()
    counts = [state["given"] for state in states]
    assert counts == sorted(counts)
    for state in states[:: len(states) // 5 + 1]:
        assert list(pipe.run(state=state)) == whole[state["given"] :]


def test_a_run_that_has_ended_goes_on_with_nothing_and_starts_nothing() -> None:
    started: list[int] = []
    pipe = Pipeline.from_dataset(range(4)).map(
        changed, backend="threads", num_workers=1, worker_init_fn=started.append
    )
    with pipe.run(epoch=2) as run:
        whole = list(run)
        state = saved(run)
    assert state["finished"]
    started.clear()
    again = pipe.run(state=state)
    assert list(again) == []
    assert saved(again) == state
    assert started == []
    state["finished"] = False  # behind the last item, and nobody has been told yet
    assert list(pipe.run(state=state)) == []
    assert len(whole) == 4


def test_loading_is_the_same_as_running_with_a_state() -> None:
    pipe = Pipeline.from_dataset(range(30), shuffle=True).map(
        changed, backend="threads", num_workers=1
    )
    with pipe.run(epoch=3) as run:
        events(run, 12)
        state, rest = saved(run), events(run)
    other = pipe.run()
    other.load_state_dict(state)
    assert other.epoch == 3
    assert saved(other) == state
    other.load_state_dict(state)
    assert events(other) == rest


def test_a_state_does_not_hold_the_run() -> None:
    pipe = Pipeline.from_dataset(range(30)).map(changed, backend="threads", num_workers=1)
    gc.disable()
    try:
        before = threading.active_count()
        run = pipe.run(state=saved(pipe.run()))
        next(run)
        run.state_dict()
        del run
        epochs = pipe.epochs(2)
        next(next(epochs))
        epochs.state_dict()
        del epochs
        assert threading.active_count() == before
    finally:
        gc.enable()
