"""Attributes of objects that are not ours, such as a dataset, a sampler, an item or a function.

``__getattr__`` of a foreign class may answer for a name that it has never heard of by any exception.
One as ``class Config(dict): __getattr__ = dict.__getitem__`` raises `KeyError`, on which `hasattr`
stumbles, and `getattr` with a default. All that asks if a foreign object has something asks here.
"""

from __future__ import annotations

from typing import Any

_MISSING = object()


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """``getattr(thing, name, default)``, also of an object whose ``__getattr__`` raises what it likes.

    An attribute that its class defines, a property for instance, raises what it raises.
    """
    try:
        return getattr(thing, name, default)
    except Exception:  # as above: of any type
        if any(name in vars(kind) for kind in type(thing).__mro__):
            raise
        return default


def has(thing: Any, name: str) -> bool:
    """``hasattr(thing, name)``, in the same way."""
    return attribute(thing, name, _MISSING) is not _MISSING
