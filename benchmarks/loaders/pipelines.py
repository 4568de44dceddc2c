"""Our `Pipeline`s for the cases that are about stages: of one stage, of three, and each of these alone.

The rivals' forms of the same three stages are in `staged_rivals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.loaders.dataloaders import OPENERS, Running, Work
from benchmarks.results import PIPELINE

READERS = 32
"""Threads that wait for answers: 20 ms each, so they could read 1,600 samples a second."""


class Pipe:
    """A pipeline of ours, running."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._run: Any = None

    def epoch(self) -> Iterator[Any]:
        self.close()
        self._run = iter(self._pipeline)
        run: Iterator[Any] = self._run
        return run

    def close(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None


class Part(Pipe):
    """A stage alone: its batches are not those of the whole, and are compared with nobody's."""

    partial = True


def _one_stage(backend: str) -> Callable[[Work], Running]:
    """The samples of a dataset, on that backend."""

    def open_pipe(work: Work) -> Running:
        from hybridloader import Pipeline

        where: Any = (
            {} if backend == "inline" else {"backend": backend, "num_workers": work.workers}
        )
        pipeline = Pipeline.from_dataset(work.dataset, sampler=work.sampler(), **where)
        return Pipe(pipeline.batch(work.batch))

    return open_pipe


def _hybrid(backend: str) -> Callable[[Work], Running]:
    """Read on threads, decode on threads, augment in processes: as many as there are cores."""

    def open_pipe(work: Work) -> Running:
        dataset = work.dataset
        pipeline = (
            _indices(work)
            .map(dataset.read, backend="threads", num_workers=READERS)
            .map(dataset.decode, backend="threads", num_workers=work.cores)
            .map(dataset.augment, backend=backend, num_workers=work.cores)
            .batch(work.batch)
        )
        return Pipe(pipeline)

    return open_pipe


def _spread(work: Work) -> Running:
    """Whole samples in as many processes as cores, in each of which threads share the waiting."""
    pipeline = _indices(work).map(
        work.dataset.__getitem__,
        backend="shared-memory",
        num_workers=work.cores,
        threads_per_worker=READERS // work.cores,
    )
    return Pipe(pipeline.batch(work.batch))


def _alone(part: str) -> Callable[[Work], Running]:
    """One of the stages of `_hybrid`, its input made beforehand."""

    def open_pipe(work: Work) -> Running:
        dataset = work.dataset
        data = dataset.without_waiting().read(0)
        pixels = dataset.decode(data)
        stage: Any = {
            "read": _indices(work).map(dataset.read, backend="threads", num_workers=READERS),
            "decode": _indices(work)
            .map(lambda index: data)
            .map(dataset.decode, backend="threads", num_workers=work.cores),
            "augment": _indices(work)
            .map(lambda index: pixels)
            .map(dataset.augment, backend="shared-memory", num_workers=work.cores),
        }[part]
        return Part(stage.batch(work.batch, collate_fn=len))

    return open_pipe


def _indices(work: Work) -> Any:
    from hybridloader import Pipeline

    return Pipeline.from_dataset(range(len(work.dataset)), sampler=work.sampler())


_ONE: dict[str, Callable[[Work], Running]] = {
    name: _one_stage(name) for name in ("inline", "threads", "fork", "shared-memory", "spawn")
}

_THREE: dict[str, Callable[[Work], Running]] = {
    PIPELINE: _hybrid("shared-memory"),
    f"{PIPELINE} fork": _hybrid("fork"),
    f"{PIPELINE} spread": _spread,
    **{f"{part} alone": _alone(part) for part in ("read", "decode", "augment")},
}


def open_pipeline(name: str, work: Work) -> Running:
    """Open the loader called `name` where the case is about pipelines.

    Raises
    ------
    CannotDo
        It can't do this work, or is not installed.
    """
    ours = _ONE if work.stages == 1 else _THREE
    if name in ours:
        return ours[name](work)
    if name in OPENERS:
        return OPENERS[name](work)
    from benchmarks.loaders.rivals import open_rival
    from benchmarks.loaders.staged_rivals import STAGED

    return open_rival(name, work, STAGED if work.stages == 3 else {})
