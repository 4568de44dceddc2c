"""Finds the large Python list, tuple or dict that each worker of a dataset would come to copy.

It looks at what lies in the objects and never runs their code: no property, no ``__len__``, no
``__getattr__``. It changes nothing; what it finds is told once per process, as a hint.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from hybridloader._support.attributes import own_attributes
from hybridloader._support.caller import warn

_DEEP = 2
"""Objects between the dataset and the one that holds the container: `Subset` of `ConcatDataset` of
datasets is two."""

_WIDE = 1000
"""Entries of a container that are looked at: a list of datasets is shorter, one of samples is not."""

_MOST = 2_000
"""Objects that are looked at in all; they take some 2 milliseconds of every new iterator."""

_NOT_DATA = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    str,
    bytes,
    int,
    float,
    type(None),
)

_hinted = False


def largest_container(dataset: Any, limit: int = 1_000_000) -> tuple[str, str, int] | None:
    """The largest list, tuple or dict with more than `limit` entries that `dataset` holds.

    Looks at the dataset itself, its attributes (also in ``__slots__``), lists, tuples and dicts in
    them, and the objects in these, two levels down.

    Parameters
    ----------
    limit
        Entries.

    Returns
    -------
    path, kind, length
        Such as ``("dataset.samples", "list", 1200000)``; None if there is none.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> largest_container(SimpleNamespace(samples=["a"] * 200, labels=[1] * 100), limit=50)
    ('dataset.samples', 'list', 200)
    """
    best: tuple[str, str, int] | None = None
    seen: set[int] = set()
    # Breadth first, so that what is found twice gets its shorter path.
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
    """Warn, once per process, of a container that each worker process will come to copy.

    Warns
    -----
    UserWarning
        Names the container, and `hybridloader.SharedList` or `SharedDict` as what to use instead.
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
        f"(counting references writes to it). hybridloader.{instead}(...) keeps one copy for all.",
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
