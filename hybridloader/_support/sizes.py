"""Sizes of values in bytes, as far as they can be seen."""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from typing import Any

from hybridloader._support.attributes import attribute, own_attributes


def size_of(value: Any) -> int:
    """Return the bytes of the tensors, arrays and strings in `value`, through containers.

    An `nbytes` is believed. Anything else counts as its object alone, and so does an object that can't
    be looked into: it is no item's fault that it is to be weighed.
    """
    try:
        return _size_of(value)
    except Exception:  # an `nbytes` that raises, a list that holds itself
        return object.__sizeof__(value)


def _size_of(value: Any) -> int:
    found = attribute(value, "nbytes")
    if isinstance(found, int):
        return found
    if isinstance(value, dict):
        return sum(map(size_of, value.values())) + sys.getsizeof(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return sum(map(size_of, value)) + sys.getsizeof(value)
    if is_dataclass(value) and not isinstance(value, type):
        return sum(map(size_of, own_attributes(value).values())) + sys.getsizeof(value)
    return sys.getsizeof(value)
