"""Checks of a user's parameters: operators refuse bad parameters when they are described, not when they
run.

Every error names the operator, the parameter, its value and a remedy. Nothing here depends on the kind
of operator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from hybridloader._support.text import flag, short, whole
from hybridloader._support.user_objects import has
from hybridloader.running.operator import INFINITE, Chain, Length


class Named(Protocol):
    """An operator, or another object that errors name."""

    @property
    def name(self) -> str: ...


def settle(described: Named, **values: Any) -> None:
    """Set fields of a frozen description, from its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(described, name, value)


def settle_whole(
    described: Named, parameter: str, least: int, instead: str, *, optional: bool = False
) -> None:
    """Make the field `parameter` an int that is at least `least`; or None, where it is optional."""
    value = getattr(described, parameter)
    if not (optional and value is None):
        name = f"{described.name}: {parameter}"
        settle(described, **{parameter: whole(name, value, least, instead=instead)})


def check_flags(described: Named, *parameters: str) -> None:
    """Refuse fields that are neither True nor False."""
    for parameter in parameters:
        flag(f"{described.name}: {parameter}", getattr(described, parameter))


SEED = "give an int from 0 up, or None for the seed of the run"
"""Request in errors about a seed."""


def check_source(name: str, source: Any, hint: str = "") -> None:
    """Refuse an object that is no iterable, nor a function that returns one. Raises `TypeError`."""
    if isinstance(source, (str, bytes)):
        raise TypeError(
            f"{name}: a {type(source).__qualname__} would be read one character at a time: "
            f"{short(source)}; give an iterable of items, such as an open file or a list of paths"
        )
    if not hasattr(type(source), "__iter__") and not callable(source):
        raise TypeError(
            f"{name}: source must be an iterable, or a function that gives one, not {short(source)}"
            f"{hint}"
        )


def several(described: Named, pipelines: Iterable[Any]) -> tuple[Chain, ...]:
    """Return `pipelines` as a tuple; refuse an empty one, and objects that are no pipelines."""
    found = tuple(pipelines)
    if not found:
        raise ValueError(f"{described.name}: there are no pipelines; give at least one")
    for pipeline in found:
        if not isinstance(pipeline, Chain):
            hint = "; make one with Pipeline.from_iterable" if has(pipeline, "__iter__") else ""
            raise TypeError(f"{described.name} joins pipelines, not {pipeline!r}{hint}")
    return found


def sum_of(lengths: Iterable[Length]) -> Length:
    """Return the sum; None if one of them is not known and none is infinite."""
    total: Length = 0
    for length in lengths:
        if length == INFINITE:
            return length
        total = None if total is None or length is None else total + length
    return total
