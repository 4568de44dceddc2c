"""Worker processes whose large results come back through recycled shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hybridloader._support.devices_in_use import device_in_use
from hybridloader._support.errors import BackendUnavailable
from hybridloader.backends.process.backend import (
    ProcessBackend,
    check_children_allowed,
    check_libraries,
    method_for_workers,
    tell_fresh,
)
from hybridloader.engine.contract import Backend
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory

_METHODS = ("fork", "spawn", "forkserver", "loky")


@dataclass(frozen=True)
class SharedMemory(ProcessBackend):
    """Do the work in processes; large tensors and arrays come back through shared memory.

    Parameters
    ----------
    start_method
        ``"fork"``, ``"loky"`` (as the `spawn` backend), ``"spawn"`` or ``"forkserver"``. These two are
        multiprocessing's own, which run the main script again and so need a ``__main__`` guard; but
        on Linux ``"forkserver"`` is ``"loky"``, which forks workers from one process as well.
        None takes fork where that is multiprocessing's default and safe, that is on Linux before
        Python 3.14 while no device such as CUDA is initialised and no library runs threads that a
        fork would harm (polars, lance, PyAV, fsspec; a warning says so), else loky.
    memory
        Limit and kind of the slots through which large tensors and arrays come back.

    Raises
    ------
    BackendUnavailable
        The start method is unknown, or this platform does not have it.
    """

    start_method: str | None = None
    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "shared-memory"

    def started_by(self, method: str) -> Backend | None:
        if self.start_method is None:
            return replace(self, start_method=method)
        return self if self.start_method == method else None

    def __post_init__(self) -> None:
        if self.start_method not in (None, *_METHODS):
            raise BackendUnavailable(
                f"unknown start method {self.start_method!r}; there are: {', '.join(_METHODS)}"
            )

    def _method(self) -> str:
        if self.start_method is not None:
            return self.start_method
        return "fork" if method_for_workers() == "fork" and device_in_use() is None else "loky"

    def check(self) -> None:
        super().check()
        if self.start_method is None:
            tell_fresh(f"backend {self.name!r}")


@dataclass(frozen=True)
class AsTorch(SharedMemory):
    """Backend of a loader without `backend=`: processes started as torch would start them.

    This includes forking after a device was initialised, which every training script does that makes
    a new iterator for its second epoch. Workers that leave the device alone are not harmed by it, and
    torch itself raises in those that do not. Where a library is in use that does not survive a fork,
    workers are fresh.
    """

    def check(self) -> None:
        self.check_start(self._method())
        if self.start_method is None:
            tell_fresh("this loader")

    def check_start(self, method: str) -> None:
        check_children_allowed("the default")
        if method == "fork":
            asked = "" if self.start_method is None else ", with multiprocessing_context='fork'"
            check_libraries(f"the default{asked}")

    def _method(self) -> str:
        return self.start_method or method_for_workers()
