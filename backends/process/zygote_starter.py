"""Start of workers by a zygote, a fresh process that has loaded the work and forks them.

This is the parent's side. The zygote's connection is one more of the crew's transport, under the number
`ZYGOTE`. So a request never blocks, and answers and the end of the zygote are noticed as those of a
worker are. Windows can't import this module.
"""

from __future__ import annotations

import array
import errno
import functools
import multiprocessing.connection
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any

from hybridloader._support.text import warn_once
from hybridloader.backends.process import starters
from hybridloader.backends.process.child import FirstFrame
from hybridloader.backends.process.first_step import FirstStep
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.postmortem import PostmortemRecord
from hybridloader.backends.process.starters import (
    ZYGOTE,
    ProcessHandle,
    Starter,
    Transport,
    WorkerStart,
    duplicates,
    starting,
)
from hybridloader.backends.process.transports import CLOSE_ON_EXEC, ROOM
from hybridloader.backends.process.zygote import (
    ENDED,
    FORKED,
    STATUS,
    Changed,
    Loaded,
    Refused,
    Request,
    serve,
)
from hybridloader.engine.contract import GRACE, SLICE
from hybridloader.engine.dataset_state import Change, plain
from hybridloader.engine.messages import WorkerSpec
from hybridloader.memory.shipping import Shipment


class _Zygote:
    def __init__(self, spec: WorkerSpec, record: PostmortemRecord | None) -> None:
        self.record = record
        # All the mutable state:
        self.handle: ProcessHandle | None = None  # once it is started
        # The work that it loads; None once the dataset has changed.
        self.spec: WorkerSpec | None = spec
        self.loaded = False
        # Requests until it has loaded.
        self.asked: dict[int, tuple[WorkerStart, ForkedHandle]] = {}

    @property
    def alive(self) -> bool:
        return self.handle is not None and self.handle.is_alive()

    def serves(self, spec: WorkerSpec) -> bool:
        """True if it has, or will have, the work of `spec`."""
        had = self.spec
        return had is not None and spec.fetch is had.fetch and spec.init_fn is had.init_fn

    def close(self) -> None:
        if self.handle is not None:
            self.handle.join(GRACE)
            self.handle.kill()
            self.handle.join(GRACE)
            self.handle.release()
        if self.record is not None:
            self.record.close()


