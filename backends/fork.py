"""Worker processes made by `fork`: started in milliseconds, nothing needs to be pickled for them."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import dataclass
from typing import ClassVar

from hybridloader.backends.process import ProcessCrew, check_children_allowed, slot_kind
from hybridloader.contract import Backend, Crew
from hybridloader.errors import BackendUnavailable
from hybridloader.memory import DEFAULT_MEMORY, Memory


def cuda_initialised() -> bool:
    """Whether this process has used CUDA, without importing torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def check_fork(name: str) -> None:
    """Refuse where there is no fork, and after CUDA was initialised (its context breaks in a fork)."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise BackendUnavailable(
            f"backend {name!r} needs fork, which this platform does not have. "
            "Use backend='spawn', 'shared-memory' or 'threads'."
        )
    if cuda_initialised():
        raise BackendUnavailable(
            f"backend {name!r} would fork this process after CUDA was initialised, and CUDA does "
            "not survive a fork. Use backend='threads', 'spawn' or "
            "SharedMemory(start_method='spawn'), or make the iterator before the first use of CUDA."
        )


@dataclass(frozen=True)
class Fork(Backend):
    """Do the work in forked processes.

    Parameters
    ----------
    memory
        What the slots may take through which large tensors and arrays come back.
    """

    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "fork"
    in_process: ClassVar[bool] = False

    def check(self) -> None:
        check_fork(self.name)
        check_children_allowed(self.name)
        slot_kind(self.memory, sockets=True)

    def open(self) -> Crew:
        return ProcessCrew(multiprocessing.get_context("fork"), self.memory, sockets=True)
