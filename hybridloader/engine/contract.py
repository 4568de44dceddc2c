"""Contract of a backend: the classes to write so that workers can run somewhere new.

A *backend* is the object that a user chooses: small, immutable, with options, safe to share, pickle
and reuse. Opening it makes a *crew*: the workers of one stage, while that stage runs. The crew starts
workers, sends them messages, returns their events, and ends them. It knows nothing of order,
batches, sampling or pinning.

`hybridloader.engine`, from which all is imported, lists the six methods that must be written. The
others have defaults, right for a crew that calls `Crew.place` and `Crew.report`.
`hybridloader.testing.BackendContract` tests a backend against this page.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing.util  # its exit handler must be registered before ours, to run after it
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hybridloader._support.text import INFO, flag, log, meant, warn_once
from hybridloader._support.threads import snapshot
from hybridloader.engine.messages import Done, Event, Message, Stop, WorkerSpec
from hybridloader.errors import BackendUnavailable
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory, check_memory

if TYPE_CHECKING:
    from typing_extensions import Self


GRACE = 1.0  # seconds that workers get to end by themselves when their crew is closed

PATIENCE = 1.9  # seconds after which the closing of a crew ends, even if workers still run

CLOSING = 2.0  # seconds that closing a stage, a relay, a loader or a pipeline waits for threads

SLICE = 0.2
"""Seconds of one wait on a lock. On a busy machine (Python 3.11, Linux), with one worker thread
holding the GIL and another waiting, Ctrl-C hung 2 of 8 programs without these limits and none of 8
with them. The likely reason is a signal that arrives just before the wait. On Windows no signal
ends a wait."""


class WorkerHandle(ABC):
    """Handle of one worker, with the members of `multiprocessing.Process`, but `start` and `close`.

    The defaults of all but `is_alive`, `terminate` and `join` are right for workers within this
    process.
    """

    name: str = "worker"
    """Kind of the worker, for errors."""

    daemon: bool = True
    """True, as workers end with this process."""

    @property
    def pid(self) -> int | None:
        """Process id; that of this process for a worker that is a thread of it."""
        return os.getpid()

    @property
    def known_pid(self) -> int | None:
        """Process id on this machine, or None if there is none yet; for reports, which never wait."""
        return self.pid

    @property
    def ident(self) -> int | None:
        """Identity of the process or thread; None if there is none yet."""
        return self.pid

    @property
    def exitcode(self) -> int | None:
        """Exit code, ``-N`` if signal N has ended the worker; None while it runs."""
        return None if self.is_alive() else 0

    @property
    def code_known(self) -> bool:
        """True if `exitcode` is that of the worker; False if it is not known how it ended."""
        return True

    @property
    def sentinel(self) -> int:
        """Handle by which `multiprocessing.connection.wait` waits for the worker's end.

        Raises `AttributeError` if the worker is no process; use `join`.
        """
        raise AttributeError(f"a worker of kind {self.name!r} has no sentinel; use join(timeout)")

    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def terminate(self) -> None:
        """End the worker now if that is possible, else after its current sample."""

    def kill(self) -> None:
        """End the worker as `terminate` does, or by stronger means if there are any."""
        self.terminate()

    @abstractmethod
    def join(self, timeout: float | None = None) -> None: ...


class Crew(ABC):
    """The running workers of one stage.

    One thread at a time calls these methods; only `wake` and `report` may be called from any thread.
    """

    upkeep: Callable[[], None] | None = None
    """Function that each `wait` calls on the thread that pulls the stage, for example to warn;
    None: no call."""

    handles: Sequence[WorkerHandle]
    """The workers started so far, in the order of their numbers; a subclass may declare their type."""

    __events: SimpleQueue[Event | None]
    __left: float | None  # time at which the workers were ordered to leave

    def __new__(cls, *args: Any, **options: Any) -> Self:
        # Not in `__init__`, so that a subclass with its own `__init__` need not call this one.
        self = super().__new__(cls)
        self.handles = []
        self.__events = SimpleQueue()  # None wakes the reader; safe to use in finalizers
        self.__left = None
        return self

    # -- to be written ---------------------------------------------------------------------------

    @abstractmethod
    def start(self, worker: int, spec: WorkerSpec) -> None:
        """Start worker number `worker`, without waiting for it; `Ready` or `Exited` follows.

        A new worker may take the place of one that has exited; it gets no message sent to that one.
        Errors that are certain at once are raised here.
        """

    @abstractmethod
    def send(self, worker: int, message: Message) -> None:
        """Queue `message`, in order. Never blocks; does nothing when the worker is gone."""

    # -- for its use -----------------------------------------------------------------------------

    def place(self, worker: int, handle: WorkerHandle) -> None:
        """Set the handle of worker number `worker`; to be called by `start`."""
        self.handles = [*self.handles[:worker], handle, *self.handles[worker + 1 :]]

    def report(self, event: Event) -> None:
        """Add `event` to those that the next `wait` returns. From any thread."""
        self.__events.put(event)

    # -- with a default --------------------------------------------------------------------------

    def settle(self) -> None:  # noqa: B027  # worker processes do not disturb the caller
        """Wait until the caller may continue; called after all calls of `start` of an epoch.

        Workers that share the caller's random generators run `spec.init_fn` while the caller waits, here
        or in `start`. Afterwards the states of these generators are restored.
        """

    def flush(self) -> None:  # noqa: B027  # most crews have nothing to do
        """Send the messages that `send` has queued, if it does not do so itself; so does `wait`."""

    def wait(self, timeout: float | None) -> Sequence[Event]:
        """Return the events since the last call; wait `timeout` seconds for the first (None: forever).

        May return early and empty, and does so after `wake`. By default, the events are those passed to
        `report`.
        """
        if self.upkeep is not None:
            self.upkeep()
        self.flush()
        timeout = SLICE if timeout is None else min(timeout, SLICE)
        events, found = self.__events, []
        try:
            event = events.get(timeout=timeout)
            while event is not None:
                found.append(event)
                event = events.get_nowait()
        except Empty:
            pass
        return found

    def wake(self) -> None:
        """Make the current `wait`, or else the next one, return at once."""
        self.__events.put(None)

    def kill(self, worker: int) -> None:
        """End the worker now, or a thread after this sample; `Exited` follows.

        By default, `WorkerHandle.kill` does it.
        """
        self.handles[worker].kill()

    def stack(self, worker: int) -> str:
        """Return the worker's stack as text, like a Python traceback, or why there is none."""
        return ""

    def leave(self) -> None:
        """Begin to end all workers, without waiting; `close` follows. Idempotent, never raises.

        The time limit of `close` starts with the first call of this. So several crews that leave and are
        then closed take no longer than the slowest. By default, each worker is sent a `Stop`: it first
        does its tasks, as far as time allows.
        """
        if self.__left is None:
            self.__left = time.monotonic()
            for worker in range(len(self.handles)):
                self.send(worker, Stop())

    def close(self) -> None:
        """End all workers and free everything, within 2 seconds. Idempotent, never raises.

        By default, workers that have not ended a second after `leave` are killed. Results that were not
        taken are discarded.
        """
        self.leave()
        if self.__left is None:  # the subclass overrides `leave`
            self.__left = time.monotonic()
        for seconds in (GRACE, PATIENCE):
            for handle in self.handles:
                with suppress(RuntimeError):  # a thread that would join itself, in a finalizer
                    handle.join(max(0.0, self.__left + min(seconds, PATIENCE) - time.monotonic()))
            for handle in self.handles:
                if handle.is_alive():
                    handle.kill()
        try:
            while True:
                event = self.__events.get_nowait()
                if isinstance(event, Done):
                    event.payload.discard()
        except Empty:
            pass


