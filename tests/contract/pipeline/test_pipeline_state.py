"""States of runs: what going on costs, when and where one is taken, and what epochs carry over."""

from __future__ import annotations

import gc
import json
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.pipeline_model import Counting, changed, events, saved
from torch.utils.data import RandomSampler, Sampler

from hybridloader import Pipeline, Skip, WorkerTimeout
from hybridloader.sampling import ShuffleSampler
from hybridloader.testing import Gate

Place = dict[str, Any]
THREADS: Place = {"backend": "threads", "num_workers": 2}
COUNT = 400

# -- what resuming costs -----------------------------------------------------------------------------


def odd(item: int) -> bool:
    return item % 7 not in (0, 3, 4)


def some(item: int) -> list[int]:
    return [item] * (item % 3)


def fails(item: int) -> int:
    if item % 11 == 5:
        raise ArithmeticError(item)
    return item


def size(item: int) -> int:
    return item % 6 + 1


def kind(item: Any) -> int:
    return zlib.crc32(repr(item).encode()) % 5


def others() -> Pipeline:
    return Pipeline.from_dataset(range(10**6, 10**6 + 50))


STEPS: dict[str, Callable[[Pipeline, Place], Pipeline]] = {
    "filter": lambda pipe, place: pipe.filter(odd, **place),
    "flat_map": lambda pipe, place: pipe.flat_map(some, **place),
    "skip": lambda pipe, place: pipe.map(fails, on_error=Skip(None), **place),
    "error": lambda pipe, place: pipe.map(fails, **place),
    "flat_map of lists": lambda pipe, place: pipe.filter(odd, **place).map(some).flat_map(list),
    "shard behind errors": lambda pipe, place: pipe.map(fails, **place).filter(odd).shard(3, 1),
    "batch_by": lambda pipe, place: pipe.batch_by(size, 13, collate_fn=list),
    "bucket_by": lambda pipe, place: pipe.bucket_by(kind, 3, collate_fn=list),
    "shuffle": lambda pipe, place: pipe.shuffle(10),
    "shuffle behind errors": lambda pipe, place: pipe.map(fails, **place).shuffle(10),
    "mix": lambda pipe, place: pipe.mix(others()),
}


def items_of(found: list[Any]) -> list[int]:
    """Return the items of a run that are not of `others`, those of batches one by one."""
    given = [item for what, item in found if what == "item"]
    flat = [one for item in given for one in (item if isinstance(item, list) else [item])]
    return [one for one in flat if one < COUNT]


