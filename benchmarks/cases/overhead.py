"""Jobs about what a pipeline itself costs: an empty stage, its books, the time it takes from you."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import timing
from benchmarks import usage as cost
from benchmarks.datasets.plain import nothing, spin
from benchmarks.datasets.remote import least
from benchmarks.loaders.dataloaders import CannotDo
from benchmarks.measurements import Answer, opened

ENDLESS = 1 << 40


# -- an empty stage ----------------------------------------------------------------------------------


def empty_stage(loader: str, spec: dict[str, Any]) -> Answer:
    """Seconds an item that `stages` empty stages add: a pipeline with them minus one without.

    The two are measured in turn, `repeats` times, and the median of the differences is the value.
    """
    seconds, workers, stages = spec["seconds"], spec["workers"], spec["stages"]
    found: list[tuple[float, float]] = []
    meter = cost.CpuMeter()
    spent = 0.0
    for _ in range(spec["repeats"]):
        pair = []
        for count in (0, stages):
            with _items(loader, count, workers) as items:
                timed = timing.steady(items, seconds, warmup=spec["warmup"], meter=meter)
            pair.append(timed.seconds)
            spent += timed.cpu if count else -timed.cpu
        found.append((pair[0], pair[1]))
    return {
        "value": statistics.median(after - before for before, after in found),
        "cpu": spent / len(found),
        "details": {"without": min(b for b, _ in found), "with": min(a for _, a in found)},
    }


def _items(loader: str, stages: int, workers: int) -> contextlib.AbstractContextManager[Any]:
    project, _, form = loader.partition(" ")
    if project == "SPDL":
        return _spdl(form, stages, workers)
    if project == "torchdata":
        return _nodes(form, stages, workers)
    return _ours(loader, stages, workers)


def _ours(loader: str, stages: int, workers: int) -> contextlib.AbstractContextManager[Any]:
    from hybridloader import Pipeline

    backend, _, form = loader.partition(", ")
    where: Any = {} if backend == "inline" else {"backend": backend, "num_workers": workers}
    pipeline = Pipeline.from_dataset(range(ENDLESS))
    if form == "by hand" and stages:
        return iter(pipeline.map(by_hand, **where))
    if form == "not fused":
        where["fuse"] = False
    for _ in range(stages):
        pipeline = pipeline.map(nothing, **where)
    return iter(pipeline)


def by_hand(item: Any) -> Any:
    """Six empty functions in one, as you would write it."""
    return nothing(nothing(nothing(nothing(nothing(nothing(item))))))


@contextlib.contextmanager
def _spdl(form: str, stages: int, workers: int) -> Iterator[Any]:
    try:
        from spdl.pipeline import PipelineBuilder
    except ImportError:
        raise CannotDo("not installed: pip install spdl-core") from None
    pool = ProcessPoolExecutor(workers) if form == "processes" else None
    builder = PipelineBuilder().add_source(range(ENDLESS))
    concurrency = 2 * workers if pool else workers
    for _ in range(stages):
        builder.pipe(nothing, executor=pool, concurrency=concurrency, output_order="input")
    try:
        pipeline = builder.add_sink(2 * workers).build(num_threads=max(1, workers * stages))
        with pipeline.auto_stop():
            yield pipeline.get_iterator()
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _nodes(form: str, stages: int, workers: int) -> Iterator[Any]:
    try:
        from torchdata.nodes import IterableWrapper, Loader, ParallelMapper
    except ImportError:
        raise CannotDo("not installed: pip install torchdata") from None
    node: Any = IterableWrapper(range(ENDLESS))
    for _ in range(stages):
        method: Any = "process" if form == "processes" else "thread"
        node = ParallelMapper(node, map_fn=nothing, num_workers=workers, method=method)
    yield iter(Loader(node))


# -- the time it takes from you ----------------------------------------------------------------------


def tick(loader: str, spec: dict[str, Any]) -> Answer:
    """How much longer than alone a piece of Python takes in the loop, while workers are flat out.

    The loop takes a batch, does 1 ms of Python, and takes the next one: less work than a batch is, so
    the loader is never ahead and its workers never rest. The value is the 99th percentile.
    """
    loops = spec["tick_loops"]
    alone = least(lambda: spin(loops), 50)
    late: list[float] = []
    with opened(loader, spec) as running:
        batches = running.epoch()
        for _ in range(2 * spec["workers"] + 4):
            next(batches)
        until = time.perf_counter() + spec["seconds"]
        while time.perf_counter() < until or len(late) < spec["ticks"]:
            next(batches)
            began = time.perf_counter()
            spin(loops)
            late.append(time.perf_counter() - began - alone)
    late.sort()
    details = {"max": late[-1] * 1e3, "median": late[len(late) // 2] * 1e3, "ticks": len(late)}
    return {"value": late[int(0.99 * (len(late) - 1))], "details": details}


# -- the books ---------------------------------------------------------------------------------------


def books(loader: str, spec: dict[str, Any]) -> Answer:
    """The part of a pipeline's time that goes into its books, where all it does is to hand items on.

    Every call that the books of a running stage get is recorded for some batches; then the same calls
    are made again and timed, and so are the two looks at the clock for every batch that the loop gets.
    Beside it, as a detail and far less exact: a batch's time with books over that without.
    """
    from benchmarks.cases import stage_metrics as engine

    workers, batch, count = spec["workers"], spec["batch"], spec["batches"]
    calls = engine.record(loader, workers, batch, count)
    kept = min(engine.replay(calls, workers) for _ in range(5)) + engine.looks(count)
    whole, ratio = engine.beside(
        loader, workers, batch, seconds=spec["seconds"], repeats=spec["repeats"]
    )
    details = {
        "us_per_batch": kept / count * 1e6,
        "calls_per_batch": len(calls) / count,
        "batch_us": whole * 1e6,
        "with_over_without": ratio,
    }
    return {"value": kept / count / whole, "details": details}


JOBS: dict[str, Callable[[str, dict[str, Any]], Answer]] = {
    job.__name__: job for job in (empty_stage, tick, books)
}
