"""Base of the backends whose workers are processes, and the checks before one starts.

A backend of this kind adds only its name, its options and the method that starts its processes.
"""

from __future__ import annotations

import functools
import multiprocessing
import threading
from abc import abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar

from hybridloader._support.caller import warn, warn_once
from hybridloader._support.devices_in_use import device_in_use
from hybridloader._support.errors import BackendUnavailable, ForkUnsafe
from hybridloader.backends.process import fork_safety, socket_transport
from hybridloader.backends.process.crew import ProcessCrew, slot_kind
from hybridloader.backends.process.fork_hazards import fork_hazard
from hybridloader.engine.contract import Backend, Crew

_OURS = "hybridloader"
"""Prefix of the names of this package's threads; a pipeline forks before it starts them."""

_REMADE = "QueueFeederThread"
"""Threads of multiprocessing's queues, such as torch's loader has: a fork makes their locks anew."""

_warned = threading.Event()


class ProcessBackend(Backend):
    children: ClassVar[bool] = True
    forwards: ClassVar[str] = "process"

    @abstractmethod
    def _method(self) -> str:
        """Give the method that starts the processes: one of multiprocessing's, or ``"loky"``."""

    def _from_zygote(self) -> Collection[str]:  # methods for which a zygote forks the workers
        return ("loky", "forkserver")

    @property
    def fresh(self) -> bool:
        return self._method() != "fork"

    def started_by(self, method: str) -> Backend | None:
        return self if method == self.name else None

    def check(self) -> None:
        self.check_start(self._method())
        slot_kind(self.memory, sockets=socket_transport.available())

    def check_start(self, method: str) -> None:
        """Raise `BackendUnavailable` if no worker can be started by `method` now.

        Asked before the first workers start, and before one starts in the place of one that died.
        """
        if method == "fork":
            check_fork(
                self.name if self.name == method else f"{self.name} (start_method={method!r})"
            )
        elif method != "loky" and method not in multiprocessing.get_all_start_methods():
            raise BackendUnavailable(f"this platform has no start method {method!r}; use 'loky'")
        check_children_allowed(self.name)
        if method == "fork":
            check_threads(self.name)

    def open(self) -> Crew:
        method, sockets = self._method(), socket_transport.available()
        zygote = sockets and method in self._from_zygote() and fork_safety.available()
        context: Any
        if zygote or method == "loky":  # its processes do not import the main module
            from loky.backend import get_context

            context = get_context("loky")
        else:
            context = multiprocessing.get_context(method)
        check = functools.partial(self.check_start, method)
        return ProcessCrew(context, self.memory, check, sockets=sockets, zygote=zygote)


def check_children_allowed(name: str) -> None:
    """Refuse in a daemonic process, which may not have children (multiprocessing forbids it)."""
    if multiprocessing.current_process().daemon:
        raise BackendUnavailable(
            f"backend {name!r} can't serve inside a daemonic process, such as another loader's "
            "worker: it may not have children. Use backend='threads' or num_workers=0 there."
        )


def check_fork(name: str) -> None:
    """Refuse where there is no fork, and where a device, which survives no fork, was initialised."""
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
    check_libraries(name)


def check_libraries(name: str) -> None:
    """Refuse to fork where a library is in use that does not survive it."""
    hazard = fork_hazard()
    if hazard is not None:
        raise ForkUnsafe(
            f"backend {name!r} would fork this process, but {hazard.runs}. Use backend='spawn', "
            "'shared-memory' or 'threads', or make the iterator before the first use of "
            f"{hazard.library}."
        )


def method_for_workers() -> str:
    """Return multiprocessing's start method, or ``"loky"`` where a fork would harm a library in use."""
    method = multiprocessing.get_start_method()
    return "loky" if method == "fork" and fork_hazard() is not None else method


def tell_fresh(name: str) -> None:
    """Warn, once per process, if workers are fresh because of a library."""
    hazard = fork_hazard() if multiprocessing.get_start_method() == "fork" else None
    if hazard is not None:
        warn_once(
            f"{name} starts fresh workers and does not fork: {hazard.runs}. They take longer to start, "
            "and the dataset is sent to them by cloudpickle. backend='spawn' says so, "
            "backend='threads' has no such limits"
        )


def check_threads(name: str) -> None:
    """Warn, once per process, when other threads run that a fork could copy a locked lock from.

    Threads of ours do not count, nor, on one of ours, the main thread that waits for it. Python 3.12 and
    later warn of any thread at every fork, by a DeprecationWarning that is hidden unless asked for.
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