@pytest.mark.parametrize("place", [{}, THREADS], ids=["inline", "threads"])
def test_nothing_is_made_again_but_what_is_needed(place: Place) -> None:
    for step in STEPS:
        work = Counting()

        def make(step: str = step, work: Counting = work) -> Pipeline:
            return STEPS[step](Pipeline.from_dataset(range(COUNT)).map(work), place)

        whole = events(make().run(seed=1))
        for stop in (1, min(40, len(whole) // 2), min(87, len(whole) - 1)):
            with make().run(seed=1) as run:
                assert events(run, stop) == whole[:stop]
                state = saved(run)
            work.calls = 0
            with make().run(state=state) as run:
                assert events(run) == whole[stop:]
            needed = items_of(whole[stop:])
            if step in (
                "shuffle",
                "shuffle behind errors",
                "bucket_by",
            ):  # the items in the buffer, whatever came between
                failed = [what for what, _ in whole[stop:] if what == "error"]
                assert work.calls == len(needed) + len(failed)
                continue
            # One more, and those that `filter` has dropped before it: nobody knows that the item
            # that came before has given all.
            between = max(0, min(needed) - max(items_of(whole[:stop]), default=-1) - 1)
            assert work.calls <= COUNT - min(needed) + between + 3


def test_branches_and_passes_go_on_without_what_they_had() -> None:
    before, one, other = Counting(), Counting(), Counting()
    data = Pipeline.from_dataset(range(50))
    pipe = data.map(before).map(one).zip(data.map(other)).batch(5, collate_fn=list)
    run = pipe.run()
    events(run, 8)
    state, rest = saved(run), list(run)
    before.calls = one.calls = other.calls = 0
    assert list(pipe.run(state=state)) == rest
    assert (before.calls, one.calls, other.calls) == (10, 10, 10)

    part = Pipeline.from_dataset(range(10)).map(before)
    pipe = part.repeat(3).concat(part.shuffle(3)).repeat()
    with pipe.run() as run:
        events(run, 65)
        state, left_over = saved(run), events(run, 100)
    before.calls = 0
    with pipe.run(state=state) as run:
        assert run.resuming is None
        assert events(run, 100) == left_over
    assert before.calls == 100


def test_what_has_to_be_done_again_is_told_while_it_is() -> None:
    told = list[Any]()
    resumed: Any = None

    def work(item: int) -> int:
        told.append(resumed.resuming if resumed else None)
        return item

    def make() -> Pipeline:
        return Pipeline.from_dataset(range(100)).map(work).cache().batch(5, collate_fn=list)

    with make().run() as run:
        events(run, 6)
        state = saved(run)
    told.clear()
    resumed = make().run(state=state)
    assert resumed.resuming == (0, 30)
    assert [item for batch in resumed for item in batch] == list(range(30, 100))
    assert resumed.resuming is None
    assert told == [(k, 30) for k in range(30)] + [None] * 70


def test_a_list_is_not_read_again_from_its_beginning_and_a_generator_is() -> None:
    sources: list[Any] = [lambda: iter(range(9)), range(9), [*range(9)], (*range(9),)]
    for source, resuming in zip(sources, [(0, 6), None, None, None], strict=True):
        pipe = Pipeline.from_iterable(source)
        with pipe.run() as run:
            events(run, 6)
            state = saved(run)
        resumed = pipe.run(state=state)
        assert resumed.resuming == resuming
        assert list(resumed) == [6, 7, 8]


def drawn(item: Any) -> Any:
    return item, random.random()


@pytest.mark.parametrize(
    ("buffer", "places"),
    [
        ("bucket_by", [{}, {}]),
        (
            "shuffle",
            [{**THREADS, "prefetch": 5}, {"backend": "fork", "num_workers": 1, "fuse": False}],
        ),
    ],
    ids=["inline", "workers"],
)
def test_the_buffered_items_alone_come_again_and_have_the_numbers_that_they_had(
    buffer: str, places: list[Place]
) -> None:
    """Through functions that are seeded by number, `enumerate`, `skip`, `take` and threads."""
    calls = Counting()

    def make(place: Place) -> Pipeline:
        place = {"seeding": "sample", **place}
        pipe = Pipeline.from_dataset(range(256), **place).skip(3)
        pipe = pipe.map(drawn, **place).enumerate().skip(2).take(250)
        pipe = pipe.map(calls, **place).prefetch(2).map(drawn, **place)
        if buffer == "shuffle":
            return pipe.shuffle(10)
        return pipe.bucket_by(kind, 3, collate_fn=list)

    whole = list(make({}).run(seed=3))
    with make(places[0]).run(seed=3) as run:
        assert [item for _, item in events(run, 30)] == whole[:30]
        state = saved(run)
    with make(places[1]).run(state=state) as run:
        assert [item for _, item in events(run, 3)] == whole[30:33]
        again = saved(run)
    calls.calls = 0
    with make(places[0]).run(state=again) as run:
        assert list(run) == whole[33:]
    assert calls.calls <= sum(len(b) if buffer != "shuffle" else 1 for b in whole[33:]) + 1


def mostly_fails(item: int) -> int:
    if item % 5:
        raise ArithmeticError(item)
    return item


def test_a_state_stays_small_behind_thousands_of_errors_and_with_a_large_buffer() -> None:
    pipe = Pipeline.from_dataset(range(10_000)).map(mostly_fails).shuffle(1_000)
    with pipe.run(seed=1) as run:
        events(run, 8_000)
        state, rest = saved(run), events(run)
    assert events(pipe.run(state=state)) == rest


# -- when and where ----------------------------------------------------------------------------------


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


def test_a_state_can_be_taken_from_any_thread() -> None:
    pipe = Pipeline.from_dataset(range(1000), shuffle=True).shuffle(9)
    pipe = pipe.map(changed, **THREADS).batch(2, collate_fn=list)
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
    pipe = Pipeline.from_dataset(range(4)).map(changed, worker_init_fn=started.append, **THREADS)
    with pipe.run(epoch=2) as run:
        assert len(list(run)) == 4
        state = saved(run)
    assert state["finished"]
    started.clear()
    again = pipe.run(state=state)
    assert list(again) == []
    assert saved(again) == state
    assert started == []
    state["finished"] = False  # behind the last item, and nobody has been told yet
    assert list(pipe.run(state=state)) == []


def test_after_a_last_batch_of_fewer_batches_comes_nothing() -> None:
    for count in range(1, 7):
        pipe = Pipeline.from_iterable(range(count)).batch(3, collate_fn=list)
        pipe = pipe.batch(2, collate_fn=list)
        with pipe.run() as run:
            next(run)
            state = saved(run)
        assert list(pipe.run(state=state)) == []


def test_a_state_does_not_hold_the_run() -> None:
    pipe = Pipeline.from_dataset(range(30)).map(changed, **THREADS)
    gc.disable()
    try:
        before = threading.active_count()
        run = pipe.run(state=saved(pipe.run()))
        next(run)
        run.state_dict()
        del run
        epochs = pipe.epochs(2)
        epoch = next(epochs)
        next(epoch)
        epoch.state_dict()
        del epoch, epochs
        assert threading.active_count() == before
    finally:
        gc.enable()


def test_what_is_left_out_is_left_out_and_listed_again() -> None:
    pipe = Pipeline.from_dataset(range(80)).map(fails, on_error="skip", **THREADS)
    pipe = pipe.batch(3, collate_fn=list)
    with pipe.run() as run:
        events(run, 5)
        state, rest = saved(run), events(run)
        skipped = [failed.index for failed in run.skipped]
        assert skipped == [*range(5, 80, 11)]
    with pipe.run(state=state) as run:
        assert events(run) == rest
        assert [failed.index for failed in run.skipped] == [k for k in skipped if k > 16]


def test_a_timeout_is_not_in_the_place_of_an_item() -> None:
    gate = Gate()

    def wait(item: int) -> int:
        if item == 1:
            gate.arrive()
        return item

    def rest(run: Iterator[int], most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most:
            with suppress(WorkerTimeout):  # on a busy computer
                found.append(next(run))
        return found

    pipe = Pipeline.from_dataset(range(4))
    with pipe.map(wait, backend="threads", num_workers=1, timeout=0.05).run() as run:
        assert rest(run, 1) == [0]
        with pytest.raises(WorkerTimeout):
            next(run)
        assert (saved(run)["given"], saved(run)["raised"]) == (1, 0)
        gate.open()
        assert rest(run, 3) == [1, 2, 3]


# -- what goes on from one epoch to the next ---------------------------------------------------------


def test_a_state_from_the_end_of_an_epoch_begins_the_next_one_once() -> None:
    def make() -> Pipeline:
        pipe = Pipeline.from_dataset(range(10), shuffle=True).shuffle(3)
        return pipe.map(changed, **THREADS).batch(2, collate_fn=list)

    with make().epochs(3) as epochs:
        first, *others = [(list(epoch), saved(epoch)) for epoch in epochs]
    with make().epochs(3, state=first[1]) as again:
        assert [(list(epoch), saved(epoch)) for epoch in again] == others
    with make().epochs(3, state=others[-1][1]) as again:
        assert list(again) == []
    with make().epochs(state=others[-1][1]) as endless:
        assert next(endless).epoch == 3


def drawn_by(seed: int) -> Pipeline:
    order = RandomSampler(range(30), generator=torch.Generator().manual_seed(seed))
    return Pipeline.from_dataset(range(30), sampler=order)


@pytest.mark.parametrize("branches", [False, True])
def test_the_generator_of_a_sampler_goes_on_behind_a_whole_epoch(branches: bool) -> None:
    def make(seed: int) -> Pipeline:
        one = drawn_by(seed).map(int, **THREADS)
        return Pipeline.zip(one, Pipeline.from_dataset(range(30))) if branches else one

    whole = [list(run) for run in make(1).epochs(3)]
    with make(1).epochs(1) as epochs:
        run = next(epochs)
        assert list(run) == whole[0]
        state = saved(run)
    with make(2).epochs(3, state=state) as epochs:
        assert [list(run) for run in epochs] == whole[1:]


class Growing(Sampler[int]):
    """Sampler whose length is that of the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10 * (self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


@pytest.mark.parametrize("stop", [15, 99])
def test_a_sampler_may_be_longer_in_a_later_epoch(stop: int) -> None:
    def make() -> Pipeline:
        return Pipeline.from_dataset(range(100), sampler=Growing())

    with make().epochs(3) as epochs:
        list(next(epochs))
        run = next(epochs)
        events(run, stop)
        state = saved(run)
    with make().epochs(3, state=state) as epochs:
        found = [list(run) for run in epochs]
    assert found == [[*range(15, 20)]] * (stop == 15) + [[*range(30)]]
