"""metrics: part of a pipeline's time that goes into the metrics which `stats()` reads."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any
from unittest import mock

from benchmarks import timing
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.datasets.plain import ENDLESS, identity
from benchmarks.names import BACKENDS
from benchmarks.targets import Target, at_most

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a method, its arguments, and those by keyword."""


def part_of_time(backend: str, spec: Spec) -> Answer:
    """Part of the time of a pipeline that only hands items on.

    Every call that the metrics of its stage get is recorded for some batches; then the calls are
    made again and timed, and so are the two looks at the clock whenever the stage waits for results.
    """
    batches, size, workers = spec["batches"], spec["batch"], spec["workers"]
    with recorded() as calls, handing_on(backend, workers, size) as run:
        for _ in range(batches):
            next(run)
    listened = sum(name == "listening" for name, _, _ in calls)
    kept = min(replay(calls, workers) for _ in range(5)) + looks(listened)
    seconds = []
    for _ in range(spec["repeats"]):
        with handing_on(backend, workers, size) as run:
            seconds.append(
                timing.window(run, spec["seconds"], warmup=50, ahead=4 * workers).seconds
            )
    whole = timing.percentile(seconds, 0.5)
    details = {
        "us_per_batch": kept / batches * 1e6,
        "calls_per_batch": len(calls) / batches,
        "batch_us": whole * 1e6,
    }
    return {"value": kept / batches / whole, "details": details}


def handing_on(
    backend: str, workers: int, batch: int
) -> contextlib.AbstractContextManager[Iterator[Any]]:
    """A pipeline of one empty stage, running."""
    from hybridloader import Pipeline

    pipeline = Pipeline.from_dataset(range(ENDLESS))
    return iter(pipeline.map(identity, backend=backend, num_workers=workers).batch(batch))


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """Calls that the metrics of stages get meanwhile."""
    from hybridloader.observe.stage_metrics import StageMetrics

    calls: list[Call] = []

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def record(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, tuple(map(_without_payload, args)), kwargs))
            return method(self, *args, **kwargs)

        return record

    with contextlib.ExitStack() as stack:
        for name, method in inspect.getmembers(StageMetrics, inspect.isfunction):
            if not name.startswith("_"):
                stack.enter_context(mock.patch.object(StageMetrics, name, recording(name, method)))
        yield calls


def _without_payload(value: Any) -> Any:
    """A message without its payload, which may lie in memory that is used again."""
    return value._replace(payload=None) if "payload" in getattr(value, "_fields", ()) else value


def replay(calls: list[Call], workers: int) -> float:
    """Seconds that those calls take."""
    from hybridloader.observe.stage_metrics import StageMetrics

    metrics = StageMetrics(workers)
    bound = [partial(getattr(metrics, name), *args, **kwargs) for name, args, kwargs in calls]
    began = time.perf_counter()
    for call in bound:
        call()
    return time.perf_counter() - began


def looks(times: int) -> float:
    """Seconds of the looks at the clock that a stage takes so many times, when it waits for results."""

    def look() -> None:
        waited = 0.0
        for _ in range(times):
            began = time.monotonic()
            waited += time.monotonic() - began

    return timing.fastest(look, 5)


def metrics(options: Options) -> Case:
    """Batches of 64 integers from one empty stage."""
    spec: dict[str, Any] = {
        "workers": options.workers,
        "batch": 64,
        "batches": 300,
        "seconds": 0.15 if options.quick else 0.5,
        "repeats": 3 if options.quick else 9,
    }
    variant = Variant("64 ints", spec, BACKENDS)
    title = "the part of the time that goes into stage metrics"
    return Case("metrics", title, "% of the time", part_of_time, (variant,), scale=100, check=False)


TARGETS = (
    Target(
        *("metrics", "<= 1 % of the time", at_most(1, BACKENDS, each=True)),
        why="The calls for a batch, some eight, take 0.9 to 1 us when they are replayed in a "
        "loop. A stage that has 64 integers done in less than 100 us spends more than a hundredth of "
        "that.",
    ),
)