class ZygoteStarter(Starter):
    """Starter that has one fresh process, which has loaded the work, fork the workers, if it can.

    If that process ends, so do its workers, and the next start begins another.
    """

    def __init__(self, transport: Transport, *, runs_script: bool) -> None:
        """Take a transport that carries descriptors."""
        super().__init__("loky", transport, runs_script=runs_script)
        # All the other mutable state:
        self._zygote: _Zygote | None = None
        self._refused = False

    def _shipment(self, spec: WorkerSpec) -> Shipment | None:
        zygote = self._zygote
        if zygote is not None and zygote.loaded and zygote.alive and zygote.serves(spec):
            return None
        return super()._shipment(spec)

    def _launch(self, start: WorkerStart, connection: Any) -> None:
        zygote = self._zygote
        ended = zygote is None or not zygote.alive
        if ended and not self._refused and start.worker in self._shipments:
            zygote = self._begin(start.spec, self._shipments[start.worker][1])
        if (
            self._refused
            or zygote is None
            or zygote.handle is None
            or not zygote.serves(start.spec)
        ):
            super()._launch(start, connection)
            return
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        handle = ForkedHandle(zygote.handle, status)
        try:
            assert zygote.spec is not None
            request = Request(
                start.worker,
                start.name,
                start.slots,
                start.recorded,
                _changes(zygote.spec, start.spec),
            )
            message = pickle.dumps(request)
            fds = [os.dup(connection.fileno()), theirs.detach()]
            self.transport.send(ZYGOTE, [message], fds)
        finally:
            theirs.close()
        if not zygote.loaded:
            zygote.asked[start.worker] = start, handle
        start.note(handle)

    def _begin(self, spec: WorkerSpec, shipment: Shipment) -> _Zygote:
        """Start a zygote for the work of `spec`."""
        self._end()
        self._zygote = zygote = _Zygote(spec, PostmortemRecord.make())
        connection, theirs = self._context.Pipe(duplex=True)
        self.transport.drop(ZYGOTE)
        self.transport.connect(ZYGOTE, connection)
        recorded = zygote.record is not None
        first = FirstFrame(recorded, inherited=shipment.inherited, script=self._script)
        process = self._context.Process(
            target=FirstStep(serve, theirs, recorded),
            args=(theirs, os.getpid(), first),
            name=f"hybridloader-{spec.stage}-zygote",
            daemon=True,
        )
        try:
            with starting(self._method):
                process.start()
                zygote.handle = ProcessHandle(process)
        finally:
            theirs.close()
        self.transport.watch(ZYGOTE, zygote.handle)
        fds = shipment.fds if zygote.record is None else [*shipment.fds, zygote.record.fd]
        self.transport.send(ZYGOTE, shipment.parts, duplicates(fds))
        return zygote

    def hear(self, frame: Frame | None) -> Callable[[], None] | None:
        zygote = self._zygote
        if zygote is None or frame is None:
            return None
        message = pickle.loads(frame.parts[0])
        if isinstance(message, Refused):
            self._start_afresh(*zygote.asked.pop(message.worker), frame)
            if not zygote.asked:
                self.transport.drop(ZYGOTE)  # this ends the zygote
                self._end()
            return None
        assert isinstance(message, Loaded)
        if not message.refusal:
            zygote.loaded = True
            zygote.asked.clear()
            return None
        self._refused = True
        stage = None if zygote.spec is None else zygote.spec.stage
        guard = "do it below `if __name__ == '__main__':`"
        other = "set Spawn(preload=False)" if self._script is None else guard
        return functools.partial(
            warn_once,
            f"the workers of stage {stage!r} are started one by one, which takes more time and memory "
            "than forking them from one process that has loaded the dataset. It can't fork, because it "
            f"{message.refusal}. Do that in worker_init_fn or when the first sample is read, or {other}",
            "started-one-by-one",
        )

    def _start_afresh(self, start: WorkerStart, handle: ForkedHandle, frame: Frame) -> None:
        """Start a worker that the zygote has refused; `frame` brings its descriptors back."""
        handle.failed("was refused")  # now, as the zygote may close its end of the socket later
        if len(frame.fds) < 2:
            handle.failed(
                "could not be started: no descriptor is left; raise the limit (ulimit -n)"
            )
            return
        connection = Connection(frame.fds[0])
        frame.fds.pop(0)
        os.close(frame.fds.pop())
        try:
            super()._launch(start, connection)
        except Exception as error:  # for example, no further process can be started
            handle.failed(f"could not be started: {error}")
        finally:
            connection.close()

    def change(self, changes: tuple[Change, ...]) -> None:
        zygote = self._zygote
        if zygote is None:
            return
        if all(plain(value) for _, value in changes):
            self.transport.send(ZYGOTE, [pickle.dumps(Changed(changes))])
        else:  # loading other values could import modules, which may start threads
            zygote.spec = None

    def end_of(self, record: PostmortemRecord) -> tuple[str, str]:
        zygote = None if self._zygote is None else self._zygote.record
        return super().end_of(record if zygote is None or record.end()[1] else zygote)

    def stack(self) -> str:
        zygote = self._zygote
        if zygote is None or zygote.record is None or zygote.handle is None:
            return ""
        pid = zygote.handle.pid
        if pid is None:
            return ""
        stack = zygote.record.stack(pid, send=zygote.handle.send_signal)
        return (
            f"The process that will fork it has not loaded the work yet:\n{stack}" if stack else ""
        )

    def close(self) -> None:
        self._end()
        super().close()

    def _end(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()

    def disown(self) -> None:
        if self._zygote is not None and self._zygote.handle is not None:
            self._zygote.handle.disown()


def _changes(loaded: WorkerSpec, spec: WorkerSpec) -> dict[str, Any]:
    """Return the fields of `spec` that differ from those of the one that was loaded."""
    pairs = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {name: value for name, value in pairs.items() if value is not getattr(loaded, name)}


class ForkedHandle(ProcessHandle):
    """Handle of a worker that was asked for, is forked, or has ended."""

    def __init__(
        self,
        zygote: ProcessHandle,  # process that forks it
        status: socket.socket,  # on which that process reports its status; owned by the handle
    ) -> None:
        self._zygote = zygote
        status.setblocking(False)
        self._status = status.detach()  # a socket object would warn at exit that it is open
        # All the mutable state:
        self.pidfd: int | None = None  # from the fork until `release`
        self._pid: int | None = None
        self._failure = ""  # reason why it could not be started
        self._ended = self._terminated = False
        self._code: int | None = None
        # Not at `release`: the sentinel outlives the worker, as that of `multiprocessing.Process`.
        starters.held_by(self, self._status)

    @property
    def pid(self) -> int | None:
        """Process id; waits until the worker is forked. None if it never was.

        Not None before, because a caller may take that for its own process, as `psutil.Process` does.
        """
        while self.known_pid is None and self.is_alive():
            self._await_status(SLICE)
        return self._pid

    @property
    def known_pid(self) -> int | None:
        self.is_alive()
        return self._pid

    @property
    def sentinel(self) -> int:
        return self._status

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
                status = socket.socket(fileno=self._status)
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
                multiprocessing.connection.wait([self.pidfd], GRACE)
            return
        kind, number = STATUS.unpack(data)
        if kind == FORKED:
            self._pid = number
            for self.pidfd in fds:  # none, if this process has no free descriptor
                self._releasing = starters.held_by(self, self.pidfd)
        elif kind == ENDED:
            self._code, self._ended = number, True
        else:
            self.failed(f"could not be forked: {os.strerror(number)}")

    def failed(self, why: str) -> None:  # it could not be started
        self._failure, self._ended = why, True

    def send_signal(self, signum: int) -> None:
        with starters.reaping:
            if not self.is_alive() or self.pidfd is None:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            signal.pidfd_send_signal(self.pidfd, signum)

    def kill(self) -> None:
        if self.is_alive() and self.pidfd is None:
            self._zygote.kill()  # otherwise the zygote would still fork it
        super().kill()

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
            if left <= 0:
                return
            self._await_status(left)

    def _await_status(self, seconds: float) -> None:
        """Wait for news; in slices, because another thread may take in those that have come."""
        with starters.reaping:
            if self._ended:
                return
            try:
                status = os.dup(self._status)  # another thread may release the original
            except OSError:  # no descriptor left: wait as long as a report may take
                status = -1
        if status < 0:
            time.sleep(min(seconds, SLICE / 10))
            return
        try:
            multiprocessing.connection.wait([status], seconds)
        finally:
            os.close(status)

    def disown(self) -> None:
        """Do nothing: the workers are the zygote's children, and that is disowned itself."""

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
