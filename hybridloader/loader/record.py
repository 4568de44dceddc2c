"""Record of a loader: what is known of it beside its attributes, by its identity, as long as it lives.

Not on it, since frameworks watch what is set on one, copy it and pickle it; nor in a
`weakref.WeakKeyDictionary`, since a user's subclass may have an ``__eq__``: without a ``__hash__`` it
would be refused, and two equal loaders would have one record.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hybridloader._support.attributes import attribute

if TYPE_CHECKING:
    from hybridloader.fetching.on_error.error_budget import ErrorBudget
    from hybridloader.loader.progress import Progress


class LoaderRecord:
    """Record of one loader.

    Attributes
    ----------
    begun
        Epoch of the pass that began last; None if there was none, or if another was announced since.
    progress
        How far the latest pass has come.
    loaded
        State that was loaded, until the next pass begins.
    given
        That state as `StatefulDataLoader` was given it; the error, if it could not be loaded.
    budget
        Records of the latest pass that has an `on_error`.
    report
        The method `report` of the latest iterator.
    """

    __slots__ = ("begun", "budget", "given", "loaded", "progress", "report")

    def __init__(self) -> None:
        self.begun: int | None = None
        self.progress: Progress | None = None
        self.loaded: Mapping[str, Any] | None = None
        self.given: Any = None
        self.budget: ErrorBudget | None = None
        self.report: weakref.WeakMethod[Callable[[], str]] | None = None


_records: dict[int, tuple[weakref.ref[Any], LoaderRecord]] = {}


def record_of(loader: Any) -> LoaderRecord:
    """Return the record of `loader`. On any thread; the loader may die on any."""
    place = id(loader)  # nobody else's before `forget` was called: memory is freed after that
    entry = _records.get(place)
    if entry is None:

        def forget(_: weakref.ref[Any]) -> None:
            _records.pop(place, None)

        entry = _records.setdefault(place, (weakref.ref(loader, forget), LoaderRecord()))
    return entry[1]


def announce(loader: Any, epoch: int) -> None:
    """Make the next pass that of `epoch`. This is on the loader itself, and goes along with it."""
    loader._epoch = epoch
    record_of(loader).begun = None


def upcoming(loader: Any, record: LoaderRecord) -> int:
    """Return the epoch of the next pass: the one announced, or the one after the pass before."""
    begun = record.begun
    # 0 for a loader of torch's, which nobody can tell an epoch.
    return int(attribute(loader, "_epoch", 0)) if begun is None else begun + 1
