"""Zygote: a fresh process that loads the work of a stage once, and forks the workers from itself.

`fork_safety` finds the cases in which it must not fork. Each request brings two descriptors: the
worker's end of its connection, and a status socket by which the parent hears of the worker's process
and of its end. Windows can't import this module.
"""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import multiprocessing
import multiprocessing.connection
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from hybridloader._support.text import warn_once
from hybridloader._support.torch_env import one_thread_in_this_process
from hybridloader._support.user_objects import show
from hybridloader.backends.process import fork_safety, starters
from hybridloader.backends.process.child import FirstFrame, leave_signals, main
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.postmortem import PostmortemRecord, PostmortemWriter
from hybridloader.backends.process.starters import (
    UNKNOWN,
    ZYGOTE,
    ProcessHandle,
    Starter,
    Transport,
    WorkerStart,
    duplicates,
    starting,
)
from hybridloader.backends.process.transports import CLOSE_ON_EXEC, ROOM, SocketEndpoint
from hybridloader.engine.contract import GRACE, SLICE
from hybridloader.engine.messages import WorkerSpec
from hybridloader.memory.shared_slots import OwnDescriptor
from hybridloader.memory.shipping import Shipment

STATUS = struct.Struct("=ii")  # message on a status socket: one of the kinds below, and a number

FORKED, ENDED, FAILED = range(3)
"""Kinds of status: a process number, sent with its pidfd; an exit code; an `errno`."""

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Request(NamedTuple):
    """One worker to be forked."""

    worker: int
    name: str  # name of its process
    share: int  # as `child.main` takes it
    recorded: bool | str  # as `child.FirstFrame` has it
    changes: dict[str, Any]  # fields of the specification that differ from the loaded one


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
        refusal = fork_safety.refusal(before)
        self._endpoint.send([pickle.dumps(refusal)])  # the one message to the parent
        while refusal:  # until the parent hangs up: this end would be taken for that of its workers
            self._endpoint.get()
        gc.collect()
        gc.freeze()  # a collection in a worker would touch, and so copy, shared pages
        return spec

    def _answer(self, frame: Frame, loaded: WorkerSpec) -> None:
        request: Request = pickle.loads(frame.parts[0])
        if len(frame.fds) == 2:
            self._fork(request, replace(loaded, **request.changes), *frame.fds)
            return
        for fd in frame.fds:  # the kernel drops descriptors if there is no room
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
            request.share,
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


# -- the parent's side
#
# The zygote's connection is one more of the crew's transport, under the number `ZYGOTE`. So a request
# never blocks, and answers and the end of the zygote are noticed as those of a worker are.


class _StartedZygote:
    def __init__(
        self, spec: WorkerSpec, record: PostmortemRecord | None, handle: ProcessHandle
    ) -> None:
        self.record, self.handle = record, handle
        # All the mutable state:
        # The work that it loads; None once the dataset has changed.
        self.spec: WorkerSpec | None = spec
        self.loaded = False
        # Requests until it has loaded, each with a copy of the worker's end of its connection.
        self.asked: list[tuple[WorkerStart, ForkedHandle, Connection]] = []

    def serves(self, spec: WorkerSpec) -> bool:
        """True if it has, or will have, the work of `spec`."""
        had = self.spec
        return had is not None and spec.fetch is had.fetch and spec.init_fn is had.init_fn


