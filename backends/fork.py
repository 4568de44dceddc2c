"""Worker processes made by `fork`: started in milliseconds, nothing needs to be pickled for them."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import dataclass
from typing import ClassVar

from hybridloader._support.caller import warn
from hybridloader._support.devices_in_use import device_in_use
from hybridloader._support.errors import BackendUnavailable
from hybridloader.backends.process.crew import ProcessCrew, check_children_allowed, slot_kind
from hybridloader.engine.contract import Backend, Crew
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory


def check_fork(name: str) -> None:
    """Refuse if there is no fork, or if a device was initialised, which does not survive a fork."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise BackendUnavailable(
            f"backend {name!r} needs fork, which this platform does not have. "
            "Use backend='spawn', 'shared-memory' or 'threads'."
        )
    device = device_in_use()
    if device is not None:
        raise BackendUnavailable(
            f"backend {name!r} would fork this process after {device} was initialised, and {device} "
            "does not survive a fork. Use backend='threads', 'spawn' or "
            "SharedMemory(start_method='spawn'), or make the iterator before the first use of "
            f"{device}."
        )


_OURS = "hybridloader"
"""How the names of this package's threads begin; a pipeline forks before it starts them."""

_REMADE = "QueueFeederThread"
"""Those of multiprocessing's queues, such as torch's loader has: a fork makes their locks anew."""

_warned = threading.Event()


def check_threads(name: str) -> None:
    """Warn, once per process, when other threads run that a fork could copy a locked lock from.

    Ours are none of them, nor, on one of ours, the main thread that waits for it. Python 3.12 and later
    warn of any thread at every fork, by a DeprecationWarning that is hidden unless asked for.
    """
    current = threading.current_thread()
    others = [
        thread.name
        for thread in threading.enumerate()
        if thread is not current and not thread.name.startswith((_OURS, _REMADE))
    ]
    if current.name.startswith(_OURS):
        others = [name for name in others if name != threading.main_thread().name]
    if not others or _warned.is_set():
        return
    _warned.set()
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    warn(
        f"backend {name!r} forks this process while other threads run in it ({', '.join(others[:4])}"
        f"{more}). A lock that one of them holds at that moment stays locked in the worker for ever. If "
        "workers hang, use backend='spawn' or SharedMemory(start_method='loky'), or make the iterator "
        "before these threads start (and keep its workers: persistent_workers=True)",
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
    children: ClassVar[bool] = True
    forwards: ClassVar[bool] = True

    def started_by(self, method: str) -> Backend | None:
        return self if method == "fork" else None

    def check(self) -> None:
        check_fork(self.name)
        check_children_allowed(self.name)
        slot_kind(self.memory, sockets=True)
        check_threads(self.name)

    def open(self) -> Crew:
        return ProcessCrew(multiprocessing.get_context("fork"), self.memory, sockets=True)
