"""Worker processes whose large results come back through recycled shared memory."""

from __future__ import annotations

import multiprocessing
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from hybridloader import arena
from hybridloader.backends import sockets
from hybridloader.backends.fork import check_fork
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
        ``"fork"``, ``"spawn"``, ``"forkserver"`` (multiprocessing's own, which run the main script
        again and so need a ``__main__`` guard) or ``"loky"`` (as the `spawn` backend). None takes
        what multiprocessing would take: fork on Linux before Python 3.14.

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
        context: Any
        if self._method() == "loky":
            context = loky_context()
        else:
            context = multiprocessing.get_context(self._method())
        slots = sockets.available() and arena.available()
        if not slots:
            warnings.warn(
                "this platform has no nameless shared memory: batches travel through the pipe",
                stacklevel=2,
            )
        return ProcessCrew(context, slots=slots, sockets=sockets.available())

    def _method(self) -> str:
        return self.start_method or multiprocessing.get_start_method()
