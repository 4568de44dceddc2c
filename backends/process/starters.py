"""Starters: the ways to start the worker processes of a crew, with the work that each way must send.

A worker is a fork of this process, which has the work. Or it is a fresh process of multiprocessing or
loky, which loads the work. Or a zygote, a fresh process that has loaded the work, forks it: that way has
its own module, because Windows can't import it.
"""

from __future__ import annotations

import errno
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import spawn
from typing import Any, ClassVar, NamedTuple

from hybridloader._support import system
from hybridloader.backends.process.child import LEFT_TO_PARENT, FirstFrame, main
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.postmortem import PostmortemRecord
from hybridloader.backends.process.transports import PipeTransport, SocketTransport
from hybridloader.engine.contract import GRACE, SLICE, WorkerHandle
from hybridloader.engine.messages import WorkerSpec
from hybridloader.memory.shared_slots import OwnDescriptor, ours
from hybridloader.memory.shipping import Shipment, ship
from hybridloader.memory.slots import forks

ZYGOTE = -1  # number, in a crew's transport, of the connection to the process that forks workers

Transport = SocketTransport | PipeTransport


class WorkerStart(NamedTuple):
    """One worker that is to be started."""

    worker: int
    spec: WorkerSpec
    share: int  # as `child.main` takes it
    record: PostmortemRecord | None
    # Gets its handle before a signal is acted on. If the worker must be started another way later, it
    # gets another handle.
    note: Callable[[ProcessHandle], None]

    @property
    def name(self) -> str:
        return f"hybridloader-{self.spec.stage}-{self.worker}"

    @property
    def recorded(self) -> bool | str:
        """As `FirstFrame` takes it."""
        return self.record is not None and (self.record.path or True)


class Starter:
    """Starter of fresh processes for one crew, each of which loads the work in its first frame."""

    forks: ClassVar[bool] = False
    """True if workers are forks of this process, with its work."""

    def __init__(self, method: str, transport: Transport, *, runs_script: bool = False) -> None:
        """Take one of multiprocessing's methods, or ``"loky"``, and the transport of the crew.

        If `runs_script`, the processes of loky run the top of the script, as multiprocessing's do.
        """
        if method == "loky":
            # Not by this name: joblib, a part of scikit-learn, registers its copy of loky under it.
            from loky.backend.context import ctx_loky as context
        else:
            context = multiprocessing.get_context(method)
        self.transport, self._method, self._context = transport, method, context
        known = _script() if runs_script or method in ("spawn", "forkserver") else None
        self._script = known if method == "loky" else None
        self._by_name = known is not None  # workers have the script's objects, too
        # All the mutable state: the work of workers that have not loaded it yet.
        self._shipments: dict[int, tuple[WorkerSpec, Shipment]] = {}

    def start(self, start: WorkerStart) -> None:
        """Start a worker with a connection of the transport, without waiting for it."""
        shipment = self._shipment(start.spec)
        if shipment is not None:
            self._shipments[start.worker] = start.spec, shipment
        connection, theirs = self._context.Pipe(duplex=True)
        self.transport.connect(start.worker, connection)
        try:
            self._launch(start, theirs)
        finally:
            theirs.close()
        parts, fds = ([b""], []) if shipment is None else (shipment.parts, shipment.fds)
        if start.record is not None and start.record.path is None:
            fds = [*fds, start.record.fd]
        self.transport.send(start.worker, parts, duplicates(fds))

    def _shipment(self, spec: WorkerSpec) -> Shipment | None:
        """Pack a spec, once for all workers that start together; None if the worker will have it."""
        for sent, shipment in self._shipments.values():
            if sent is spec:
                return shipment
        share = self.transport.carries_descriptors
        return ship(spec, "the loader", share=share, by_name=self._by_name)

    def _launch(self, start: WorkerStart, connection: Any) -> None:
        """Start a worker at this end of its connection, which the caller closes."""
        process = self._context.Process(
            target=main,
            args=(
                start.worker,
                self.transport.endpoint,
                connection,
                self._first(start),
                os.getpid(),
                start.share,
                tuple(ours) if self.forks else (),
                not self.forks,
            ),
            name=start.name,
            daemon=True,
        )
        with starting(self._method):
            process.start()
            start.note(ProcessHandle(process))

    def _first(self, start: WorkerStart) -> FirstFrame:
        _, shipment = self._shipments.get(start.worker, (None, None))
        inherited = None if shipment is None else shipment.inherited
        return FirstFrame(start.recorded, inherited=inherited, script=self._script)

    def arrived(self, worker: int) -> None:
        """Let go of a worker's work: the worker has mapped it, or is gone."""
        _, shipment = self._shipments.pop(worker, (None, None))
        if shipment is not None and all(s is not shipment for _, s in self._shipments.values()):
            shipment.close()

    def hear(self, frame: Frame | None) -> Callable[[], None] | None:
        """Take in a frame of `ZYGOTE`; None: it is gone. May return a function for the next `wait` to
        call."""
        return None

    def dataset_changed(self) -> None:
        """Note that workers yet to start need another dataset than those that run have begun with."""

    def end_of(self, record: PostmortemRecord) -> tuple[str, str]:
        """Describe the end of a worker with this record, as `PostmortemRecord.end` does."""
        end = record.end()
        if self.forks or record.begun or any(end):
            return end
        runs = " It runs the top of the script first." if self._by_name else ""
        return (
            "",
            f"It had not begun its work.{runs} If an error ended it, its stderr shows the error.",
        )

    def stack(self) -> str:
        """Return the stack of the process that starts workers; "" if there is none."""
        return ""

    def close(self) -> None:
        """End the process that starts workers, once the crew has hung up. Idempotent."""
        for worker in list(self._shipments):
            self.arrived(worker)


