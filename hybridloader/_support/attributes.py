"""Attributes of foreign objects, such as a dataset, a sampler, an item or a user's function.

``__getattr__`` of a foreign class may raise any exception for an unknown name. For instance
``class Config(dict): __getattr__ = dict.__getitem__`` raises `KeyError`. `hasattr`, and `getattr`
with a default, raise that error too. So all code that looks for an attribute of a foreign object
uses these functions.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

_MISSING = object()


class Fallback(Generic[T]):
    """Read-only property that an object's own attribute of the same name replaces, as with a method.

    It serves names that torch does not use and that a user's subclass may use.
    """

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read, self.__doc__ = read, read.__doc__

    @overload
    def __get__(self, thing: None, kind: type) -> Fallback[T]: ...
    @overload
    def __get__(self, thing: object, kind: type | None = None) -> T: ...
    def __get__(self, thing: Any, kind: type | None = None) -> Fallback[T] | T:
        return self if thing is None else self._read(thing)


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """Return ``getattr(thing, name, default)``, whatever its ``__getattr__`` raises.

    An error is raised only if the class defines the attribute, as a property for instance.
    """
    try:
        return getattr(thing, name, default)
    except Exception:  # a foreign __getattr__ may raise any type
        if any(name in vars(kind) for kind in type(thing).__mro__):
            raise
        return default


def has(thing: Any, name: str) -> bool:
    """Return ``hasattr(thing, name)``, whatever its ``__getattr__`` raises; see `attribute`."""
    return attribute(thing, name, _MISSING) is not _MISSING


def own_attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes stored in the object, slots included. Runs no code of its class."""
    found: dict[str, Any] = {}
    for kind in type(thing).__mro__:
        for name, member in list(vars(kind).items()):
            slot = type(member) is types.MemberDescriptorType
            if not slot and (name != "__dict__" or type(member) is not types.GetSetDescriptorType):
                continue
            try:
                value = member.__get__(thing)
            except AttributeError:  # a slot that is not set
                continue
            if name != "__dict__":
                found[name] = value
            elif type(value) is dict:
                found.update(value)
    return found


def is_container(thing: Any) -> bool:
    """True for a list, a dict, an array, a tensor: to read from it runs no code of the user."""
    kind = type(thing)
    known = kind.__module__ in ("builtins", "array", "collections", "numpy", "torch")
    return known and hasattr(kind, "__iter__")


def length_of(thing: Any) -> int | None:
    """Return ``len(thing)``; None if it has no length or raises `NotImplementedError`."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def close(thing: Any) -> None:
    """Call ``close`` of `thing` if it has one; most iterators hold no resource and have none."""
    shut = attribute(thing, "close")
    if shut is not None:
        shut()
