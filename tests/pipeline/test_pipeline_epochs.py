"""Pipelines are passed over several times: in turn, at once, in epochs. They stay what they were."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader import Pipeline, WorkerDied
from hybridloader.errors import IteratorClosed
from hybridloader.testing import Gate

KINDS = ("inline", "threads", "fork")
WORKERS = KINDS[1:]


def double(item: int) -> int:
    return 2 * item


def who(item: Any) -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def two_stages(backend: str, count: int = 40) -> Pipeline:
    """With a relay between the stages and one behind them."""
    pipe = Pipeline.from_dataset(range(count)).map(double, backend=backend, num_workers=2)
    return pipe.batch(2, collate_fn=list).map(tuple, backend=backend, num_workers=2)


PAIRS = [(4 * k, 4 * k + 2) for k in range(20)]


# -- several passes --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", KINDS)
def test_live_iterators_do_not_disturb_each_other(backend: str) -> None:
    pipe = two_stages(backend)
    one, other = iter(pipe), iter(pipe)
    assert [next(one), next(one)] == PAIRS[:2]
    assert list(zip_longest(one, other)) == list(zip_longest(PAIRS[2:], PAIRS))


@pytest.mark.parametrize("backend", WORKERS)
def test_workers_live_through_epochs_and_repetitions(backend: str) -> None:
    where: dict[str, Any] = {"backend": backend, "num_workers": 1, "fuse": False}
    pipe = Pipeline.from_dataset(range(6)).map(who, **where).enumerate()
    pipe = pipe.map(lambda pair: (pair[1], who(pair)), **where)
    with pipe.repeat(2).epochs(3) as epochs:
        ((first, second),) = {item for epoch in epochs for item in epoch}
    assert first != second
    ((other_first, other_second),) = set(pipe)  # another run, other workers
    if backend != "threads":
        assert not {first, second} & {other_first, other_second}


class Opened:
    """A function that tells which time it was set up."""

    def setup(self) -> None:
        self.time = os.urandom(8)

    def __call__(self, item: int) -> bytes:
        return self.time


@pytest.mark.parametrize("backend", WORKERS)
def test_each_worker_is_set_up_once_for_all_epochs(backend: str) -> None:
    pipe = Pipeline.from_dataset(range(40)).map(Opened(), backend=backend, num_workers=2)
    found = {time for epoch in pipe.epochs(3) for time in epoch}
    assert len(found) <= 2


@pytest.mark.parametrize("backend", KINDS)
def test_an_epoch_that_was_left_does_not_show_in_the_next(backend: str) -> None:
    found = []
    for epoch in two_stages(backend).epochs(4):
        for item in epoch:
            if item == PAIRS[epoch.epoch]:
                found.append(item)
                break
        else:
            pytest.fail("the epoch ended")
    assert found == PAIRS[:4]

    for number, epoch in enumerate(two_stages(backend).epochs(3)):
        if number == 1:
            assert next(epoch) == PAIRS[0]
        else:
            assert list(epoch) == PAIRS


def test_the_next_epoch_does_not_wait_for_what_the_one_before_waited_for() -> None:
    gate, items = Gate(), iter(range(200))

    def stick(item: int) -> int:
        if next(items) == 5:
            gate.arrive()
        return item

    pipe = Pipeline.from_dataset(range(50)).map(stick, backend="threads", num_workers=2)
    with pipe.batch(1, collate_fn=list).epochs(2) as epochs:
        next(epochs)
        gate.await_arrivals()
        second = next(epochs)
        gate.open()
        assert list(second) == [[k] for k in range(50)]


def test_epochs_are_numbered_counted_and_end() -> None:
    pipe = Pipeline.from_dataset(range(3))
    epochs = pipe.epochs(2, first=5)
    assert [epoch.epoch for epoch in epochs] == [5, 6]
    with pytest.raises((StopIteration, IteratorClosed)):
        next(epochs)
    assert [list(epoch) for epoch in pipe.epochs(0)] == []
    with pipe.epochs() as endless:
        assert [list(next(endless)) for _ in range(5)] == [[0, 1, 2]] * 5
    with pytest.raises(IteratorClosed):
        next(endless)


def test_the_iterator_of_an_epoch_before_can_be_closed() -> None:
    pipe = Pipeline.from_dataset(range(10)).map(double, backend="threads", num_workers=1)
    with pipe.epochs(2) as epochs:
        old = next(epochs)
        next(old)
        new = next(epochs)
        old.close()
        assert list(new) == list(range(0, 20, 2))


def test_a_thread_that_was_stuck_in_an_epoch_before_does_not_end_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybridloader.running.executor.CLOSING", 0.0)
    gate, first = Gate(), True

    def stuck_once(item: int) -> int:
        nonlocal first
        if first:
            first = False
            gate.arrive()
        return item

    before = {thread.ident for thread in threading.enumerate()}
    where: dict[str, Any] = {"backend": "threads", "num_workers": 1}
    pipe = Pipeline.from_dataset(range(10_000)).map(double, **where).map(stuck_once)
    pipe = pipe.map(double, **where)
    with pipe.epochs(2) as epochs:
        next(epochs)
        gate.await_arrivals()
        (stuck,) = (
            thread
            for thread in threading.enumerate()
            if "stuck_once" in thread.name and thread.ident not in before
        )
        new = next(epochs)
        got = [next(new)]
        gate.open()
        stuck.join(30)
        assert [*got, *new] == list(range(0, 40_000, 4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_epoch_after_a_death_has_new_workers() -> None:
    def die_first(item: int) -> int:
        if item == 3 and not os.path.exists(gate.folder / "open"):
            gate.open()
            os._exit(3)
        return item

    gate = Gate()
    pipe = Pipeline.from_dataset(range(10)).map(die_first, backend="fork", num_workers=2)
    with pipe.epochs(2) as epochs:
        with pytest.raises(WorkerDied, match="die_first"):
            list(next(epochs))
        assert list(next(epochs)) == list(range(10))


# -- chance ----------------------------------------------------------------------------------------


def shuffled(pipe: Pipeline) -> Pipeline:
    return pipe.shuffle(100).map(double, backend="threads", num_workers=2).shuffle(100)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 5), st.integers(0, 2**62))
def test_a_run_is_a_function_of_epoch_and_seed(epoch: int, seed: int) -> None:
    pipe = shuffled(Pipeline.from_dataset(range(100)))
    found = list(pipe.run(epoch=epoch, seed=seed))
    assert sorted(found) == list(range(0, 200, 2))
    assert list(pipe.run(epoch=epoch, seed=seed)) == found
    assert list(pipe.run(epoch=epoch + 1, seed=seed)) != found
    assert list(pipe.run(epoch=epoch, seed=seed + 1)) != found
    with pipe.epochs(2, first=max(0, epoch - 1), seed=seed) as epochs:
        by_number = {run.epoch: list(run) for run in epochs}
    assert by_number[epoch] == found


def test_iterations_of_one_pipeline_are_epochs_and_differ() -> None:
    pipe = Pipeline.from_dataset(range(100)).shuffle(100, seed=3)
    passes = [list(pipe) for _ in range(2)]
    assert passes[0] != passes[1]
    assert passes == [list(pipe.run(epoch=k)) for k in range(2)]
    for epoch in range(3):
        passes = [list(pipe.run(epoch=2 * epoch + k)) for k in range(2)]
        assert list(pipe.repeat(2).run(epoch=epoch)) == passes[0] + passes[1]


def test_what_has_no_seed_follows_that_of_torch() -> None:
    pipe = shuffled(Pipeline.from_dataset(range(100)))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(list(pipe.run()))
    assert found[0] == found[1] != found[2]


def test_two_shuffles_of_one_run_differ() -> None:
    one = Pipeline.from_dataset(range(100)).shuffle(100)
    pairs = list(one.zip(one))
    assert [a for a, _ in pairs] != [b for _, b in pairs]


def random_numbers(item: int) -> float:
    import random

    return random.random()


def test_workers_are_seeded_by_the_run() -> None:
    pipe = Pipeline.from_dataset(range(8)).map(random_numbers, backend="fork", num_workers=1)
    assert list(pipe.run(seed=1)) == list(pipe.run(seed=1))
    assert list(pipe.run(seed=1)) != list(pipe.run(seed=2))


# -- a description ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [*KINDS, "spawn"])
def test_a_pickled_copy_gives_the_same(backend: str) -> None:
    pipe = Pipeline.from_dataset(range(20)).map(double, backend=backend, num_workers=1)
    if backend == "spawn":
        assert list(pickle.loads(pickle.dumps(pipe))) == list(range(0, 40, 2))
        return
    pipe = pipe.batch(2).map(tuple, backend=backend, num_workers=2).shuffle(5).enumerate()
    a, b = pipe.tee(2)
    pipe = a.zip(b.map(tuple)).concat(pipe.take(3))
    copy = pickle.loads(pickle.dumps(pipe))
    assert repr(copy) == repr(pipe)
    assert copy.length == pipe.length == 13
    assert list(copy.run(seed=2)) == list(pipe.run(seed=2))


def test_a_pipeline_can_not_be_changed() -> None:
    pipe = Pipeline.from_dataset(range(5))
    for name in ("operators", "new"):
        with pytest.raises(AttributeError, match="can't be changed"):
            setattr(pipe, name, ())
    with pytest.raises(AttributeError):
        pipe.operators[0].dataset = ()
    with pytest.raises(AttributeError, match="can't be changed"):
        del pipe.operators


def numbers() -> Iterator[int]:
    return iter(range(7))


BASE = Pipeline.from_dataset(range(7))
LENGTHS: dict[str, tuple[Pipeline, float | None]] = {
    "sampler": (Pipeline.from_dataset(range(7), sampler=[1, 2]), 2),
    "function": (Pipeline.from_iterable(numbers), None),
    "readers": (Pipeline.from_iterable(range(7), backend="threads", num_workers=1), None),
    "take of endless": (BASE.repeat().take(9), 9),
    "endless": (BASE.repeat(), float("inf")),
    "fork": (BASE.tee(2)[1], 7),
}


def test_length_and_len() -> None:
    for name, (pipe, length) in LENGTHS.items():
        assert pipe.length == length, name
        assert bool(pipe)
        if length is None or length == float("inf"):
            with pytest.raises(TypeError, match=r"no len\(\): '"):
                len(pipe)
        else:
            assert len(pipe) == length
            if pipe is not LENGTHS["fork"][0]:
                assert len(list(pipe)) == length