class ForkStarter(Starter):
    """Starter of workers that are forks of this process."""

    forks: ClassVar[bool] = True

    def _shipment(self, spec: WorkerSpec) -> None:
        return None

    def _first(self, start: WorkerStart) -> FirstFrame:
        return FirstFrame(start.recorded, start.spec)


def _script() -> dict[str, str] | None:
    """Return how a process finds the script; None if it can't run it again, as in a notebook."""
    found: dict[str, Any] = spawn.get_preparation_data("")
    name, path = found.get("init_main_from_name"), found.get("init_main_from_path")
    if name is not None:  # of a package's `__main__` multiprocessing runs nothing
        return None if name.rpartition(".")[2] == "__main__" else {"init_main_from_name": name}
    return None if path is None else {"init_main_from_path": path}


def duplicates(fds: Sequence[int]) -> list[int]:
    """Duplicate descriptors, all or none."""
    found: list[int] = []
    try:
        for fd in fds:
            found.append(os.dup(fd))
    except OSError:
        for fd in found:
            os.close(fd)
        raise
    return found


# -- handles: ask the processes how they are, end them, wait for them
#
# Where there are pidfds, a pidfd shows a worker's end and carries signals to it. A process number would
# not do: if other code waits for the children of this process, or SIGCHLD is ignored, the number may be
# that of another process by then. A handle knows neither its worker's work nor its connection.

UNKNOWN = 255
"""Exit code of a process whose exit code is unknown, as in asyncio and the fork server."""

_LOOK = 1e-3
"""Seconds between two checks of a process whose files are all closed.

Such a process is about to end, unless the user's code has closed all files, also those of this package,
and runs on. So no thread blocks in `waitpid`.
"""

EXCEPTION = 0xC0000000
"""Exit codes from here on are those of Windows's exceptions (NTSTATUS values of the severity error)."""

reaping = system.renewed_in_forks(threading.RLock())
"""Lock for starting a process and for reading its exit code.

multiprocessing checks all its children whenever it starts one. For a moment, another thread does not
see the result: the child seems to be alive to it, while its number is free or belongs to another
process. Stages of a pipeline run on several threads.
"""

