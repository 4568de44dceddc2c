"""Backends by name: the six that come along, and those that other packages add.

A package adds a backend through the entry-point group ``hybridloader.backends``, with a name and
``module:attribute`` of a `Backend` class or of a callable that returns a `Backend`. Nothing is
imported before a name is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridloader._support.arguments import flag
from hybridloader.engine.contract import Backend
from hybridloader.errors import BackendUnavailable
from hybridloader.memory.limits import check_memory

GROUP = "hybridloader.backends"
"""Entry-point group of backends in other packages."""


class Entry(NamedTuple):
    """Module and attribute of a backend, and the command that installs it."""

    target: str
    install: str


_HOME, _INCLUDED = "hybridloader.backends", "comes with hybridloader"
_OURS = {
    "inline": Entry(f"{_HOME}.inline:Inline", _INCLUDED),
    "threads": Entry(f"{_HOME}.threads:Threads", _INCLUDED),
    "fork": Entry(f"{_HOME}.process.backend:Fork", _INCLUDED),
    "spawn": Entry(f"{_HOME}.process.backend:Spawn", "pip install loky cloudpickle"),
    "ray": Entry(f"{_HOME}.ray:Ray", "pip install 'hybridloader[ray]'"),
    "shared-memory": Entry(f"{_HOME}.process.backend:SharedMemory", _INCLUDED),
}


@lru_cache(maxsize=1)
def known() -> Mapping[str, Entry]:
    """Return all backends by name, as a read-only view; none of them is imported."""
    from importlib.metadata import entry_points

    entries = dict(_OURS)
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist is not None else point.value.partition(":")[0]
        entries.setdefault(normalise(point.name), Entry(point.value, f"pip install {package}"))
    return MappingProxyType(entries)


def backend_names() -> tuple[str, ...]:
    """Return the names that `backend=` takes."""
    return tuple(known())


def normalise(name: str) -> str:
    """Return the registered form of a name: ``"shared-memory"`` for ``"Shared_Memory"``."""
    return name.strip().lower().replace("_", "-")


def get_backend(backend: Any) -> Backend:
    """Return the backend of a name; a `Backend` instance as it is.

    Raises
    ------
    BackendUnavailable
        The name is unknown (the message lists those there are), or its package is missing.
    TypeError
        Neither a name nor a backend.
    """
    if isinstance(backend, Backend):
        name = type(backend).__name__
        if backend.memory is not None:
            check_memory(name, backend.memory)
        flag(f"{name}: copy_dataset", backend.copies)
        return backend
    if not isinstance(backend, str):
        hint = f"; use an instance: {backend.__name__}()" if isinstance(backend, type) else ""
        raise TypeError(f"backend must be a name or a Backend, not {backend!r}{hint}")
    entry = known().get(normalise(backend))
    if entry is None:
        listed = ", ".join(f"{name} ({known()[name].install})" for name in known())
        raise BackendUnavailable(f"unknown backend {backend!r}; there are: {listed}")
    made: Any = _load(backend, entry)()
    if not isinstance(made, Backend):
        raise TypeError(f"backend {backend!r} gave {made!r}, which is not a Backend")
    return made


def _load(name: str, entry: Entry) -> Callable[[], Backend]:
    module, _, attribute = entry.target.partition(":")
    try:
        factory: Callable[[], Backend] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"backend {name!r} can't be imported ({error}); to install it: {entry.install}"
        ) from error
    return factory
