"""Records of loaders: what is known of a loader beside its attributes, as long as it lives.

A record is found by the loader's identity. It is no attribute, because frameworks watch what is set on
a loader, copy it and pickle it. It is not in a `weakref.WeakKeyDictionary`, because a user's subclass
may have an ``__eq__``: without a ``__hash__`` it would be refused, and equal loaders would share one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from hybridloader._support.attributes import attribute
from hybridloader.fetching.on_error.error_budget import ErrorBudget
from hybridloader.loader.observation import LoaderObservation
from hybridloader.loader.progress import Progress
from hybridloader.observe.headroom import KeptBatches

_numbers = itertools.count()


class LoaderRecord:
    """Record of one loader."""

    __slots__ = (
        *("begun", "budget", "given", "kept", "loaded", "number", "observation", "progress"),
        "report",
    )

    def __init__(self) -> None:
        self.begun: int | None = None
        """Epoch of the pass that began last; None before, and after another one was announced."""
        self.progress: Progress | None = None
        """Progress of the latest pass."""
        self.loaded: Mapping[str, Any] | None = None
        """State that was loaded, until the next pass begins."""
        self.given: Any = None
        """State as `StatefulDataLoader` was given it; the error, if it could not be loaded."""
        self.budget: ErrorBudget | None = None
        """Error records of the latest pass that has an `on_error`."""
        self.observation: LoaderObservation | None = None
        """Observation of the latest iterator, if it is observed."""
        self.kept: KeptBatches | None = None
        """Batches that are given again, under ``hybridloader run --headroom``."""
        self.report: weakref.WeakMethod[Callable[[], str]] | None = None
        """Method `report` of the latest iterator."""
        self.number = next(_numbers)
        """Number of the loader, by which traces and watches know it."""


_records: dict[int, tuple[weakref.ref[Any], LoaderRecord]] = {}


def record_of(loader: Any) -> LoaderRecord:
    """Return the record of `loader`. On any thread; the loader may die on any."""
    place = id(loader)  # no other loader's before `forget` was called: memory is freed after that
    entry = _records.get(place)
    if entry is None:

        def forget(_: weakref.ref[Any]) -> None:
            _records.pop(place, None)

        entry = _records.setdefault(place, (weakref.ref(loader, forget), LoaderRecord()))
    return entry[1]


def announce(loader: Any, epoch: int) -> None:
    """Make the next pass that of `epoch`, which is an attribute of the loader and pickled with it."""
    loader._epoch = epoch
    record_of(loader).begun = None


def upcoming(loader: Any, record: LoaderRecord) -> int:
    """Return the epoch of the next pass: the one announced, or the one after the pass before."""
    begun = record.begun
    # 0 for a loader of torch's, which has no such attribute.
    return int(attribute(loader, "_epoch", 0)) if begun is None else begun + 1
