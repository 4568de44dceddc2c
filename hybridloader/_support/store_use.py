"""Use of object stores by this process: requests, bytes, waits. Counted only while somebody observes.

Sources count here, and an observation of a loader or a pipeline reads the counts. Workers that are
processes report theirs with their measures. While nothing is observed, a request costs one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import partial

from hybridloader._support import system


@dataclass(frozen=True)
class StoreUse:
    """Use of one store, as a bucket or a server, by a loader or a pipeline and its workers.

    Attributes
    ----------
    store
        Protocol and host or bucket.
    requests
        Requests, those included that were made again.
    retries
        Requests that were made again because the one before had failed.
    bytes
        Bytes that were received.
    seconds
        Seconds of all requests together, until their last byte.
    hits, misses
        Blocks that were found in `cache_dir`, and those that were not.
    waited
        Seconds that workers waited for data of the store, together.
    alone
        Samples that were read one by one, not in blocks.
    """

    store: str
    requests: int = 0
    retries: int = 0
    bytes: int = 0
    seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    waited: float = 0.0
    alone: int = 0

    def __add__(self, other: StoreUse) -> StoreUse:
        pairs = zip(astuple(self)[1:], astuple(other)[1:], strict=True)
        return StoreUse(self.store, *(one + two for one, two in pairs))

    def since(self, before: StoreUse) -> StoreUse:
        """Return the counts after `before`."""
        pairs = zip(astuple(self)[1:], astuple(before)[1:], strict=True)
        return StoreUse(self.store, *(one - two for one, two in pairs))

    def __bool__(self) -> bool:
        return any(astuple(self)[1:])


# Reentrant: a handler of a signal may read a store.
_adding = system.renewed_in_forks(threading.RLock())
# All the mutable state. The counts change under that lock, and are read without it: a finalizer may read
# or stop at any moment, also on a thread that adds.
_uses: dict[str, StoreUse] = {}
_observers: set[object] = set()  # an object for each


def start_counting() -> Callable[[], None]:
    """Count from now on, until the result is called. A finalizer may call it."""
    observer = object()
    _observers.add(observer)
    return partial(_observers.discard, observer)


def counting() -> bool:
    """Return True if somebody observes."""
    return bool(_observers)


def count(url: str, **counts: float) -> None:
    """Add to the counts of the store that has the file of this name."""
    store = store_of(url)
    with _adding:
        _uses[store] = _uses.get(store, StoreUse(store)) + StoreUse(store, **counts)  # type: ignore[arg-type]


def uses() -> dict[str, StoreUse]:
    """Return the use of each store until now."""
    return _uses.copy()


def uses_since(before: dict[str, StoreUse]) -> tuple[StoreUse, ...]:
    """Return the use of each store after `before`, which `uses` had returned."""
    found = (use.since(before.get(name, StoreUse(name))) for name, use in uses().items())
    return tuple(filter(None, found))


def together(uses: Iterable[StoreUse]) -> tuple[StoreUse, ...]:
    """Return the use of each store, summed over processes, by name."""
    found: dict[str, StoreUse] = {}
    for use in uses:
        found[use.store] = found[use.store] + use if use.store in found else use
    return tuple(found[name] for name in sorted(found))


def store_of(url: str) -> str:
    """Return protocol and host or bucket of a URL, without a password; of a chain, the last one's."""
    protocol, separator, path = url.rpartition("::")[2].partition("://")
    if not separator:
        return "local files"
    return f"{protocol}://{path.partition('/')[0].rpartition('@')[2]}"
