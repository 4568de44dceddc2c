"""Hint at a large list, tuple or dict of a dataset, of which each worker would make a copy.

Finding it runs no code of the objects: no property, no ``__len__``, no ``__getattr__``.
"""

from __future__ import annotations

from typing import Any

from hybridloader._support.text import warn
from hybridloader._support.user_objects import own_attributes

_hinted = False


def largest_container(dataset: Any, limit: int = 1_000_000) -> tuple[str, str, int] | None:
    """Return the largest list, tuple or dict with more than `limit` entries in `dataset`.

    It is the dataset or one of its attributes, slots included. Returns path, kind and length, such
    as ``("dataset.samples", "list", 1200000)``; None if there is no such container.
    """
    parts = [("dataset", dataset)]
    parts += [(f"dataset.{name}", part) for name, part in own_attributes(dataset).items()]
    found = [
        (path, type(part).__name__, len(part))
        for path, part in parts
        if type(part) in (list, tuple, dict) and len(part) > limit
    ]
    return max(found, key=lambda one: one[2], default=None)


def hint_at_large_container(dataset: Any) -> None:
    """Warn, once per process, of a large container that each worker process will copy.

    The warning names the container, and `SharedList` or `SharedDict` as a replacement.
    """
    global _hinted
    if _hinted:
        return
    found = largest_container(dataset)
    if found is None:
        return
    _hinted = True
    path, kind, length = found
    instead = "SharedDict" if kind == "dict" else "SharedList"
    warn(
        f"{path} is a {kind} of {length:,} entries; each worker process will copy it piece by piece "
        f"(counting references writes to it). hybridloader.records.{instead}(...) keeps one copy for "
        "all.",
        "large-container",
    )