_started: weakref.WeakSet[ProcessHandle] = weakref.WeakSet()  # those of multiprocessing and loky


class ProcessHandle(WorkerHandle):
    """Handle of a worker process, which also knows how it ended."""

    name = "process"
    _process: Any = None  # of multiprocessing or loky; None: a zygote forks it
    # All the mutable state:
    pidfd: OwnDescriptor | None = None  # readable once the process has ended; until `release`
    _ended = _terminated = False
    _code: int | None = None  # once it has ended; None: unknown

    def __init__(self, process: Any) -> None:  # of multiprocessing or loky, and started
        self._process = process
        _started.add(self)
        try:
            self.pidfd = OwnDescriptor(os.pidfd_open(process.pid))
        except ProcessLookupError:  # SIGCHLD is ignored, and the process has ended
            self._has_ended()
        # Not Linux, an old kernel, a sandbox, or no free descriptor.
        except (AttributeError, OSError):
            pass
        popen = getattr(process, "_popen", None)
        if popen is not None and system.KILL is not None:
            # multiprocessing calls it at exit, and then waits without a limit.
            popen.terminate = functools.partial(_kill, weakref.ref(popen))

    @property
    def pid(self) -> int | None:
        return self._process.pid  # type: ignore[no-any-return]

    @property
    def sentinel(self) -> int:
        return self._process.sentinel  # type: ignore[no-any-return]

    @property
    def exitcode(self) -> int | None:
        """None while it runs, then the code, ``-N`` if signal N has ended it, or `UNKNOWN`.

        After `terminate` it is ``-SIGTERM``, as multiprocessing has it on all platforms.
        """
        if self.is_alive():
            return None
        if self._code is None:
            return UNKNOWN
        if self._terminated and self._code == -(system.KILL or 0):
            return -signal.SIGTERM
        return self._code

    @property
    def code_known(self) -> bool:
        return self.is_alive() or self._code is not None

    @property
    def ended_with(self) -> str | None:
        """Name of the process with which it has ended, and not by its task; None: by itself."""
        return None

    def end_reported(self) -> bool:
        """Return True if the worker is gone, now that its pidfd or its sentinel is readable."""
        return True  # or it has closed its files, and counts as ended

    def is_alive(self) -> bool:
        with reaping:
            if self._ended:
                return False
            if self.pidfd is not None:
                ended = bool(multiprocessing.connection.wait([self.pidfd.fileno()], 0))
            else:  # multiprocessing takes a process that other code waited for as alive
                ended = not (self._process.is_alive() and system.alive(self._process.pid))
            if ended:
                self._has_ended()
            return not ended

    def send_signal(self, signum: int) -> None:
        """Send a signal to this process, never to another of its number. Raises `ProcessLookupError`."""
        with reaping:
            if not self.is_alive() or (self.pidfd is None and self._process is None):
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd.fileno(), signum)
            else:
                os.kill(self._process.pid, signum)

    def terminate(self) -> None:
        """End it at once: by SIGKILL, because workers leave SIGTERM to their parent."""
        with reaping:
            self._terminated = self._terminated or self.is_alive()
        self.kill()

    def kill(self) -> None:
        if system.KILL is None:
            self._process.terminate()
            return
        with suppress(ProcessLookupError):
            self.send_signal(system.KILL)

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
            if left <= 0:
                return
            self._await_end(left)

    def _await_end(self, seconds: float) -> None:
        """Wait until its end may be seen; in slices, because another thread may see it first."""
        pidfd = self.pidfd
        if pidfd is not None:
            multiprocessing.connection.wait([pidfd.fileno()], seconds)
        elif multiprocessing.connection.wait([self.sentinel], seconds):
            time.sleep(min(seconds, _LOOK))

    def disown(self) -> None:
        """Take it off multiprocessing's list of children, which it ends when this process exits."""
        children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]
        children.discard(self._process)

    def release(self) -> None:
        """Close the pidfd; no thread may wait on it any more.

        A killed process that the kernel has not removed yet is reaped when multiprocessing starts the
        next one.
        """
        with reaping:
            self.pidfd = None

    def cause(self) -> str:
        """Describe how the worker ended, if it was not asked to end."""
        self.join(GRACE)
        if self.is_alive():
            self.kill()
            self.join(GRACE)
            return "closed its connection while it was running, and was killed"
        code = self.exitcode
        if self._code is None or code is None:
            return self.unknown()
        if code < 0:
            try:
                return f"was killed by signal {signal.Signals(-code).name} ({-code})"
            except ValueError:
                return f"was killed by signal {-code}"
        return f"exited with code {code}" + (f" ({code:#x})" if code >= EXCEPTION else "")

    def unknown(self) -> str:
        """Describe how the worker ended without a known exit code."""
        return (
            "ended; its exit code is not known, because SIGCHLD is ignored in this process or other "
            "code in it has waited for the worker"
        )

    def _has_ended(self) -> None:
        """Ask for the exit code, which also lets the kernel forget the process."""
        self._ended = True
        code = self._process.exitcode
        if code is None:
            # The fork server reports the code a moment later. If another thread has just read it, it is
            # available in a moment. If other code has waited for the process, there is none.
            if getattr(self._process, "_start_method", None) == "forkserver":
                multiprocessing.connection.wait([self._process.sentinel], GRACE)
            else:
                time.sleep(10 * _LOOK)
            code = self._process.exitcode
        self._code = code
        self.disown()


