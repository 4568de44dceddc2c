"""Errors of functions and sources of a pipeline are raised in their places, and the rest goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.failing_datasets import kinds, of_a_loader_within, outcomes
from support.platforms import needs_fork

from hybridloader import Pipeline, StateError, TooManyErrors, WorkerDied, WorkerTimeout
from hybridloader.errors import IteratorClosed, NotReady, ShardLost, TaskTimeout

KINDS = ("inline", "threads", "fork")


def everything(run: Iterator[Any]) -> list[Any]:
    """Its items, and the types of what it raises."""
    return kinds(outcomes(run))


@pytest.mark.parametrize("backend", [*KINDS, "spawn"])
def test_an_exception_tells_stage_and_item(backend: str) -> None:
    class Own(Exception):
        """Made in a function, so that it can only be sent by value."""

    def fail_at_7(item: int) -> int:
        if item == 7:
            raise Own("seven", item)
        return item

    pipe = Pipeline.from_dataset(range(20)).map(abs)
    run = pipe.map(fail_at_7, backend=backend, num_workers=1, name="my stage").batch(
        2, collate_fn=list
    )
    with run.run() as items:
        assert [next(items) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(Exception, match="seven") as caught:
            next(items)
        assert caught.value.args == ("seven", 7)
        assert caught.type.__name__ == "Own"
        (note,) = caught.value.__notes__
        assert "stage 'my stage'" in note
        assert "working on 7." in note
        assert next(items) == [6, 8]


class Leaves(BaseException):
    """No error of an item: it ends whatever it comes through."""


@pytest.mark.parametrize("kind", [Leaves, GeneratorExit, SystemExit])
def test_what_ends_a_thread_between_two_steps_is_not_taken_for_the_end_of_the_items(
    kind: type[BaseException],
) -> None:
    def leaving(item: int) -> int:
        if item == 2:
            raise kind
        return item

    with Pipeline.from_dataset(range(6)).map(leaving).prefetch(2).run() as run:
        assert [next(run), next(run)] == [0, 1]
        with pytest.raises(kind):
            next(run)
        with pytest.raises(IteratorClosed):
            next(run)


@needs_fork
def test_an_item_that_can_not_be_sent_fails_alone_among_those_that_go_with_it() -> None:
    def drawn(backend: str) -> list[Any]:
        torch.manual_seed(1)
        where: dict[str, Any] = {"backend": backend, "num_workers": 1, "seeding": "sample"}
        with Pipeline.from_iterable(items).map(lambda _: torch.rand(()), **where).run() as run:
            return everything(run)

    items = [*range(70), threading.Lock(), *range(70, 95)]
    ours, expected = drawn("fork"), drawn("threads")
    assert (ours.pop(70).__name__, type(expected.pop(70))) == ("ResultPicklingError", torch.Tensor)
    assert ours == expected


# -- errors of a user's code that are of our own types -------------------------------------------------

OURS = (
    *(IteratorClosed, NotReady, ShardLost, StateError, TaskTimeout, TimeoutError, TooManyErrors),
    *(WorkerDied, WorkerTimeout),
)


class Stumble:
    """Function that raises an error at 3: its own, or that of a loader which it uses."""

    def __init__(self, kind: type[Exception], *, within: bool) -> None:
        self.kind, self.within = kind, within

    def __call__(self, item: Any) -> Any:
        if item == 3 or (type(item) is list and 3 in item):
            raise of_a_loader_within(self.kind("mine")) if self.within else self.kind("mine")
        return item


Way = Callable[[Pipeline, Stumble], Pipeline]

WAYS: dict[str, Way] = {
    "inline": lambda pipe, f: pipe.map(f),
    "threads": lambda pipe, f: pipe.map(f, backend="threads", num_workers=2),
    "fork": lambda pipe, f: pipe.map(f, backend="fork", num_workers=1),
    "before a stage": lambda pipe, f: pipe.map(f).map(abs, backend="threads", num_workers=1),
    "two stages": lambda pipe, f: pipe.map(f, backend="fork", num_workers=1).map(
        abs, backend="threads", num_workers=1
    ),
    "counted": lambda pipe, f: pipe.map(f).take(7).skip(0).enumerate().map(lambda pair: pair[1]),
    "collation": lambda pipe, f: pipe.batch(1, collate_fn=f).map(lambda batch: batch[0]),
    "a cost": lambda pipe, f: pipe.batch_by(f, 99, max_size=1, collate_fn=list).map(
        lambda batch: batch[0]
    ),
    "a source before a stage": lambda pipe, f: Pipeline.from_iterable(
        lambda: map(f, range(2, 9))
    ).map(abs, backend="threads", num_workers=1),
}


@pytest.mark.parametrize(
    ("way", "within"),
    [*((way, False) for way in WAYS), *((way, True) for way in ("inline", "fork"))],
)
def test_an_error_of_a_function_ends_nothing_whatever_its_type(way: str, within: bool) -> None:
    pipe = Pipeline.from_dataset(range(2, 9))
    wanted = everything(WAYS[way](pipe, Stumble(KeyError, within=False)).run())
    for kind in (
        OURS[::4] if way in ("fork", "two stages") else OURS
    ):  # processes take long to start
        with WAYS[way](pipe, Stumble(kind, within=within)).run() as run:
            assert everything(run) == [kind if found is KeyError else found for found in wanted]
            assert run.state_dict()["given"] == len(wanted) == 7


def test_a_closed_run_within_a_function_ends_no_run_around_it() -> None:
    other = Pipeline.from_dataset(range(9)).run()
    other.close()
    pipe = Pipeline.from_dataset(range(3)).map(lambda item: next(other) if item == 1 else item)
    with pipe.run() as run:
        assert everything(run) == [0, IteratorClosed, 2]
