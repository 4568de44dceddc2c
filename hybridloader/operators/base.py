"""What a step of a pipeline is: a frozen description, and how its running form is made.

A description holds no thread, file or position, so it can be pickled, compared and used any number of
times. `Operator.open` makes an iterator out of the iterator before it; that iterator holds all the
state. One thread pulls it. What the iterator before it raises passes through, and pulling again
goes on behind the item that failed: so an iterator is a class with `__next__` rather than a
generator, which would be over after an exception.
"""

from __future__ import annotations

import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hybridloader.pipeline import Pipeline

Length = int | float | None
"""How many items: a number, `INFINITE`, or None if it can't be known before they have come."""

INFINITE = math.inf

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
"""Of an object, in its repr: it would make a description another one in every run."""

Upstream = Callable[[], Iterator[Any]]
"""Begins a new pass over what comes before an operator."""


class Context(Protocol):
    """What an operator is told when it is opened."""

    @property
    def epoch(self) -> int:
        """Which pass over the whole pipeline this is, from 0; a repetition counts as a pass."""

    @property
    def seed(self) -> int | None:
        """The seed that the user gave to the run; None if it was drawn."""

    @property
    def shared(self) -> dict[Any, Any]:
        """What the operators of one pass share, by a key of their own."""

    def random(self, seed: int | None) -> random.Random:
        """A generator for this operator and this pass: from `seed`, else from the run's own seed."""

    def open(self, pipeline: Pipeline) -> Iterator[Any]:
        """Open another pipeline as a part of this one; it is closed with it."""


class Operator(ABC):
    """One step of a pipeline; to write one of your own, make a frozen dataclass with an `open`.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Pairs(Operator):
    ...     \"\"\"Each item with the one after it.\"\"\"
    ...
    ...     def open(self, items, context):
    ...         return PairsIterator(items)
    """

    @property
    def name(self) -> str:
        """What tables and errors call it."""
        return _words(type(self).__name__)

    @abstractmethod
    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        """The running form, over `items`."""

    def begin(self, upstream: Upstream, context: Context) -> Iterator[Any]:
        """The running form; overridden by operators that pass over what is before them not once."""
        return self.open(upstream(), context)

    def length(self, upstream: Length) -> Length:
        """How many items come out when `upstream` go in."""
        return None

    def branches(self) -> tuple[Pipeline, ...]:
        """Other pipelines that run as a part of this operator."""
        return ()

    def describe(self, longest: int | None = 40) -> str:
        """Its name and those parameters that differ from their defaults.

        Parameters
        ----------
        longest
            Letters of a value that are shown; None: all.
        """
        told = []
        own: Any = self  # of a user's, which need not be a dataclass
        for field in fields(own) if is_dataclass(own) else ():
            value = getattr(self, field.name)
            required = field.default is MISSING and field.default_factory is MISSING
            if not field.repr or (not required and value == field.default):
                continue
            shown = getattr(value, "__qualname__", None) or _ADDRESS.sub("", repr(value))
            if " at 0x" in shown:  # of no use to a reader, and another one in every run
                shown = type(value).__qualname__
            cut = longest is not None and len(shown) > longest
            short = shown[: (longest or 0) - 3] + "..." if cut else shown
            told.append(short if required else f"{field.name}={short}")
        return f"{self.name}({', '.join(told)})"


class Source(Operator):
    """The first step of a pipeline: there is nothing before it."""

    @abstractmethod
    def start(self, context: Context) -> Iterator[Any]:
        """The items of one pass."""

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        raise TypeError(f"{self.name} is a source; nothing can come before it")

    def begin(self, upstream: Upstream, context: Context) -> Iterator[Any]:
        return self.start(context)


def _words(name: str) -> str:
    """``PaddedBatch`` -> ``padded_batch``."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