def _kill(reference: weakref.ref[Any]) -> None:
    """End a process as multiprocessing does, but by SIGKILL: a worker ignores SIGTERM."""
    popen = reference()
    if popen is not None and popen.returncode is None:
        with suppress(OSError):
            os.kill(popen.pid, signal.SIGKILL)


def _forked() -> None:
    """Leave the parent's filter and processes to it: multiprocessing would end these as a fork exits."""
    getattr(_hiding, "filters", ExitStack()).close()
    for handle in list(_started):
        handle.disown()


system.at_fork(after_in_child=_forked)


def join_all(handles: Sequence[ProcessHandle], deadline: float) -> None:  # by `time.monotonic`
    for handle in handles:
        handle.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def starting(method: str) -> Iterator[None]:
    """Start one process within the block, by start method `method`, and note it in the same block."""
    with reaping, _signals_held_back(method), _without_pythons_warning(method), forks.of_ours():
        yield


_PYTHON_WARNS = sys.version_info[:2] >= (3, 12)
_hiding = threading.local()  # `filters`: closed in the child too, which would inherit the filter


@contextmanager
def _without_pythons_warning(method: str) -> Iterator[None]:
    """Leave out Python's warning of forks beside threads: as an error, it would lose the child."""
    with ExitStack() as _hiding.filters:
        if method == "fork" and _PYTHON_WARNS:
            _hiding.filters.enter_context(warnings.catch_warnings())
            warnings.filterwarnings(
                "ignore", "This process .* is multi-threaded", DeprecationWarning
            )
        yield


@contextmanager
def _signals_held_back(method: str) -> Iterator[None]:
    """Hold back the signals of a terminal or a job, also from a process that starts within the block.

    The new process inherits the mask. Until it has its own handlers, Ctrl-C would end it with a
    traceback, and SIGTERM to all processes of a job would end it before this process could act on the
    signal.
    """
    if not system.SIGNAL_MASKS:
        yield
        return
    if method != "fork":
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # otherwise `start` starts it, which lifts the mask
    if method == "forkserver":
        from multiprocessing import forkserver

        forkserver.ensure_running()  # otherwise it and all its forks would inherit the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # Within the block, because pending signals' handlers run now and may raise.
        signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
