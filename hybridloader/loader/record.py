"""Records of loaders: data about a loader outside its attributes, as long as the loader lives.

A record is found by the loader's identity. It is not an attribute, because frameworks watch, copy and
pickle the attributes of a loader. It is not in a `weakref.WeakKeyDictionary`, because a user's subclass
may define ``__eq__``: without ``__hash__`` it would be refused, and equal loaders would share a record.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from hybridloader._support.user_objects import attribute
from hybridloader.fetching.on_error import ErrorBudget
from hybridloader.loader.observation import LoaderObservation
from hybridloader.loader.progress import Progress
from hybridloader.observe.headroom_trials import KeptBatches

_numbers = itertools.count()


class LoaderRecord:
    """Record of one loader."""

    __slots__ = (
        *("begun", "budget", "given", "kept", "loaded", "number", "observation", "progress"),
        "report",
    )

    def __init__(self) -> None:
        self.begun: int | None = None
        """Number of the epoch that began last; None before, and after another epoch was announced."""
        self.progress: Progress | None = None
        """Progress of the latest epoch."""
        self.loaded: Mapping[str, Any] | None = None
        """Loaded state, until the next epoch begins."""
        self.given: Any = None
        """State as passed to `StatefulDataLoader`, and the error if it could not be loaded."""
        self.budget: ErrorBudget | None = None
        """Error records of the latest epoch with an `on_error`."""
        self.observation: LoaderObservation | None = None
        """Observation of the latest iterator, if it is observed."""
        self.kept: KeptBatches | None = None
        """Batches that are returned again, under ``hybridloader run --headroom``."""
        self.report: weakref.WeakMethod[Callable[[], str]] | None = None
        """Method `report` of the latest iterator."""
        self.number = next(_numbers)
        """Number of the loader, by which traces and watches identify it."""


_records: dict[int, tuple[weakref.ref[Any], LoaderRecord]] = {}


def record_of(loader: Any) -> LoaderRecord:
    """Return the record of `loader`. Any thread may call it, and any may collect the loader."""
    place = id(loader)  # no other loader's before `forget` was called: memory is freed after that
    entry = _records.get(place)
    if entry is None:

        def forget(_: weakref.ref[Any]) -> None:
            _records.pop(place, None)

        entry = _records.setdefault(place, (weakref.ref(loader, forget), LoaderRecord()))
    return entry[1]


def announce(loader: Any, epoch: int) -> None:
    """Set the number of the next epoch, as an attribute of the loader that is pickled with it."""
    loader._epoch = epoch
    record_of(loader).begun = None


def upcoming(loader: Any, record: LoaderRecord) -> int:
    """Return the number of the next epoch: the announced one, or the one after the previous epoch."""
    begun = record.begun
    # 0 for a torch loader, which has no such attribute.
    return int(attribute(loader, "_epoch", 0)) if begun is None else begun + 1
