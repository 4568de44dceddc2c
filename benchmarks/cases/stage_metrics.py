"""What it costs that a running stage keeps books: its calls recorded and timed, and a run without them.

Imported by the job that measures this and by nobody else: it reaches into hybridloader's engine.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from benchmarks import timing
from benchmarks.datasets.plain import nothing
from benchmarks.datasets.remote import least
from hybridloader import Pipeline
from hybridloader.engine.feed import items_in
from hybridloader.engine.messages import Done, Result
from hybridloader.engine.payload import ByReference
from hybridloader.pipeline.running import running_stages
from hybridloader.pipeline.running.stage_metrics import StageMetrics

ENDLESS = 1 << 40

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Recorder(StageMetrics):
    """Books that note down every call they get."""

    def __init__(self, workers: int, calls: list[Call]) -> None:
        super().__init__(workers)
        self._calls = calls

    def room(self) -> int | None:
        self._calls.append(("room", (), {}))
        return super().room()

    def sent(self, seq: int, index: Any) -> None:
        self._calls.append(("sent", (seq, index), {}))
        super().sent(seq, index)

    def came(self, event: Result) -> None:
        # Without what it carries: that may lie in memory which is to be used again.
        light = event._replace(payload=ByReference(None)) if isinstance(event, Done) else event
        self._calls.append(("came", (light,), {}))
        super().came(event)

    def left(self, seq: int) -> None:
        self._calls.append(("left", (seq,), {}))
        super().left(seq)

    def idle(self, workers: int, *, starved: bool) -> None:
        self._calls.append(("idle", (workers,), {"starved": starved}))
        super().idle(workers, starved=starved)

    def listening(self, seconds: float) -> None:
        self._calls.append(("listening", (seconds,), {}))
        super().listening(seconds)


class Unkept(StageMetrics):
    """No books: only what the engine itself lives on, how long tasks take."""

    def room(self) -> int | None:
        return None

    def sent(self, seq: int, index: Any) -> None:
        self._items[seq] = items_in(index)

    def came(self, event: Result) -> None:
        if isinstance(event, Done) and self.learn is not None:
            self.learn(self._items.pop(event.seq, 1), event.seconds)

    def left(self, seq: int) -> None:
        return

    def idle(self, workers: int, *, starved: bool) -> None:
        return

    def listening(self, seconds: float) -> None:
        return


def record(backend: str, workers: int, batch: int, batches: int) -> list[Call]:
    """The calls of a pipeline's only stage, for so many batches."""
    calls: list[Call] = []
    with _kept_by(lambda: Recorder(workers, calls)), running(backend, workers, batch) as run:
        for _ in range(batches):
            next(run)
    return calls


def replay(calls: list[Call], workers: int) -> float:
    """Seconds that those calls take."""
    books = StageMetrics(workers)
    bound = [partial(getattr(books, name), *told, **more) for name, told, more in calls]
    began = time.perf_counter()
    for call in bound:
        call()
    return time.perf_counter() - began


def looks(items: int) -> float:
    """Seconds that the looks at the clock take that a `Run` makes for every item it hands out."""

    def look() -> None:
        waited = 0.0
        for _ in range(items):
            began = time.monotonic()
            waited += time.monotonic() - began

    return least(look, 5)


def beside(
    backend: str, workers: int, batch: int, *, seconds: float, repeats: int
) -> tuple[float, float]:
    """Seconds of a batch with books, and the median of its ratio to a batch without."""
    kept: list[float] = []
    ratios: list[float] = []
    for _ in range(repeats):
        kept.append(_timed(backend, workers, batch, seconds))
        with _kept_by(lambda: Unkept(workers)):
            ratios.append(kept[-1] / _timed(backend, workers, batch, seconds))
    return statistics.median(kept), statistics.median(ratios)


def running(backend: str, workers: int, batch: int) -> contextlib.AbstractContextManager[Any]:
    """A pipeline of one empty stage, run."""
    pipeline = Pipeline.from_dataset(range(ENDLESS))
    return iter(pipeline.map(nothing, backend=backend, num_workers=workers).batch(batch))


def _timed(backend: str, workers: int, batch: int, seconds: float) -> float:
    with running(backend, workers, batch) as run:
        return timing.steady(run, seconds, warmup=50).seconds


@contextlib.contextmanager
def _kept_by(make: Callable[[], StageMetrics]) -> Iterator[None]:
    """Pipelines that are run meanwhile have such books."""

    def make_books(node: Any) -> StageMetrics:
        return make()

    with mock.patch.object(running_stages, "_books", make_books):
        yield
