"""Context managers for a whole program, such as a trace: loaders that begin inside one look it up."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


class ProgramBlock(ABC):
    """Context manager, for one use. `running` returns the latest of each subclass.

    In a process that is forked inside the block it neither runs nor ends.
    """

    _latest: ClassVar[ProgramBlock | None] = None
    """Running block; each subclass sets this attribute on itself."""

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
        if os.getpid() != self._owner:  # a forked child that left the block
            return
        if type(self)._latest is self:
            type(self)._latest = None
        self._end(error)

    def _begin(self) -> None:  # noqa: B027  # most have nothing to do
        """Prepare the block; an error raised here keeps it from running."""

    @abstractmethod
    def _end(self, error: BaseException | None) -> None:
        """Finish the block; `error` is the exception that ended it, or None."""

    @classmethod
    def running(cls) -> Self | None:
        """Return the block that runs in this process, or None."""
        found = cls._latest
        return found if isinstance(found, cls) and found._owner == os.getpid() else None


def numbered(name: str, number: int) -> str:
    """Return `name` for number 1, else `name` with its number: ``"DataLoader 2"``."""
    return name if number == 1 else f"{name} {number}"
