"""Blocks that concern a whole program, such as a trace: loaders that begin meanwhile ask for them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


class ProgramBlock(ABC):
    """Context manager, for one use. Of each kind one is found at a time, the latest.

    A process that is forked within it has none: there it neither runs nor ends.
    """

    _latest: ClassVar[ProgramBlock | None] = None
    """The one that runs, on each class its own."""

    def __init__(self) -> None:
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        self._begin()
        type(self)._latest = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._owner:  # a fork that goes its own way
            return
        if type(self)._latest is self:
            type(self)._latest = None
        self._end(error)

    def _begin(self) -> None:  # noqa: B027  # most have nothing to do
        """Do what there is to do before it runs; what this raises keeps it from running."""

    @abstractmethod
    def _end(self, error: BaseException | None) -> None:
        """Do what there is to do at its end; `error` is what ended it."""

    @classmethod
    def running(cls) -> Self | None:
        """Return the one that runs in this process, if any."""
        found = cls._latest
        return found if isinstance(found, cls) and found._owner == os.getpid() else None


def numbered(name: str, number: int) -> str:
    """Return a name for the first, second ... of those with this `name`: ``"DataLoader 2"``."""
    return name if number == 1 else f"{name} {number}"
