"""Backends whose workers are processes: one, by several names, and the checks before a process starts.

`fork`, `spawn`, `shared-memory` and the way of torch's own loader differ by their options and by the
method that starts the processes.
"""

from __future__ import annotations

import functools
import multiprocessing
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from hybridloader._support import system
from hybridloader._support.text import warn_once
from hybridloader._support.torch_env import device_in_use
from hybridloader.backends.process import fork_safety
from hybridloader.backends.process.crew import ProcessCrew
from hybridloader.backends.process.fork_safety import fork_hazard
from hybridloader.backends.process.starters import ForkStarter, Starter
from hybridloader.backends.process.transports import PipeTransport, SocketTransport
from hybridloader.engine.contract import Backend, Crew
from hybridloader.errors import BackendUnavailable, ForkUnsafe
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory

_METHODS = ("fork", "spawn", "forkserver", "loky")


class ProcessBackend(Backend):
    """Backend of processes, whatever starts them; those below are its names and its options."""

    children: ClassVar[bool] = True
    forwards: ClassVar[str] = "process"

    preload: bool = True
    """False: workers are not forked from a zygote, also where this is possible."""

    runs_script: ClassVar[bool] = False
    """True: a zygote runs the top of the script if multiprocessing's fork server would."""

    @abstractmethod
    def _method(self) -> str:
        """Give the method that starts the processes: one of multiprocessing's, or ``"loky"``."""

    @property
    def fresh(self) -> bool:
        return self._method() != "fork"

    def started_by(self, method: str) -> Backend | None:
        return self if method == self.name else None

    def check(self) -> None:
        self.check_start(self._method())

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
        check_children_allowed(self.name, method)

    def open(self) -> Crew:
        method = self._method()
        check = functools.partial(self.check_start, method)
        made = _starter(method, preload=self.preload, runs_script=self.runs_script)
        return ProcessCrew(made, self.memory.bytes(), check)


@dataclass(frozen=True)
class Fork(ProcessBackend):
    """Do the work in forked processes, which start in milliseconds and need no pickling.

    Parameters
    ----------
    memory
        Limit of the slots through which large tensors and arrays come back.
    """

    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "fork"

    def _method(self) -> str:
        return "fork"


@dataclass(frozen=True)
class Spawn(ProcessBackend):
    """Do the work in fresh processes, started by loky: everywhere, and without a ``__main__`` guard.

    The dataset and its functions are sent by cloudpickle. So lambdas work, and so do classes that are
    defined in a function, in a notebook cell or in ``__main__``. The main script is not run again.

    Parameters
    ----------
    memory
        Limit of the slots through which large tensors and arrays come back.
    preload
        True: one fresh process loads the dataset and the modules that it imports, and the workers are
        forked from that process (on Linux, unless loading has started threads or opened files). False:
        each worker is started afresh, and loads for itself.
    """

    memory: Memory = DEFAULT_MEMORY
    preload: bool = True
    name: ClassVar[str] = "spawn"

    def _method(self) -> str:
        return "loky"


@dataclass(frozen=True)
class SharedMemory(ProcessBackend):
    """Do the work in processes; large tensors and arrays come back through shared memory.

    Parameters
    ----------
    start_method
        ``"fork"``, ``"loky"`` (as the `spawn` backend), ``"spawn"`` or ``"forkserver"``. The last two
        are multiprocessing's, which run the main script again and so need a ``__main__`` guard. On
        Linux, however, ``"forkserver"`` means ``"loky"``, which forks workers from one process as well.
        None picks fork where that is multiprocessing's default and safe, otherwise loky. Fork is the
        default on Linux before Python 3.14. It is not safe after a device such as CUDA was initialized,
        or with a library whose threads a fork would harm (polars, lance, PyAV, fsspec); the latter
        causes a warning.
    memory
        Limit of the slots through which large tensors and arrays come back.

    Raises
    ------
    BackendUnavailable
        The start method is unknown, or this platform does not have it.
    """

    start_method: str | None = None
    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "shared-memory"
    _called: ClassVar[str] = "backend 'shared-memory'"

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
        if self.start_method is None and multiprocessing.get_start_method() == "fork":
            hazard = fork_hazard()
            if hazard is not None:
                warn_once(
                    f"{self._called} starts fresh workers instead of forking: {hazard.runs}. They "
                    "take longer to start, and cloudpickle sends the dataset to them. backend='spawn' "
                    "silences this warning; backend='threads' has no such limits",
                    "fresh-workers",
                )


@dataclass(frozen=True)
class AsTorch(SharedMemory):
    """Backend of a loader without `backend=`: processes started as torch would start them.

    This includes forking after a device was initialized, which every training script does that makes
    a new iterator for its second epoch. Workers that leave the device alone are not harmed by it, and
    torch itself raises in those that do not. Where a library is in use that does not survive a fork,
    workers are fresh.
    """

    runs_script: ClassVar[bool] = True
    _called: ClassVar[str] = "this loader"

    def check_start(self, method: str) -> None:
        check_children_allowed("the default", method)
        if method == "fork":
            asked = "" if self.start_method is None else ", with multiprocessing_context='fork'"
            check_libraries(f"the default{asked}")

    def _method(self) -> str:
        return self.start_method or method_for_workers()


def check_children_allowed(name: str, method: str) -> None:
    """Refuse where multiprocessing forbids child processes.

    It does in a daemonic process, and in one that loads its work, which would start others without end.
    """
    if method != "fork" and hasattr(multiprocessing.current_process(), "_inheriting"):
        raise BackendUnavailable(
            f"backend {name!r} can't start workers here: this process was started to become a worker, "
            "and first runs the top of the script or of a module. Put the loop under `if __name__ == "
            "'__main__':`, as torch requires it."
        )
    if multiprocessing.current_process().daemon:
        raise BackendUnavailable(
            f"backend {name!r} can't run in a daemonic process, such as another loader's worker: "
            "it can't have child processes. Use backend='threads' or num_workers=0 there."
        )


def check_fork(name: str) -> None:
    """Refuse where there is no fork, and where a device, which survives no fork, was initialized."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise BackendUnavailable(
            f"backend {name!r} needs fork, which this platform does not have. "
            "Use backend='spawn', 'shared-memory' or 'threads'."
        )
    device = device_in_use()
    if device is not None:
        raise BackendUnavailable(
            f"backend {name!r} would fork this process after {device} was initialized, and {device} "
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


def _starter(method: str, *, preload: bool, runs_script: bool) -> Starter:
    """Return the starter of a crew, with its transport.

    `method` is one of multiprocessing's, or ``"loky"``. With `preload`, a zygote forks fresh workers
    where that is possible. With `runs_script`, a zygote in the place of multiprocessing's fork server
    runs the top of the script, as the workers of that server do.
    """
    sockets = system.UNIX_SOCKETS
    transport = SocketTransport() if sockets else PipeTransport()
    if method == "fork":
        return ForkStarter(method, transport)
    zygote = preload and method in ("loky", "forkserver") and sockets and fork_safety.available()
    if not zygote:
        return Starter(method, transport)
    from hybridloader.backends.process.zygote import ZygoteStarter

    return ZygoteStarter(transport, runs_script=runs_script and method == "forkserver")
