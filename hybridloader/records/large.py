"""Search for a large list, tuple or dict in a dataset, of which each worker would make a copy.

The search runs no code of the objects: no property, no ``__len__``, no ``__getattr__``. The finding is
one warning per process.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from hybridloader._support.text import warn
from hybridloader._support.user_objects import own_attributes

_DEEP = 2
"""Objects between the dataset and the owner of a container: a `Subset` of a `ConcatDataset` is two."""

_WIDE = 1000
"""The longest container that is searched: a list of datasets is shorter, one of samples is not."""

_MOST = 2_000  # the most objects that are searched, in some 2 milliseconds for every new iterator

_NOT_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
             str, bytes, int, float, type(None))  # fmt: skip

_hinted = False


def largest_container(dataset: Any, limit: int = 1_000_000) -> tuple[str, str, int] | None:
    """The largest list, tuple or dict with more than `limit` entries in `dataset`.

    Searches the attributes of the dataset (also in ``__slots__``), the containers in them, and the
    objects in these, two levels down. Returns path, kind and length, such as
    ``("dataset.samples", "list", 1200000)``; None if there is no such container.
    """
    best: tuple[str, str, int] | None = None
    seen: set[int] = set()
    # Breadth first, so that an object with two paths gets the shorter one.
    level: list[tuple[str, Any, int]] = [("dataset", dataset, 0)]
    while level:
        below: list[tuple[str, Any, int]] = []
        for path, thing, depth in level:
            if isinstance(thing, _NOT_DATA) or id(thing) in seen or len(seen) >= _MOST:
                continue
            seen.add(id(thing))
            kind = type(thing)
            if kind is list or kind is tuple or kind is dict:
                length = len(thing)
                if length > limit and (best is None or length > best[2]):
                    best = path, kind.__name__, length
                if length <= _WIDE:
                    below += [(path + step, part, depth) for step, part in _entries(thing)]
            elif depth <= _DEEP:
                parts = own_attributes(thing).items()
                below += [(f"{path}.{name}", part, depth + 1) for name, part in parts]
        level = below
    return best


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


def _entries(thing: Any) -> Iterator[tuple[str, Any]]:
    if type(thing) is dict:
        for key, value in list(thing.items()):  # a copy: another thread may change it
            # The repr of a user's key would be a user's code.
            name = repr(key) if type(key) in (str, int) else f"<{type(key).__name__}>"
            yield f"[{name}]", value
    else:
        for i, value in enumerate(list(thing)):
            yield f"[{i}]", value
