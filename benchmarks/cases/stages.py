"""stage: time that an empty stage adds to each item."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import timing, usage
from benchmarks.case import Answer, Case, Options, Spec, Variant, check_installed
from benchmarks.datasets.plain import ENDLESS, identity
from benchmarks.names import BACKENDS, PROCESS_BACKENDS, is_rival
from benchmarks.targets import Target, at_most


def empty_stage(loader: str, spec: Spec) -> Answer:
    """Seconds an item that `stages` empty stages add: a pipeline with them, minus one without.

    The two are measured in turn, `repeats` times, and the median of the differences is the value.
    """
    seconds, workers, stages = spec["seconds"], spec["workers"], spec["stages"]
    found: list[tuple[float, float]] = []
    meter = usage.CpuMeter()
    spent = 0.0
    for _ in range(spec["repeats"]):
        pair = []
        for count in (0, stages):
            with _items(loader, count, workers) as items:
                timed = timing.window(
                    items, seconds, warmup=spec["warmup"], ahead=spec["ahead"], meter=meter
                )
            pair.append(timed.seconds)
            spent += timed.cpu if count else -timed.cpu
        found.append((pair[0], pair[1]))
    return {
        "value": statistics.median(after - before for before, after in found),
        "cpu": spent / len(found),
        "details": {"without": min(b for b, _ in found), "with": min(a for _, a in found)},
    }


def _items(loader: str, stages: int, workers: int) -> contextlib.AbstractContextManager[Any]:
    if not is_rival(loader):
        return pipeline_of(loader, stages, workers)
    check_installed(loader)
    project, _, form = loader.partition(" ")
    return (_spdl if project == "SPDL" else _nodes)(form, stages, workers)


def pipeline_of(loader: str, stages: int, workers: int) -> contextlib.AbstractContextManager[Any]:
    """A running pipeline of `stages` empty stages; "by hand": of one that calls six functions."""
    from hybridloader import Pipeline

    backend, _, form = loader.partition(", ")
    where: Any = {} if backend == "inline" else {"backend": backend, "num_workers": workers}
    pipeline = Pipeline.from_dataset(range(ENDLESS))
    if form == "by hand" and stages:
        return iter(pipeline.map(by_hand, **where))
    if form == "not fused":
        where["fuse"] = False
    for _ in range(stages):
        pipeline = pipeline.map(identity, **where)
    return iter(pipeline)


def by_hand(item: Any) -> Any:
    """Six empty functions in one, as you would write it."""
    return identity(identity(identity(identity(identity(identity(item))))))


@contextlib.contextmanager
def _spdl(form: str, stages: int, workers: int) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    pool = ProcessPoolExecutor(workers) if form == "processes" else None
    builder: Any = PipelineBuilder()
    builder.add_source(range(ENDLESS))
    concurrency = 2 * workers if pool else workers
    for _ in range(stages):
        builder.pipe(identity, executor=pool, concurrency=concurrency, output_order="input")
    try:
        pipeline = builder.add_sink(2 * workers).build(num_threads=max(1, workers * stages))
        with pipeline.auto_stop():
            yield pipeline.get_iterator()
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _nodes(form: str, stages: int, workers: int) -> Iterator[Any]:
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    node: Any = IterableWrapper(range(ENDLESS))
    for _ in range(stages):
        method: Any = "process" if form == "processes" else "thread"
        node = ParallelMapper(node, map_fn=identity, num_workers=workers, method=method)
    yield iter(Loader(node))


def stage(options: Options) -> Case:
    """One empty stage on each backend, and six on threads."""
    spec: dict[str, Any] = {
        "workers": options.workers,
        "stages": 1,
        "seconds": 0.15 if options.quick else 0.5,
        "repeats": 3 if options.quick else 5,
        "warmup": 500,
        "ahead": 100,
    }
    rivals = options.taking_part(
        "torchdata threads", "SPDL threads", "torchdata processes", "SPDL processes"
    )
    one = ("inline", *BACKENDS, *rivals)
    six = ("threads, by hand", "threads", "threads, not fused")
    variants = tuple(
        Variant(name, work, loaders, most_rounds=options.most(3), seconds=1.3 * work["repeats"])
        for name, work, loaders in (
            ("an empty stage", spec, one),
            ("six empty stages", spec | {"stages": 6}, six),
        )
    )
    title = "what an empty stage adds"
    return Case("stage", title, "us / item", empty_stage, variants, scale=1e6, check=False)


def _adds_at_most(text: str, bound: float, loaders: tuple[str, ...]) -> Target:
    return Target("stage", text, at_most(bound, loaders, each=True, variant="an empty stage"))


TARGETS = (
    _adds_at_most("inline <= 2 us", 2, ("inline",)),
    _adds_at_most("threads <= 15 us", 15, ("threads",)),
    _adds_at_most("processes <= 40 us", 40, PROCESS_BACKENDS),
)
