"""Worker processes started afresh by loky: everywhere, and without a ``__main__`` guard.

The dataset and its functions travel by cloudpickle, so lambdas, classes defined in a function or in a
notebook cell, and whatever lives in ``__main__`` arrive. The main script is not run again.
"""

from __future__ import annotations

from collections.abc import Collection
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
    zygote
        True: one process is started afresh and loads the dataset, with all that it imports, and the
        workers are forked from that (on Linux, unless what it loads has started threads or opened
        files). False: each worker is started afresh, and loads for itself.
    """

    memory: Memory = DEFAULT_MEMORY
    zygote: bool = True
    name: ClassVar[str] = "spawn"

    def _method(self) -> str:
        return "loky"

    def _from_zygote(self) -> Collection[str]:
        return super()._from_zygote() if self.zygote else ()
