"""Worker processes whose large results come back through recycled shared memory."""

from __future__ import annotations

import functools
import multiprocessing
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from hybridloader import arena
from hybridloader.backends import sockets
from hybridloader.backends.fork import check_fork, cuda_initialised
from hybridloader.backends.process import ProcessCrew, check_children_allowed
from hybridloader.backends.spawn import loky_context
from hybridloader.contract import Backend, Crew
from hybridloader.errors import BackendUnavailable

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
        Python 3.14 while CUDA is not initialised, else loky.

    Raises
    ------
    BackendUnavailable
        The start method is unknown, or this platform does not have it.
    """

    start_method: str | None = None
    name: ClassVar[str] = "shared-memory"
    in_process: ClassVar[bool] = False

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

    def open(self) -> Crew:
        method = self._method()
        context: Any = loky_context() if method == "loky" else multiprocessing.get_context(method)
        slots = sockets.available() and arena.available()
        if not slots:
            _warn_without_slots()
        return ProcessCrew(context, slots=slots, sockets=sockets.available())

    def _method(self) -> str:
        if self.start_method is not None:
            return self.start_method
        forks = multiprocessing.get_start_method() == "fork" and not cuda_initialised()
        return "fork" if forks else "loky"


@dataclass(frozen=True)
class AsTorch(SharedMemory):
    """What a loader without `backend` takes: processes started as torch would start them.

    That includes forking after CUDA was initialised, which every training script does that makes
    a new iterator for its second epoch. Workers that leave CUDA alone are not harmed by it, and
    torch itself raises in those that do not.
    """

    def check(self) -> None:
        check_children_allowed("the default")

    def _method(self) -> str:
        return self.start_method or multiprocessing.get_start_method()


@functools.cache
def _warn_without_slots() -> None:
    warnings.warn(
        "this platform has no shared memory without a name: batches travel through the pipe",
        stacklevel=3,
    )
