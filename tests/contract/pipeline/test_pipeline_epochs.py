"""Pipelines are passed over several times: in turn, at once, in epochs. They stay what they were."""

from __future__ import annotations

import os
import threading
from itertools import islice, zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripts import Script

from hybridloader import Pipeline, WorkerDied
from hybridloader.errors import IteratorClosed
from hybridloader.testing import Gate

KINDS = ("inline", "threads", "fork")
WORKERS = KINDS[1:]


def double(item: int) -> int:
    return 2 * item


def two_stages(backend: str, count: int = 40) -> Pipeline:
    """With a relay between the stages and one behind them."""
    pipe = Pipeline.from_dataset(range(count)).map(double, backend=backend, num_workers=2)
    return pipe.batch(2, collate_fn=list).map(tuple, backend=backend, num_workers=2)


PAIRS = [(4 * k, 4 * k + 2) for k in range(20)]


# -- several passes --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", KINDS)
def test_passes_at_once_and_passes_that_were_left_do_not_disturb_others(backend: str) -> None:
    pipe = two_stages(backend)
    one, other = iter(pipe), iter(pipe)
    assert [next(one), next(one)] == PAIRS[:2]
    assert list(zip_longest(one, other)) == list(zip_longest(PAIRS[2:], PAIRS))
    with pipe.epochs(4) as epochs:
        for number, epoch in enumerate(epochs):
            most = (3, 20, 0, 20)[number]
            assert list(islice(epoch, most)) == PAIRS[:most]
            if number == 1:
                left = epoch
                assert list(epoch) == []
            if number == 2:
                left.close()  # that of an epoch before


class Opened:
    """A function that tells which time it was set up, and who runs it."""

    def setup(self) -> None:
        self.time = os.urandom(8)

    def __call__(self, item: Any) -> Any:
        return self.time, os.getpid(), threading.get_ident()


@pytest.mark.parametrize("backend", WORKERS)
def test_workers_live_and_are_set_up_once_for_all_epochs_and_repetitions(backend: str) -> None:
    where: dict[str, Any] = {"backend": backend, "num_workers": 1, "fuse": False}
    pipe = Pipeline.from_dataset(range(6)).map(Opened(), **where).enumerate()
    pipe = pipe.map(lambda pair: (pair[1], os.getpid(), threading.get_ident()), **where)
    with pipe.repeat(2).epochs(3) as epochs:
        ((first, *second),) = {item for epoch in epochs for item in epoch}
    assert first[1:] != tuple(second)
    ((other, *_),) = set(pipe)  # another run, other workers
    assert first[0] != other[0]


def test_without_workers_a_function_is_set_up_once_for_all_epochs() -> None:
    calls: list[int] = []
    where: dict[str, Any] = {"backend": "inline", "num_workers": 1, "worker_init_fn": calls.append}
    with Pipeline.from_dataset(range(3)).map(abs, **where).repeat(2).epochs(2) as epochs:
        assert [list(epoch) for epoch in epochs] == [[0, 1, 2] * 2] * 2
    assert calls == [0]


def test_an_epoch_that_is_closed_ends_and_the_next_begins() -> None:
    scripts: list[Script] = []
    pipe = Pipeline.from_iterable(lambda: scripts.append(Script(*range(9))) or scripts[-1])  # type: ignore[func-returns-value]
    with pipe.prefetch(1).epochs(2) as epochs:
        for epoch in epochs:
            assert next(epoch) == 0
            epoch.close()
            assert scripts[-1].closed
            for ask in (epoch.__next__, epoch.__enter__):
                with pytest.raises(IteratorClosed):
                    ask()


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


def test_an_epoch_is_left_while_its_worker_is_busy() -> None:
    begun, left, in_time = threading.Event(), threading.Event(), list[bool]()

    def held(item: int) -> int:
        begun.set()
        in_time.append(left.wait(20))
        return item

    pipe = Pipeline.from_dataset(range(6)).map(held, backend="threads", num_workers=1).prefetch(1)
    with pipe.epochs(2) as epochs:
        next(epochs)
        assert begun.wait(60)
        new = next(epochs)  # a thread waits for the item of the one before
        left.set()
        assert list(new) == [*range(6)]
    assert all(in_time)


def test_an_epoch_that_is_closed_while_it_begins_starts_nothing() -> None:
    def closing() -> range:
        epochs.close()
        return range(3)

    epochs = Pipeline.from_iterable(closing).prefetch(1).epochs(2)
    with pytest.raises(IteratorClosed, match="the pipeline was closed"):
        next(epochs)
