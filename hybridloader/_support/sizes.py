"""Sizes of values in bytes, as far as they can be seen."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import is_dataclass
from itertools import islice
from typing import Any

from hybridloader._support.attributes import attribute, own_attributes


def size_of(value: Any, most: int | None = None) -> int:
    """Return the bytes of the tensors, arrays and strings in `value`, through containers.

    At most `most` elements of each container are looked at, and the others count as these; None: all.

    An `nbytes` is believed. Anything else counts as its object alone, and so does an object that can't
    be looked into: it is no item's fault that it is to be weighed.
    """
    try:
        return _size_of(value, most)
    except Exception:  # an `nbytes` that raises, a list that holds itself
        return object.__sizeof__(value)


def _size_of(value: Any, most: int | None) -> int:
    found = attribute(value, "nbytes")
    if isinstance(found, int):
        return found
    if isinstance(value, dict):
        return _elements(value.values(), most) + sys.getsizeof(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _elements(value, most) + sys.getsizeof(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _elements(own_attributes(value).values(), most) + sys.getsizeof(value)
    return sys.getsizeof(value)


def _elements(values: Collection[Any], most: int | None) -> int:
    if most is None or len(values) <= most:
        return sum(size_of(value, most) for value in values)
    return sum(size_of(value, most) for value in islice(values, most)) * len(values) // most
