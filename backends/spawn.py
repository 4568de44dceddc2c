"""Worker processes started afresh by loky: everywhere, and without a ``__main__`` guard.

The dataset and its functions travel by cloudpickle, so lambdas, classes defined in a function or in a
notebook cell, and whatever lives in ``__main__`` arrive. The main script is not run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridloader.backends.process.backend import ProcessBackend
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory


@dataclass(frozen=True)
class Spawn(ProcessBackend):
    """Do the work in fresh processes.

    Parameters
    ----------
    memory
        Limit and kind of the slots through which large tensors and arrays come back.
    """

    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "spawn"

    def _method(self) -> str:
        return "loky"