class Backend(ABC):
    """Kind of workers, with its options. Immutable and picklable; holds no worker itself."""

    name: ClassVar[str]
    """Registered name, in lower case with dashes."""

    in_process: ClassVar[bool] = False
    """True if workers run in this process, and so share its objects and its random generators."""

    in_caller: ClassVar[bool] = False
    """True if the calling thread does the work, in `Crew.wait`, and nothing runs concurrently."""

    children: ClassVar[bool] = False
    """True if workers are child processes of this process. A daemonic process can't have children;
    there a loader uses threads instead, with a warning."""

    forwards: ClassVar[str] = ""
    """Kind of the `forwardable` payloads that crews make; crews of the same kind accept them as
    tasks."""

    memory: Memory = DEFAULT_MEMORY
    """Limit and kind of the recycled memory for large tensors, if the backend has any."""

    @property
    def fresh(self) -> bool:
        """True if workers start without a copy of this process, so that its threads do no harm."""
        return False

    @property
    def copies(self) -> bool:
        """True if each worker reads its own copy of a map-style dataset."""
        return not self.in_process

    def started_by(self, method: str) -> Backend | None:
        """Return this backend with processes started by a method of multiprocessing; None if it can't.

        It is also called for a loader with a `multiprocessing_context`.
        """
        return None

    def check(self) -> None:  # noqa: B027  # most backends work everywhere
        """Raise `BackendUnavailable`, with the reason and an alternative, if it can't serve now.

        Called before any worker starts. By default every backend can serve.
        """

    @abstractmethod
    def open(self) -> Crew:
        """Make a crew with no worker in it."""


