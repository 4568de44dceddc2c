"""Our `Pipeline`s for the cases about stages: of one stage, and of three."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.loaders.work import READERS, Closing, Opener, Running, Work
from benchmarks.names import BACKENDS, BY_SAMPLES, PIPELINE, SPREAD


def _running(pipeline: Any) -> Running:
    return Closing(lambda: iter(pipeline))


def _indices(work: Work) -> Any:
    from hybridloader import Pipeline

    return Pipeline.from_dataset(range(len(work.dataset)), sampler=work.sampler())


def _one_stage(backend: str, work: Work) -> Running:
    """The samples of a dataset, made on that backend."""
    from hybridloader import Pipeline

    where: Any = {}
    if backend != "inline":
        where = {"backend": backend, "num_workers": work.workers}
    pipeline = Pipeline.from_dataset(work.dataset, sampler=work.sampler(), **where)
    return _running(pipeline.batch(work.batch))


def _hybrid(backend: str, work: Work) -> Running:
    """Read on threads, decode on threads, augment in processes: as many as there are cores."""
    dataset = work.dataset
    return _running(
        _indices(work)
        .map(dataset.read, backend="threads", num_workers=READERS)
        .map(dataset.decode, backend="threads", num_workers=work.cores)
        .map(dataset.augment, backend=backend, num_workers=work.cores)
        .batch(work.batch)
    )


def _spread(work: Work) -> Running:
    """Whole samples in as many processes as cores, in each of which threads share the waiting."""
    pipeline = _indices(work).map(
        work.dataset.__getitem__,
        backend="shared-memory",
        num_workers=work.cores,
        threads_per_worker=READERS // work.cores,
    )
    return _running(pipeline.batch(work.batch))


ONE_STAGE_OPENERS: dict[str, Opener] = {
    name: partial(_one_stage, name) for name in ("inline", *BACKENDS, "spawn")
}
BATCH_OPENERS: dict[str, Opener] = {name: partial(_one_stage, "threads") for name in BY_SAMPLES}
HYBRID_OPENERS: dict[str, Opener] = {
    PIPELINE: partial(_hybrid, "shared-memory"),
    f"{PIPELINE} fork": partial(_hybrid, "fork"),
    SPREAD: _spread,
}
