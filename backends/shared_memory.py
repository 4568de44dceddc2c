"""Worker processes whose large results come back through recycled shared memory."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hybridloader._support.devices_in_use import device_in_use
from hybridloader._support.errors import BackendUnavailable
from hybridloader.backends.fork import check_fork, check_threads
from hybridloader.backends.process import socket_transport
from hybridloader.backends.process.crew import ProcessCrew, check_children_allowed, slot_kind
from hybridloader.backends.spawn import loky_context
from hybridloader.engine.contract import Backend, Crew
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory

_METHODS = ("fork", "spawn", "forkserver", "loky")


@dataclass(frozen=True)
class SharedMemory(Backend):
    """Do the work in processes; large tensors and arrays come back through shared memory.

    Parameters
    ----------
    start_method
        ``"fork"``, ``"loky"`` (as the `spawn` backend), ``"spawn"`` or ``"forkserver"``
        (multiprocessing's own, which run the main script again and so need a ``__main__`` guard).
        None takes fork where that is multiprocessing's default and safe, that is on Linux before
        Python 3.14 while no device such as CUDA is initialised, else loky.
    memory
        What the slots may take through which large tensors and arrays come back.

    Raises
    ------
    BackendUnavailable
        The start method is unknown, or this platform does not have it.
    """

    start_method: str | None = None
    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "shared-memory"
    children: ClassVar[bool] = True
    forwards: ClassVar[bool] = True

    @property
    def fresh(self) -> bool:
        return self._method() != "fork"

    def started_by(self, method: str) -> Backend | None:
        if self.start_method is None:
            return replace(self, start_method=method)
        return self if self.start_method == method else None

    def __post_init__(self) -> None:
        if self.start_method not in (None, *_METHODS):
            raise BackendUnavailable(
                f"unknown start method {self.start_method!r}; there are: {', '.join(_METHODS)}"
            )

    def check(self) -> None:
        method = self._method()
        if method == "fork":
            check_fork(f"{self.name} (start_method='fork')")
        elif method != "loky" and method not in multiprocessing.get_all_start_methods():
            raise BackendUnavailable(f"this platform has no start method {method!r}; use 'loky'")
        check_children_allowed(self.name)
        slot_kind(self.memory, sockets=socket_transport.available())
        if method == "fork":
            check_threads(self.name)

    def open(self) -> Crew:
        method = self._method()
        context: Any = loky_context() if method == "loky" else multiprocessing.get_context(method)
        return ProcessCrew(context, self.memory, sockets=socket_transport.available())

    def _method(self) -> str:
        if self.start_method is not None:
            return self.start_method
        forks = multiprocessing.get_start_method() == "fork" and device_in_use() is None
        return "fork" if forks else "loky"


@dataclass(frozen=True)
class AsTorch(SharedMemory):
    """What a loader without `backend` takes: processes started as torch would start them.

    That includes forking after a device was initialised, which every training script does that makes
    a new iterator for its second epoch. Workers that leave the device alone are not harmed by it, and
    torch itself raises in those that do not.
    """

    def check(self) -> None:
        check_children_allowed("the default")

    def _method(self) -> str:
        return self.start_method or multiprocessing.get_start_method()
