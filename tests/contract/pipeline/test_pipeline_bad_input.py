"""A pipeline that can't be meant is refused: at once where that can be known, in words that help."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybridloader import Pipeline, Threads
from hybridloader.errors import BackendUnavailable, WorkerPicklingError
from hybridloader.pipeline import Operator, Pad

BASE = Pipeline.from_dataset(range(7))


def double(item: int) -> int:
    return 2 * item


class Decoder:
    def setup(self) -> None:
        pass

    def __call__(self, item: Any) -> Any:
        return item


def two(a: Any, b: Any) -> Any:
    return a


Build = Callable[[], Any]
Case = tuple[Build, type[Exception], str]


def placed(error: type[Exception], words: str, **where: Any) -> Case:
    """Give these keywords to each method that takes a function; the error names the stage."""

    def build() -> Any:
        for method in (BASE.map, BASE.filter, BASE.flat_map):
            with pytest.raises(error, match=f"'my stage'.*{words}"):
                method(double, name="my stage", **where)
        with pytest.raises(error, match=f"'my stage'.*{words}"):
            Pipeline.from_dataset(range(3), name="my stage", **where)
        Pipeline.from_iterable([1], name="my stage", **where)

    return build, error, f"stage 'my stage'.*{words}"


THREADS: dict[str, Any] = {"backend": "threads"}

PLACEMENTS: dict[str, Case] = {
    "a keyword by another name": (
        lambda: BASE.map(double, backend="threads", num_worker=2),
        TypeError,
        "unexpected keyword 'num_worker'; did you mean 'num_workers'",
    ),
    "misspelled parameter of a source": (
        lambda: Pipeline.from_dataset(range(3), shufle=True),  # type: ignore[call-arg]
        TypeError,
        "'from_dataset'.*'shufle'; did you mean 'shuffle'",
    ),
    "mix of a list of pipelines": (
        lambda: BASE.mix([BASE, BASE]),  # type: ignore[arg-type]
        TypeError,
        "pass each pipeline as an argument",
    ),
    "unknown backend": placed(
        BackendUnavailable, "unknown backend 'treads'.*threads", backend="treads"
    ),
    "class as backend": placed(TypeError, r"use an instance: Threads\(\)", backend=Threads),
    "no workers": placed(ValueError, "workers must be at least 1, got 0", **THREADS, num_workers=0),
    "workers alone": placed(ValueError, "workers but no backend.*backend='threads'", num_workers=2),
    "timeout alone": placed(ValueError, "timeout but no backend", timeout=3),
    "on_worker_death alone": placed(
        ValueError, "on_worker_death but no backend", on_worker_death="restart"
    ),
    "task_timeout alone": placed(ValueError, "task_timeout but no backend", task_timeout=3),
    "unknown policy": placed(ValueError, "on_error must be", on_error="ignore"),
    "unknown policy of deaths": placed(
        ValueError, "on_worker_death must be", **THREADS, on_worker_death="x"
    ),
    "negative task_timeout": placed(ValueError, "task_timeout is sec", **THREADS, task_timeout=-1),
    "bool task_timeout": placed(
        ValueError, "task_timeout is seconds", **THREADS, task_timeout=True
    ),
    "no prefetch": placed(ValueError, "prefetch must be at least 1", **THREADS, prefetch=0),
    "bool timeout": placed(ValueError, "timeout is seconds", **THREADS, timeout=True),
    "init is no function": placed(
        TypeError, "worker_init_fn must be callable", **THREADS, worker_init_fn=3
    ),
}

FUNCTIONS: dict[str, Case] = {
    "no function": (lambda: BASE.map(3), TypeError, "stage 'map.*needs a function.*not 3"),
    "too many parameters": (
        lambda: BASE.filter(two),
        TypeError,
        r"stage 'filter\(two\)'.*one item",
    ),
    "class with setup": (
        lambda: BASE.map(Decoder),
        TypeError,
        r"class Decoder.*map\(Decoder\(\)\)",
    ),
    "collate is no function": (lambda: BASE.batch(3, collate_fn=3), TypeError, "batch: collate_fn"),
    "cache number": (lambda: BASE.cache(3), TypeError, r"cache: path .*not 3 \(a int\)"),
    "cache folder": (lambda: BASE.cache("some/"), ValueError, "path='some/' names no file"),
    "fingerprint": (lambda: BASE.cache("a", fingerprint=3), TypeError, "must be a text, not 3"),
    "padding": (lambda: Pad("0"), TypeError, "padding_value must be a number, not '0'"),
    "apply nothing": (lambda: BASE.apply(3), TypeError, "apply takes an Operator or a function"),
    "apply what gives none": (lambda: BASE.apply(id), TypeError, "which is not a Pipeline"),
}

SOURCES: dict[str, Case] = {
    "no iterable": (lambda: Pipeline.from_iterable(3), TypeError, "must be an iterable, or a"),
    "text": (lambda: Pipeline.from_iterable("abc"), TypeError, "read one character at a time"),
    "sampler": (lambda: Pipeline.from_dataset([1], sampler=3), TypeError, "must be an iterable"),
    "container for readers": (
        lambda: Pipeline.from_iterable([1], backend="threads", num_workers=2),
        ValueError,
        r"each of the 2 readers would give all items of \[1\]",
    ),
    "generator for readers": (
        lambda: Pipeline.from_iterable((k for k in "ab"), name="pages", backend="threads"),
        TypeError,
        "pages.*read only once.*give a function",
    ),
    "threads within a reader": (
        lambda: Pipeline.from_iterable([1], backend="threads", threads_per_worker=2),
        ValueError,
        "threads_per_worker, but a reader.*num_workers",
    ),
    "collate without batches": (
        lambda: Pipeline.from_dataset(range(3), collate_fn=list),
        ValueError,
        "batch_sampler",
    ),
    "no operators": (lambda: Pipeline([]), TypeError, "begins with a source"),
    "two sources": (lambda: Pipeline(BASE.operators * 2), TypeError, "can't be a step"),
}

NUMBERS: dict[str, Case] = {
    "take": (lambda: BASE.take(-1), ValueError, "take: count must be at least 0, got -1"),
    "skip": (lambda: BASE.skip(1.5), TypeError, "skip: count must be a whole number"),
    "batch": (lambda: BASE.batch(0), ValueError, "batch: batch_size must be at least 1"),
    "shuffle": (lambda: BASE.shuffle(0), ValueError, "shuffle: buffer_size must be at least 1"),
    "repeat": (lambda: BASE.repeat(-1), ValueError, "repeat: times must be at least 0"),
    "prefetch": (lambda: BASE.prefetch(0), ValueError, "prefetch: count must be at least 1"),
    "rank": (lambda: BASE.shard(3, 3), ValueError, "shard: rank=3 of num_replicas=3.*0 to 2"),
    "half a shard": (
        lambda: BASE.shard(rank=1),
        ValueError,
        "shard: .*=None and rank=1: give both",
    ),
    "no budget": (lambda: BASE.batch_by(double, "9"), TypeError, "max_cost must be a number"),
    "budget": (lambda: BASE.batch_by(double, math.nan), ValueError, "batch_by: max_cost"),
}


def mixed(weights: Any, error: type[Exception], words: str) -> Case:
    return lambda: BASE.mix(BASE, weights=weights), error, f"mix: weights.*{words}"


JOINS: dict[str, Case] = {
    "negative weight": mixed([1, -1], ValueError, "above 0"),
    "no weights": mixed(2, ValueError, "one number for each of 2 pipelines, not 2"),
    "a text": mixed([1, "2"], TypeError, r"\[1\] must be a number, not '2'"),
    "too few": mixed([1], ValueError, "one number for each of 2"),
    "stop": (lambda: BASE.mix(BASE, stop="some"), ValueError, "mix: stop must be 'all' or 'first'"),
    "a list zipped": (lambda: Pipeline.zip([1], BASE), TypeError, "zip joins pipelines"),
    "lengths": (lambda: BASE.zip(BASE.take(3)), ValueError, r"zip: .*different lengths: \[7, 3\]"),
}

OTHERS: dict[str, Case] = {
    "fuse": placed(TypeError, "fuse", **THREADS, fuse="no"),
    "a name that is no text": (lambda: BASE.map(double, name=5), TypeError, "name of a stage"),
    "seed of a run": (lambda: BASE.run(seed="x"), TypeError, "seed must be a whole number"),
    "the class of an operator": (
        lambda: BASE.apply(type(BASE.batch(2).operators[-1])),
        TypeError,
        "apply takes an Operator",
    ),
}

EARLY = {**PLACEMENTS, **FUNCTIONS, **SOURCES, **NUMBERS, **JOINS, **OTHERS}


@pytest.mark.parametrize(("build", "kind", "words"), EARLY.values(), ids=EARLY)
def test_it_is_refused_when_it_is_described(
    build: Build, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        build()
    assert type(caught.value) is kind


# -- when it runs ----------------------------------------------------------------------------------


def generator() -> Iterator[int]:
    yield from range(3)


class Opens(Operator):
    def __init__(self, what: Callable[[Any], Any]) -> None:
        self.what = what

    def branches(self) -> tuple[Any, ...]:
        return (BASE.take(2),)

    def open(self, items: Iterator[Any], context: Any) -> Any:
        return self.what(context)


LATE: dict[str, Case] = {
    "a step that opens a list": (
        lambda: BASE.apply(Opens(lambda _: [1])),
        TypeError,
        r"'opens': open\(\) must return an iterator, not \[1\]",
    ),
    "a step that opens another pipeline": (
        lambda: BASE.apply(Opens(lambda context: context.open(BASE))),
        ValueError,
        "'opens' did not name .* as branch 0",
    ),
    "unpicklable function": (
        lambda: BASE.map(
            functools.partial(two, threading.Lock()),
            name="my stage",
            backend="spawn",
            num_workers=1,
        ),
        WorkerPicklingError,
        "'my stage'.*can't be pickled",
    ),
    "uneven, unknown lengths": (
        lambda: BASE.filter(double, **THREADS).zip(BASE),
        ValueError,
        "zip: pipeline 0 ended after 6 items",
    ),
}


@pytest.mark.parametrize(("build", "kind", "words"), LATE.values(), ids=LATE)
def test_it_is_refused_when_it_runs(build: Build, kind: type[Exception], words: str) -> None:
    pipe = build()
    with pytest.raises(kind, match=words), pipe.run() as run:
        list(run)


def fails(*_: Any) -> Any:
    raise LookupError("a file that isn't there")


class FailingSetup(Decoder):
    def setup(self) -> None:
        fails()


@pytest.mark.parametrize("backend", ["threads", "fork"])
@pytest.mark.parametrize("what", ["init", "setup"])
def test_a_stage_that_can_not_begin_says_so_for_each_task(backend: str, what: str) -> None:
    function: Any = double if what == "init" else FailingSetup()
    init = fails if what == "init" else None
    where: dict[str, Any] = {"backend": backend, "num_workers": 1, "worker_init_fn": init}
    with BASE.map(function, name="my stage", **where).batch(2).run() as run:
        for _ in range(7):
            with pytest.raises(LookupError, match="isn't there") as caught:
                next(run)
            assert any("stage 'my stage'" in note for note in caught.value.__notes__)
        with pytest.raises(StopIteration):
            next(run)


def test_a_step_without_workers_that_can_not_begin_is_named() -> None:
    with pytest.raises(LookupError, match="isn't there") as caught:
        BASE.map(FailingSetup(), name="my step").run()
    assert "In stage 'my step', setting it up." in caught.value.__notes__


def test_a_backend_that_can_not_serve_is_refused_before_any_worker_starts() -> None:
    started = []

    class Absent(Threads):
        def check(self) -> None:
            raise BackendUnavailable("no such machine")

    pipe = Pipeline.from_dataset(range(4)).map(
        abs, backend="threads", num_workers=1, worker_init_fn=started.append
    )
    pipe = pipe.map(str, backend=Absent(), num_workers=1)
    with pytest.raises(BackendUnavailable, match=r"stage 'map\(str\)': no such machine"):
        pipe.run()
    assert started == []