# -- backends by name: the six that come along, and those that other packages add
#
# A package adds a backend through the entry-point group ``hybridloader.backends``, with a name and
# ``module:attribute`` of a `Backend` class or of a callable that returns a `Backend`. Nothing is
# imported before a name is asked for.

GROUP = "hybridloader.backends"  # entry-point group of backends in other packages


class Entry(NamedTuple):
    """Module and attribute of a backend, and the command that installs it."""

    target: str
    install: str


_HOME, _INCLUDED = "hybridloader.backends", "comes with hybridloader"
_OURS = {
    "inline": Entry(f"{_HOME}.threads:Inline", _INCLUDED),
    "threads": Entry(f"{_HOME}.threads:Threads", _INCLUDED),
    "fork": Entry(f"{_HOME}.process.backend:Fork", _INCLUDED),
    "spawn": Entry(f"{_HOME}.process.backend:Spawn", "pip install loky cloudpickle"),
    "ray": Entry(f"{_HOME}.ray:Ray", "pip install ray"),
    "shared-memory": Entry(f"{_HOME}.process.backend:SharedMemory", _INCLUDED),
}


@lru_cache(maxsize=1)
def known() -> Mapping[str, Entry]:
    """Return all backends by name, as a read-only view; none of them is imported."""
    from importlib.metadata import entry_points

    entries = dict(_OURS)
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist is not None else point.value.partition(":")[0]
        entries.setdefault(normalize(point.name), Entry(point.value, f"pip install {package}"))
    return MappingProxyType(entries)


def backend_names() -> tuple[str, ...]:
    """Return the names that `backend=` takes."""
    return tuple(known())


_PROCESSES = "processes"  # what users type first


def normalize(name: str) -> str:
    """Return the registered form of a name: ``"shared-memory"`` for ``"processes"``."""
    name = name.strip().lower().replace("_", "-")
    return "shared-memory" if name == _PROCESSES else name


def get_backend(backend: Any) -> Backend:
    """Return the backend of a name; a `Backend` instance as it is.

    Raises
    ------
    BackendUnavailable
        The name is unknown (the message lists those there are), or its package is missing.
    TypeError
        Neither a name nor a backend.
    """
    if isinstance(backend, Backend):
        name = type(backend).__name__
        if backend.memory is not None:
            check_memory(name, backend.memory)
        flag(f"{name}: copy_dataset", backend.copies)
        return backend
    if not isinstance(backend, str):
        hint = f"; use an instance: {backend.__name__}()" if isinstance(backend, type) else ""
        raise TypeError(f"backend must be a name or a Backend, not {backend!r}{hint}")
    if (entry := known().get(normalize(backend))) is None:
        listed = ", ".join(f"{name} ({known()[name].install})" for name in known())
        guess = meant(backend, [*known(), _PROCESSES, "auto"])
        raise BackendUnavailable(
            f"unknown backend {backend!r}; {guess}there are: {listed}, and auto "
            "(measures; for a loader or a step). Pass your own as an instance"
        )
    module, _, attribute = entry.target.partition(":")
    try:
        factory: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"backend {backend!r} can't be imported ({error}); to install it: {entry.install}"
        ) from error
    made: Any = factory()
    if not isinstance(made, Backend):
        raise TypeError(f"backend {backend!r} gave {made!r}, which is not a Backend")
    return made


