"""Attributes of objects that are not ours, such as a dataset, a sampler, an item or a function.

``__getattr__`` of a foreign class may raise any exception for a name that it does not know. For
instance ``class Config(dict): __getattr__ = dict.__getitem__`` raises `KeyError`. `hasattr`, and
`getattr` with a default, pass that on. So all code that looks for an attribute of a foreign object
uses these functions.
"""

from __future__ import annotations

from typing import Any

_MISSING = object()


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """Return ``getattr(thing, name, default)``, whatever its ``__getattr__`` raises.

    An error of an attribute that its class defines, a property for instance, is passed on.
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
