"""Loaders as subjects of a tuning, by their public attributes.

A loader is measured by another one over the same dataset, which draws from own samplers and generators.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data

from hybridloader._support.user_objects import attribute
from hybridloader.compat.from_torch import from_torch
from hybridloader.engine.contract import get_backend
from hybridloader.loader.dataloader import DataLoader
from hybridloader.loader.plan import Options
from hybridloader.pipeline.pipeline import Pipeline
from hybridloader.tuning.endless import Endless
from hybridloader.tuning.pipeline_subject import PipelineSubject
from hybridloader.tuning.plans import Place, Plan, Stage
from hybridloader.tuning.trials import Running, Subject
from hybridloader.tuning.untouched import untouched_generators

DRAWN = 1 << 16
"""Indices, or batches of them, that are drawn from a sampler for a measurement, at most."""


def subject_of(given: Any) -> Subject:
    """Return `given` as a subject. Raises `TypeError` if it is neither a loader nor a pipeline."""
    if isinstance(given, Subject):
        return given
    if isinstance(given, Pipeline):
        return PipelineSubject(given)
    if isinstance(given, torch.utils.data.DataLoader):
        return LoaderSubject(given)
    raise TypeError(
        f"tune() takes a DataLoader, ours or torch's, or a Pipeline, not a {type(given).__qualname__}"
    )


class LoaderSubject(Subject):
    """A loader, ours or torch's."""

    name, unit = "DataLoader", "batches"

    def __init__(
        self, loader: torch.utils.data.DataLoader[Any], *, keep_threads: bool = False
    ) -> None:
        """Take a loader; with `keep_threads` its `threads_per_worker` stays in every plan."""
        self._keep_threads = keep_threads
        self._ours = isinstance(loader, DataLoader)
        # Of torch's, one of ours with the same attributes: refused here if it can't be had.
        self._loader: Any = loader if self._ours else from_torch(loader)
        self._iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        whole = callable(attribute(loader.dataset, "__getitems__"))
        inside = not (self._iterable or whole or keep_threads)
        self.stages = (Stage("DataLoader", inside, shares_task=True),)
        self.start = (self._place(),)
        self._indices: list[Any] | None = None

    def _place(self) -> Place:
        loader = self._loader
        workers = int(loader.num_workers)
        threads = 1 if self._keep_threads else int(loader.threads_per_worker)
        if not workers:
            return Place("inline", 0, threads)
        if loader.backend is not None:
            return Place(get_backend(loader.backend).name, workers, threads)
        return Place("shared-memory", workers, threads)

    def _options(self, place: Place) -> dict[str, Any]:
        return {
            "num_workers": place.workers,
            "backend": None if not place.workers else self._backend(place),
            "threads_per_worker": (
                self._loader.threads_per_worker if self._keep_threads else place.threads
            ),
        }

    def _backend(self, place: Place) -> Any:
        """Return the backend of a place: the user's object if it is of that kind."""
        mine = self._loader.backend
        if mine is not None and get_backend(mine).name == place.backend:
            return mine
        return place.backend

    @contextlib.contextmanager
    def open(self, plan: Plan, timeout: float) -> Iterator[Running]:
        ours, (place,) = self._loader, plan
        own = Options.of(ours)
        keywords: dict[str, Any] = own._asdict() | self._options(place) | {"observe": True}
        keywords |= {
            "collate_fn": ours.collate_fn,
            "pin_memory": ours.pin_memory,
            "worker_init_fn": ours.worker_init_fn,
            "in_order": ours.in_order,
            "timeout": timeout if place.workers else 0,
            "generator": torch.Generator().manual_seed(0),
            "prefetch_factor": ours.prefetch_factor if place.workers else None,
            "persistent_workers": bool(place.workers),
        }
        if self._iterable:
            keywords |= {"batch_size": ours.batch_size, "drop_last": ours.drop_last}
        elif ours.batch_sampler is not None:
            keywords["batch_sampler"] = _Again(self._drawn(ours.batch_sampler))
        else:
            keywords |= {"batch_size": None, "sampler": _Again(self._drawn(ours.sampler))}
        with untouched_generators(ours, ours.dataset):
            loader = DataLoader(ours.dataset, **keywords)
            last: list[Any] = []

            def epochs() -> Iterator[Any]:
                while True:
                    last[:] = [iter(loader)]
                    yield last[0]

            try:
                yield Endless(epochs(), loader.stats, ("DataLoader",))
            finally:
                for iterator in last:
                    iterator.close()

    def _drawn(self, sampler: Any) -> list[Any]:
        """Return indices of the loader's sampler, drawn once; its generators are as before."""
        if self._indices is None:
            with untouched_generators(sampler, self._loader):
                self._indices = list(itertools.islice(iter(sampler), DRAWN))
        return self._indices

    def apply(self, plan: Plan) -> DataLoader:
        (place,) = plan
        loader: DataLoader = self._loader
        if plan != self.start:
            loader._iterator = None  # persistent workers of the plan before end
            for name, value in self._options(place).items():
                setattr(loader, name, value)
            if place.workers and place.backend != self.start[0].backend:
                loader.multiprocessing_context = None
            if not place.workers:
                loader.prefetch_factor = None
            elif loader.prefetch_factor is None:
                loader.prefetch_factor = 2  # torch's default
        return loader

    def code(self, plan: Plan) -> str:
        (place,) = plan
        words = [f"num_workers={place.workers}"]
        if place.workers and not (plan == self.start and self._loader.backend is None):
            words.append(f"backend={self._backend(place)!r}")
        if place.threads > 1 or self._loader.threads_per_worker > 1:
            words.append(f"threads_per_worker={place.threads}")
        if not place.workers and self._loader.persistent_workers:
            words.append("persistent_workers=False")
        return f"hybridloader.DataLoader(..., {', '.join(words)})"


class _Again:
    """Indices again and again, as a sampler or a batch sampler."""

    def __init__(self, indices: list[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._indices)
