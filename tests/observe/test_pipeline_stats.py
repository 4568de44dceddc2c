"""Statistics of pipelines whose bottleneck is known: the real thing, on all kinds of workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from hybridloader import Pipeline, get_worker_info
from hybridloader.observe import Stats

NAP = 0.004

pytestmark = pytest.mark.usefixtures("free_cores")


def sleeping(item: int) -> int:
    time.sleep(NAP)
    return item


def spinning(item: int) -> int:
    until = time.thread_time() + NAP
    while time.thread_time() < until:
        pass
    return item


def quick(item: Any) -> Any:
    return item


def dear(item: int) -> Any:
    # numpy's scalars: without the GIL (3.13t), 20,000 lists take 5.8 ms to make and 1.3 ms to pickle.
    return list(numpy.arange(item, item + 20_000))


async def awaiting(item: int) -> int:
    await asyncio.sleep(NAP)
    return item


async def blocking(item: int) -> int:
    await asyncio.sleep(0)
    time.sleep(NAP)
    return item


async def computing(item: int) -> int:
    await asyncio.sleep(0)
    return spinning(item)


async def quickly(item: int) -> int:
    await asyncio.sleep(0)
    return item


def slowly() -> Iterator[tuple[Any, int]]:
    info = get_worker_info()
    for item in range(60):
        time.sleep(NAP)
        yield info and info.id, item


THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}
PROCESSES: dict[str, Any] = {"backend": "fork", "num_workers": 2}
FEW = Pipeline.from_dataset(range(100))
MORE = Pipeline.from_dataset(range(300))  # next to which the start of processes is short


def run_of(pipe: Pipeline) -> Stats:
    with pipe.run(observe=True) as run:
        list(run)
        return run.stats()


CASES: dict[str, tuple[Callable[[], Pipeline], str, str | None, str | None]] = {
    "the first of two": (
        lambda: MORE.map(sleeping, **THREADS).map(quick, **PROCESSES),
        *("stage", "map(sleeping)", "waits"),
    ),
    "the second of two": (
        lambda: MORE.map(quick, **THREADS).map(sleeping, **PROCESSES),
        *("stage", "map(sleeping)", "waits"),
    ),
    "results that are dear to send": (
        lambda: FEW.map(dear, **PROCESSES),
        *("stage", "map(dear)", "transport"),
    ),
    "a slow source": (
        lambda: Pipeline.from_iterable(slowly).map(quick, **THREADS),
        *("source", "from_iterable(slowly)", None),
    ),
    "readers that wait": (
        lambda: Pipeline.from_iterable(slowly, backend="threads", num_workers=2),
        *("source", "read(slowly)", "waits"),
    ),
    "a step without workers": (lambda: FEW.map(sleeping), "stage", None, None),
    "batches without workers": (
        lambda: FEW.map(quick, **THREADS).map(sleeping).batch(2, collate_fn=list),
        *("stage", "map(sleeping) + batch(2)", None),
    ),
}

COROUTINES: list[tuple[Any, dict[str, Any], int, str]] = [
    (awaiting, {}, 4, "waits"),
    (awaiting, PROCESSES, 1, "waits"),
    (blocking, THREADS, 1, "blocks-loop"),
    (blocking, PROCESSES, 4, "blocks-loop"),
]


@pytest.mark.parametrize(("function", "where", "concurrency", "kind"), COROUTINES)
def test_coroutines_that_keep_their_event_loop_are_named(
    function: Any, where: dict[str, Any], concurrency: int, kind: str
) -> None:
    pipe = (FEW if concurrency == 1 else MORE).map(function, concurrency=concurrency, **where)
    stats = run_of(pipe)
    verdict = stats.verdict
    assert (verdict.cause, verdict.kind) == ("stage", kind), str(stats)
    more = f"({concurrency} now) of map(awaiting)" in verdict.advice
    assert (more and "concurrency=" in verdict.advice) == (kind == "waits")
    if kind == "blocks-loop":
        assert "coroutine of map(blocking) kept the event loop for" in verdict.evidence
        assert "await that" in verdict.advice


def test_coroutines_that_compute_are_named_beside_the_kind_of_their_work() -> None:
    stats = run_of(FEW.map(computing, concurrency=4, backend="fork", num_workers=1))
    assert "coroutine of map(computing) kept the event loop for" in stats.verdict.evidence, stats


def test_a_source_does_not_count_as_a_turn_of_coroutines() -> None:
    stats = run_of(Pipeline.from_iterable(slowly).map(quickly, concurrency=4))
    assert stats.verdict.kind != "blocks-loop", stats


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_what_is_known_to_be_so(case: str) -> None:
    make, cause, name, kind = CASES[case]
    stats = run_of(make())
    verdict = stats.verdict
    assert (verdict.cause, verdict.kind) == (cause, kind), str(stats)
    if name is not None:
        assert verdict.stage is not None, str(stats)
        assert verdict.stage.startswith(name[:18]), str(stats)
    assert sum(stats.stall.by_stage.values()) <= stats.stall.seconds * (1 + 1e-6) + 1e-9


def test_statistics_go_on_from_one_epoch_to_the_next() -> None:
    with FEW.map(quick, **THREADS).batch(10).epochs(3, observe=True) as epochs:
        for number, run in enumerate(epochs, 1):
            assert len(list(run)) == 10
            assert run.stats().items == 10 * number
    assert run.stats().verdict
    assert run.stats().seconds == run.stats().seconds, "the clock has stopped"


def test_a_run_that_was_never_asked_has_statistics() -> None:
    run = FEW.map(quick, **THREADS).run(observe=True)
    assert run.stats().verdict.cause == "unknown"
    run.close()
    assert run.stats().items == 0
    assert str(run.stats())


def test_nothing_is_made_for_a_run_that_nobody_asked_to_observe() -> None:
    pipe = FEW.map(quick, **THREADS).map(awaiting, concurrency=2).prefetch(2)
    with pipe.run() as run:
        assert next(run) == 0
        executor = run._executor
        (stage,), relays = executor.stages.values(), executor.relays.values()
        assert (stage.stage._observer, stage.stage.spec.metering, stage.measures) == (None,) * 3
        assert [running.relay.queue.sleeps for running in relays] == [None] * len(relays)
        assert {context.parts for context in executor.inline.values()} == {None}
        assert run._loop is executor.observation is None
        with pytest.raises(RuntimeError, match=r"pipe\.run\(observe=True\)"):
            run.stats()
    with FEW.epochs(1) as epochs, pytest.raises(RuntimeError, match=r"epochs\(n, observe=True\)"):
        next(epochs).stats()


def test_a_run_that_begins_from_a_state_is_observed_as_before() -> None:
    pipe = FEW.map(quick, **THREADS)
    with pipe.run(observe=True) as run:
        next(run)
        state = run.state_dict()
    with pipe.run(observe=True) as run:
        run.load_state_dict(state)
        assert next(run) == 1
        assert run.stats().items == 1


@pytest.mark.parametrize("forked", [False, True])
def test_whoever_joins_branches_waits_for_the_stages_at_their_ends(forked: bool) -> None:
    def stage(pipe: Pipeline) -> Pipeline:
        return pipe.map(str, backend="threads", num_workers=1)

    one, two = (
        Pipeline.from_dataset(range(50)).tee(2)
        if forked
        else [Pipeline.from_dataset(range(50))] * 2
    )
    with Pipeline.zip(stage(one), stage(two)).run(observe=True) as run:
        assert len(list(run)) == 50
        executor = run._executor
        waits = executor.waits_before(executor.plan.nodes[:1])
        assert waits == [running.measures.waits for running in executor.stages.values()]
        assert all(one.waited > 0 and one.latest for one in waits)