def usable(backend: Backend) -> Backend:
    """Return `backend`, or in a daemonic process threads in its place, with one warning per process.

    multiprocessing forbids daemonic processes to have children, and every loader's workers are
    daemonic; torch raises an AssertionError there. Only backends that set `children` are replaced. A
    program that opens such a backend directly gets `BackendUnavailable` instead.

    Datasets that every worker must own (iterable ones, data pipes, readers) are copied for each thread,
    as ever; a map-style dataset is shared by the threads, because an inner loader's dataset was made for
    the very worker that it lives in.
    """
    process = multiprocessing.current_process()
    if not backend.children or not process.daemon:
        return backend
    name = process.name
    log(INFO, "process %r is daemonic: using threads, not %s", name, type(backend).__name__)
    warn_once(
        f"process {name!r} is daemonic, as a loader's workers are, so it can't have child processes: a "
        "loader in it uses threads instead. They share a map-style dataset, and the GIL if there is "
        "one. Set backend='threads' or num_workers=0 there to silence this. For processes, make the "
        "loader in a process that is not daemonic, or give the outer loader more workers",
        "daemonic",
    )
    threads: Any = get_backend("threads")
    return replace(threads, memory=backend.memory)  # type: ignore[no-any-return]


# -- crews that run, each ended by its holder, the holder's finalizer, or the end of the process

assert multiprocessing.util is not None

_crews: weakref.WeakKeyDictionary[Crew, int] = weakref.WeakKeyDictionary()
"""Crews, each with the process that owns it."""


def ended_with(holder: Any, crew: Crew) -> weakref.finalize[[Crew, int], Any]:
    """Close `crew` when `holder` is collected, at exit, or when the result is called."""
    owner = os.getpid()
    _crews[crew] = owner
    finalizer = weakref.finalize(holder, _close, crew, owner)
    finalizer.atexit = False  # _close_all does it, in the right order
    return finalizer


_runners: weakref.WeakSet[Any] = weakref.WeakSet()  # objects whose threads use crews

exiting = False


def closed_with(holder: Any, runner: Any) -> weakref.finalize[[], Any]:
    """Close `runner` when `holder` is collected, when the result is called, or at exit.

    At exit it is closed before any crew, because its threads use crews.
    """
    _runners.add(runner)
    finalizer = weakref.finalize(holder, runner.close)
    finalizer.atexit = False
    return finalizer


def close_once(holder: Any, runner: Any) -> None:
    """Close `runner` by the `_finalizer` of `holder`, and have another one if that was interrupted.

    If several threads call it, one closes the runner, and the others return at once.
    """
    try:
        holder._finalizer()
    except BaseException:
        holder._finalizer = closed_with(holder, runner)
        raise


def park_at_exit() -> None:
    """Stop a daemon thread for good in a process that is ending."""
    if exiting and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()


def _close_all() -> None:
    """Close all runners, then all crews, whichever of them raises; the errors are raised at the end.

    An interrupt ends the wait for one of them and nothing else: the program is ending already.
    """
    global exiting
    exiting = True
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as rest:
        # Called last, so that it includes crews that runners make in the meantime.
        rest.callback(_close_crews)
        for runner in snapshot(_runners):
            rest.callback(runner.close)


def _close_crews() -> None:
    with contextlib.ExitStack() as rest:
        for crew in snapshot(_crews):
            rest.callback(_close, crew, _crews[crew])


weakref.finalize(_crews, int).detach()  # weakref's own exit handler goes first, to run after ours
atexit.register(_close_all)


def _close(crew: Crew, owner: int) -> None:
    if os.getpid() == owner:  # in a fork, the workers belong to the parent
        crew.close()
