"""Zygote: a fresh process that loads the work of a stage once, and forks the workers from itself.

`fork_safety` finds the cases in which it must not fork. Each request brings two descriptors: the
worker's end of its connection, and a status socket by which the parent hears of the worker's process
and of its end. A refused request is answered by both.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import multiprocessing.popen_fork
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from hybridloader._support.torch_env import one_thread_in_this_process
from hybridloader._support.user_objects import show
from hybridloader.backends.process import fork_safety
from hybridloader.backends.process.child import FirstFrame, leave_signals, main
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.postmortem import PostmortemWriter
from hybridloader.backends.process.starters import UNKNOWN, starting
from hybridloader.backends.process.transports import SocketEndpoint
from hybridloader.engine.contract import GRACE
from hybridloader.engine.dataset_state import Change, apply
from hybridloader.engine.messages import WorkerSpec

STATUS = struct.Struct("=ii")
"""Message on a status socket: one of the kinds below, and a number."""

FORKED, ENDED, FAILED = range(3)
"""Kinds of status: a process number, sent with its pidfd; an exit code; an `errno`."""

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Request(NamedTuple):
    """One worker to be forked."""

    worker: int
    name: str  # name of its process
    slots: tuple[int, str | None]  # as `child.main` takes it
    recorded: bool | str  # as `child.FirstFrame` has it
    changes: dict[str, Any]  # fields of the specification that differ from the loaded one


class Changed(NamedTuple):
    """Plain values that attributes of the dataset were given, for workers yet to be forked."""

    changes: tuple[Change, ...]


class Loaded(NamedTuple):
    """First message to the parent: the work is loaded; `refusal` is the reason why nothing is forked, if
    any."""

    refusal: str


class Refused(NamedTuple):
    """Answer to a request that is not carried out; its descriptors go back along with it."""

    worker: int


def serve(
    connection: Any,  # its first frame is the work of the stage
    parent: int,  # process id
    first: FirstFrame,
) -> NoReturn:
    """Be the zygote until the parent hangs up, or is gone."""
    leave_signals()
    # multiprocessing forbids a daemonic process to have children; this one ends its children when the
    # parent hangs up.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        _Zygote(SocketEndpoint(connection), parent).run(first)
    except EOFError:
        os._exit(0)  # the parent needs no more workers
    except BaseException as error:
        show(error)
    finally:
        os._exit(1)


class _Zygote:
    def __init__(self, endpoint: SocketEndpoint, parent: int) -> None:
        self._endpoint, self._parent = endpoint, parent
        try:
            self._watched = os.pidfd_open(parent)
        except ProcessLookupError:
            raise EOFError("the parent has ended already") from None
        self._libc = ctypes.CDLL(None)
        self._pid = os.getpid()
        self._parent_process = multiprocessing.parent_process()
        self._poll = select.poll()
        # All the other mutable state:
        self._frames: deque[Frame] = deque()  # requests that have arrived
        self._workers: dict[int, tuple[Any, int]] = {}  # by pidfd: process and status socket
        self._refusal = ""
        self._sigchld: Any = signal.SIG_DFL  # handler for the workers
        self._postmortem: PostmortemWriter | None = None

    def run(self, first: FirstFrame) -> NoReturn:
        try:
            self._serve(self._load(first))
        except BaseException as error:
            if self._postmortem is not None:
                self._postmortem.ended_by(error)
            raise

    def _serve(self, spec: WorkerSpec) -> NoReturn:
        # A launcher that ignores the signal passes this on, and the kernel would then keep no exit
        # codes.
        self._sigchld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._endpoint.send([pickle.dumps(Loaded(self._refusal))])
        connection = self._endpoint.fileno()
        for fd in (connection, self._watched):
            self._poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._watched:
                    os._exit(1)  # the workers end, too
                elif fd == connection:
                    self._read()
                else:
                    self._poll.unregister(fd)
                    self._report_end(fd)
            while self._frames:
                self._answer(self._frames.popleft(), spec)

    def _read(self) -> None:
        try:
            self._frames.append(self._endpoint.get())
            while self._endpoint.ready:
                self._frames.append(self._endpoint.get())
        except EOFError:
            self._end_workers()

    def _load(self, first: FirstFrame) -> WorkerSpec:
        """Load the work, and find out whether this process may fork then."""
        with _ending_with(self._watched, self._endpoint.fileno()):
            one_thread_in_this_process(True)
            frame = self._endpoint.get()
            self._postmortem = first.record(frame)
            before = fork_safety.open_descriptors() - set(frame.fds)
            spec = first.load(frame)
            del frame
        self._refusal = fork_safety.refusal(before)
        gc.collect()
        gc.freeze()  # a collection in a worker would touch, and so copy, shared pages
        return spec

    def _answer(self, frame: Frame, loaded: WorkerSpec) -> None:
        request: Request | Changed = pickle.loads(frame.parts[0])
        if isinstance(request, Changed):
            apply(loaded.fetch.dataset, request.changes)
        elif self._refusal:
            self._endpoint.send([pickle.dumps(Refused(request.worker))], frame.fds)
        elif len(frame.fds) == 2:  # the kernel drops descriptors if there is no room
            self._fork(request, replace(loaded, **request.changes), *frame.fds)
            return
        for fd in frame.fds:
            os.close(fd)

    def _fork(self, request: Request, spec: WorkerSpec, connection: int, status: int) -> None:
        strays = [self._endpoint.fileno(), self._watched, status, *self._workers]
        strays += [status for _, status in self._workers.values()]
        strays += [fd for frame in self._frames for fd in frame.fds]
        process = _Process(
            target=self._work,
            args=(request, spec, connection, strays),
            name=request.name,
            daemon=True,
        )
        try:
            with starting("fork"):
                process.start()
            _report(status, FORKED, process.pid or 0, process.sentinel)
        except OSError as error:  # no further process or descriptor
            _report(status, FAILED, error.errno or 0)
            os.close(status)
            return
        finally:
            os.close(connection)
        self._workers[process.sentinel] = process, status
        self._poll.register(process.sentinel, select.POLLIN)

    def _work(self, request: Request, spec: WorkerSpec, connection: int, strays: list[int]) -> None:
        """Run one worker, in the process that was forked for it."""
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # so that it ends with the zygote
        if os.getppid() != self._pid:
            os._exit(1)  # the zygote had ended before
        # The parent is the user's process, as in a fresh worker.
        multiprocessing.process._parent_process = self._parent_process  # type: ignore[attr-defined]
        if self._sigchld is not None:  # None: the handler was not Python's
            signal.signal(signal.SIGCHLD, self._sigchld)
        if self._postmortem is not None:
            self._postmortem.close()
        main(
            request.worker,
            SocketEndpoint,
            Connection(connection),
            FirstFrame(request.recorded, spec),
            self._parent,
            request.slots,
            strays,
            fresh=True,
        )

    def _report_end(self, pidfd: int) -> None:
        process, status = self._workers.pop(pidfd)
        process.join()
        code = process.exitcode  # None if other code in this process has waited for it
        _report(status, ENDED, UNKNOWN if code is None else code)
        os.close(status)
        process.close()

    def _end_workers(self) -> NoReturn:
        """End: the parent has hung up, on all workers, too."""
        deadline = time.monotonic() + GRACE
        for process, _ in self._workers.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for pidfd, (process, _) in list(self._workers.items()):
            if process.is_alive():
                process.kill()
            self._report_end(pidfd)
        os._exit(0)


class _Process(multiprocessing.process.BaseProcess):
    _start_method = None  # the zygote's start method remains, as in a fresh worker

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


class _Popen(multiprocessing.popen_fork.Popen):
    """Fork of a process without threads. Its sentinel is a pidfd: one descriptor, not four."""

    sentinel: int

    def _launch(self, process_obj: Any) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = process_obj._bootstrap()
            finally:
                os._exit(code)
        try:
            self.sentinel = os.pidfd_open(self.pid)
        except OSError:  # no descriptor left
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        self.finalizer = multiprocessing.util.Finalize(self, os.close, (self.sentinel,))


def _report(status: int, kind: int, number: int, *fds: int) -> None:
    """Write to a status socket. Its reader may be gone."""
    with suppress(OSError), socket.socket(fileno=os.dup(status)) as sock:
        socket.send_fds(sock, [STATUS.pack(kind, number)], fds)


@contextmanager
def _ending_with(parent: int, connection: int) -> Iterator[None]:
    """End this process if the parent ends or hangs up within the block.

    A thread looks, because imports may take long. It is gone at the end of the block.
    """
    stop, stopper = os.pipe()

    def look() -> None:
        poll = select.poll()
        poll.register(parent, select.POLLIN)
        poll.register(connection, 0)  # POLLHUP is always reported
        poll.register(stop, 0)
        if all(fd != stop for fd, _ in poll.poll()):
            os._exit(1)

    thread = threading.Thread(target=look, name="hybridloader-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(stopper)  # the other end hangs up
        thread.join()
        os.close(stop)
