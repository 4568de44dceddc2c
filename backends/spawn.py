"""Worker processes started afresh by loky: everywhere, and without a ``__main__`` guard.

The dataset and its functions travel by cloudpickle, so lambdas, classes defined in a function or in a
notebook cell, and whatever lives in ``__main__`` arrive. The main script is not run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hybridloader.backends.process import socket_transport
from hybridloader.backends.process.crew import ProcessCrew, check_children_allowed, slot_kind
from hybridloader.engine.contract import Backend, Crew
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory


def loky_context() -> Any:
    """loky's process context, which does not import the main module in the child."""
    from loky.backend import get_context

    return get_context("loky")


@dataclass(frozen=True)
class Spawn(Backend):
    """Do the work in fresh processes.

    Parameters
    ----------
    memory
        What the slots may take through which large tensors and arrays come back.
    """

    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "spawn"
    children: ClassVar[bool] = True
    forwards: ClassVar[bool] = True
    fresh: ClassVar[bool] = True

    def started_by(self, method: str) -> Backend | None:
        return self if method == "spawn" else None

    def check(self) -> None:
        check_children_allowed(self.name)
        slot_kind(self.memory, sockets=socket_transport.available())

    def open(self) -> Crew:
        return ProcessCrew(loky_context(), self.memory, sockets=socket_transport.available())
