"""Worker processes made by `fork`: started in milliseconds, nothing needs to be pickled for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridloader.backends.process.backend import ProcessBackend
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory


@dataclass(frozen=True)
class Fork(ProcessBackend):
    """Do the work in forked processes.

    Parameters
    ----------
    memory
        Limit and kind of the slots through which large tensors and arrays come back.
    """

    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "fork"

    def _method(self) -> str:
        return "fork"
