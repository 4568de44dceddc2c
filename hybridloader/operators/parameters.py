"""Checks of what users give: operators refuse bad parameters when they are described, not when they run.

Every error says which operator and parameter, what was given, and what to give instead. Nothing here
knows what an operator does.
"""

from __future__ import annotations

import numbers
import operator
import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from hybridloader.operators.base import INFINITE, Length

if TYPE_CHECKING:
    from hybridloader.pipeline import Pipeline


class Named(Protocol):
    """An operator, or what else errors are to name."""

    @property
    def name(self) -> str: ...


_short = reprlib.Repr()
_short.maxother = _short.maxstring = 120


def short(value: Any) -> str:
    """What an error shows of an item."""
    return f"{_short.repr(value)} (a {type(value).__qualname__})"


def settle(described: Named, **values: Any) -> None:
    """Set fields of a frozen description, from its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(described, name, value)


def whole(described: Named, parameter: str, value: Any, *, least: int, instead: str) -> int:
    """`value` as an int that is at least `least`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{described.name}: {parameter} must be a whole number, not {short(value)}; {instead}"
        ) from None
    if number < least:
        raise ValueError(
            f"{described.name}: {parameter} must be at least {least}, not {number}; {instead}"
        )
    return number


def is_number(value: Any) -> bool:
    """Whether it is a real number, which True and False are not meant as."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def flag(described: Named, parameter: str, value: Any) -> None:
    """`value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{described.name}: {parameter} must be True or False, not {short(value)}")


def function(described: Named, parameter: str, value: Any, what: str) -> None:
    """`value` can be called; `what` tells with what, and what it gives."""
    if not callable(value):
        raise TypeError(f"{described.name}: {parameter} must be {what}, not {short(value)}")


def seed_or_none(described: Named, seed: Any) -> int | None:
    """`seed` as an int, or None."""
    if seed is None:
        return None
    instead = "give an int from 0 up, or None for the seed of the run"
    return whole(described, "seed", seed, least=0, instead=instead)


def several(described: Named, pipelines: Any) -> tuple[Pipeline, ...]:
    """`pipelines` as a tuple of at least one."""
    if not isinstance(pipelines, Iterable) or isinstance(pipelines, str):
        raise TypeError(
            f"{described.name}: pipelines must be several pipelines, not {short(pipelines)}; "
            "give a tuple or list of them"
        )
    found = tuple(pipelines)
    if not found:
        raise ValueError(f"{described.name}: there are no pipelines; give at least one")
    for number, pipeline in enumerate(found):
        one(described, f"pipelines[{number}]", pipeline)
    return found


def one(described: Named, parameter: str, pipeline: Any) -> None:
    """`pipeline` is one, as far as can be told without importing the class."""
    if not hasattr(type(pipeline), "length"):
        raise TypeError(
            f"{described.name}: {parameter} must be a pipeline, not {short(pipeline)}; make one of "
            "an iterable or a dataset first"
        )


def leak(what: str) -> RuntimeError:
    """For a user's function that raised StopIteration, which would end the loop without a word.

    As in PEP 479.
    """
    return RuntimeError(f"{what} raised StopIteration")


def sum_of(lengths: Iterable[Length]) -> Length:
    """Of all together; None if one of them is not known and none is infinite."""
    total: Length = 0
    for length in lengths:
        if length == INFINITE:
            return length
        total = None if total is None or length is None else total + length
    return total
