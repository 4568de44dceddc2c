"""What the result of a task is under a policy of `on_error`: with it travels what has failed.

Plain carriers between worker and parent, by reference or by pickle; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridloader.errors import Failure


class Miss(NamedTuple):
    """A sample that failed, on its way from the worker.

    Attributes
    ----------
    index
        What it was asked for by.
    position
        Its place in its batch.
    failure
        The exception. That of a batch is shared by all its samples.
    replaced
        Whether another was put in its place.
    """

    index: Any
    position: int
    failure: Failure
    replaced: bool = False


class Tried:
    """A batch, or a sample, that is whole, and what was left out or replaced on the way.

    Attributes
    ----------
    data
        Collated.
    tried
        Samples that were tried for it.
    misses
        Those of them that failed.
    """

    __slots__ = ("data", "misses", "tried")

    def __init__(self, data: Any, tried: int, misses: Sequence[Miss] = ()) -> None:
        self.data, self.tried, self.misses = data, tried, misses

    def __reduce__(self) -> Any:
        return Tried, (self.data, self.tried, self.misses)


class Short:
    """What is left of a batch of which samples failed, not collated.

    Attributes
    ----------
    indices, samples
        Of those that did not.
    misses
        Those that did.
    wanted
        How many the batch should have had.
    """

    __slots__ = ("indices", "misses", "samples", "wanted")

    def __init__(
        self, indices: list[Any], samples: list[Any], misses: list[Miss], wanted: int
    ) -> None:
        self.indices, self.samples, self.misses, self.wanted = indices, samples, misses, wanted

    def __reduce__(self) -> Any:
        return Short, (self.indices, self.samples, self.misses, self.wanted)

    @property
    def tried(self) -> int:
        return len(self.samples) + len(self.misses)