class ZygoteStarter(Starter):
    """Starter that has one fresh process, which has loaded the work, fork the workers, if it can.

    If that process ends, so do its workers, and the next start begins another.
    """

    def __init__(self, transport: Transport, *, runs_script: bool) -> None:
        """Take a transport that carries descriptors."""
        super().__init__("loky", transport, runs_script=runs_script)
        # All the other mutable state:
        self._zygote: _StartedZygote | None = None
        self._refused = False

    @property
    def _alive(self) -> bool:
        return self._zygote is not None and self._zygote.handle.is_alive()

    def _shipment(self, spec: WorkerSpec) -> Shipment | None:
        zygote = self._zygote
        if zygote is None or not (zygote.loaded and self._alive and zygote.serves(spec)):
            return super()._shipment(spec)
        return None

    def _launch(self, start: WorkerStart, connection: Any) -> None:
        zygote = self._zygote
        if not (self._alive or self._refused) and start.worker in self._shipments:
            zygote = self._begin(start.spec, self._shipments[start.worker][1])
        if self._refused or zygote is None or not zygote.serves(start.spec):
            super()._launch(start, connection)
            return
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        handle = ForkedHandle(zygote.handle, status)
        try:
            pairs = {field.name: getattr(start.spec, field.name) for field in fields(start.spec)}
            changes = {k: v for k, v in pairs.items() if v is not getattr(zygote.spec, k)}
            request = Request(start.worker, start.name, start.share, start.recorded, changes)
            message = pickle.dumps(request)
            fds = [os.dup(connection.fileno()), theirs.detach()]
            self.transport.send(ZYGOTE, [message], fds)
        finally:
            theirs.close()
        if not zygote.loaded:
            zygote.asked.append((start, handle, Connection(os.dup(connection.fileno()))))
        start.note(handle)

    def _begin(self, spec: WorkerSpec, shipment: Shipment) -> _StartedZygote:
        """Start a zygote for the work of `spec`."""
        self._end()
        connection, theirs = self._context.Pipe(duplex=True)
        self.transport.drop(ZYGOTE)
        self.transport.connect(ZYGOTE, connection)
        record = PostmortemRecord.make()
        recorded = record is not None
        first = FirstFrame(recorded, inherited=shipment.inherited, script=self._script)
        process = self._context.Process(
            target=serve,
            args=(theirs, os.getpid(), first),
            name=f"hybridloader-{spec.stage}-zygote",
            daemon=True,
        )
        try:
            with starting(self._method):
                process.start()
                self._zygote = zygote = _StartedZygote(spec, record, ProcessHandle(process))
        finally:
            theirs.close()
            if self._zygote is None and record is not None:
                record.close()
        self.transport.watch(ZYGOTE, zygote.handle)
        fds = shipment.fds if record is None else [*shipment.fds, record.fd]
        self.transport.send(ZYGOTE, shipment.parts, duplicates(fds))
        return zygote

    def hear(self, frame: Frame | None) -> Callable[[], None] | None:
        zygote = self._zygote
        if zygote is None or frame is None:
            return None
        refusal: str = pickle.loads(frame.parts[0])  # why it forks nothing, or an empty text
        zygote.loaded, asked = True, zygote.asked
        if not refusal:
            asked.clear()
            return None
        self._refused = True
        for start, handle, connection in asked:
            handle.failed("was refused")
            try:
                super()._launch(start, connection)
            except Exception as error:  # for example, no further process can be started
                handle.failed(f"could not be started: {error}")
        self.transport.drop(ZYGOTE)
        self._end()
        stage = None if zygote.spec is None else zygote.spec.stage
        guard = "do it below `if __name__ == '__main__':`"
        other = "set Spawn(preload=False)" if self._script is None else guard
        return functools.partial(
            warn_once,
            f"the workers of stage {stage!r} are started one by one, which takes more time and memory "
            "than forking them from one process that has loaded the dataset. It can't fork, because it "
            f"{refusal}. Do that in worker_init_fn or when the first sample is read, or {other}",
            "started-one-by-one",
        )

    def dataset_changed(self) -> None:
        if self._zygote is not None:
            self._zygote.spec = None

    def end_of(self, record: PostmortemRecord) -> tuple[str, str]:
        zygote = None if self._zygote is None else self._zygote.record
        return super().end_of(record if zygote is None or record.end()[1] else zygote)

    def stack(self) -> str:
        zygote = self._zygote
        if zygote is None or zygote.record is None:
            return ""
        stack, _ = zygote.record.stack(zygote.handle.pid or 0, zygote.handle.send_signal)
        return stack and f"The process that will fork it has not loaded the work yet:\n{stack}"

    def close(self) -> None:
        self._end()
        super().close()

    def _end(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            if zygote.loaded:  # it ends once its workers have
                zygote.handle.join(GRACE)
            zygote.handle.kill()
            zygote.handle.join(GRACE)
            zygote.handle.release()
            if zygote.record is not None:
                zygote.record.close()


class ForkedHandle(ProcessHandle):
    """Handle of a worker that was asked for, is forked, or has ended."""

    def __init__(
        self,
        zygote: ProcessHandle,  # process that forks it
        status: socket.socket,  # on which that process reports its status; owned by the handle
    ) -> None:
        self._zygote = zygote
        status.setblocking(False)
        # Not closed by `release`: the sentinel outlives the worker, as that of multiprocessing. A socket
        # object would warn at exit that it is open.
        self._status = OwnDescriptor(status.detach())
        # All the other mutable state; there is a pidfd from the fork on:
        self._pid: int | None = None
        self._failure = ""  # reason why it could not be started

    @property
    def pid(self) -> int | None:
        """Process id; waits until the worker is forked. None if it never was.

        Not None before, because a caller may take that for its own process, as `psutil.Process` does.
        """
        while self.known_pid is None and self.is_alive():
            self._await_end(SLICE)
        return self._pid

    @property
    def known_pid(self) -> int | None:
        self.is_alive()
        return self._pid

    @property
    def sentinel(self) -> int:
        return self._status.fileno()

    @property
    def ended_with(self) -> str | None:
        if self.is_alive() or self._code is not None or self._failure:
            return None
        # The zygote, which reports the exit codes of all others.
        return f"process {self._zygote.pid}"

    def end_reported(self) -> bool:
        return not self.is_alive()

    def is_alive(self) -> bool:
        with starters.reaping:
            while not self._ended:
                status = socket.socket(fileno=self._status.fileno())
                try:
                    data, extra, _, _ = status.recvmsg(STATUS.size, ROOM, CLOSE_ON_EXEC)
                except BlockingIOError:
                    return True
                except OSError:  # the other end was closed with unread data
                    data, extra = b"", []
                finally:
                    status.detach()
                self._take_in(data, [fd for _, _, body in extra for fd in array.array("i", body)])
            return False

    def _take_in(self, data: bytes, fds: list[int]) -> None:
        if not data:  # the zygote has ended, and the kernel ends its forks
            self._ended = True
            if self.pidfd is not None:
                multiprocessing.connection.wait([self.pidfd.fileno()], GRACE)
            return
        kind, number = STATUS.unpack(data)
        if kind == FORKED:
            self._pid = number
            for fd in fds:  # none, if this process has no free descriptor
                self.pidfd = OwnDescriptor(fd)
        elif kind == ENDED:
            self._code, self._ended = number, True
        else:
            self.failed(f"could not be forked: {os.strerror(number)}")

    def failed(self, why: str) -> None:  # it could not be started
        self._failure, self._ended = why, True

    def kill(self) -> None:
        if self.is_alive() and self.pidfd is None:
            self._zygote.kill()  # otherwise the zygote would still fork it
        super().kill()

    def _await_end(self, seconds: float) -> None:
        if not self._ended:
            multiprocessing.connection.wait([self._status.fileno()], seconds)

    def unknown(self) -> str:
        if self._failure:
            return self._failure
        self._zygote.join(GRACE)
        if self._zygote.is_alive():
            return (
                "was not forked, because the process that forks the workers has no free descriptor; "
                "raise the limit (ulimit -n)"
            )
        how = "was not forked by" if self._pid is None else "ended with"
        return f"{how} the process that forks the workers, which {self._zygote.cause()}"
