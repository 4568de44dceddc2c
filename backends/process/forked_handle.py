"""Handle of a worker that a zygote forks: by its pidfd, and by what the zygote tells of it."""

from __future__ import annotations

import array
import errno
import multiprocessing.connection
import os
import signal
import socket
import time
import weakref

from hybridloader.backends.process import handles
from hybridloader.backends.process.handles import ProcessHandle
from hybridloader.backends.process.socket_transport import CLOSE_ON_EXEC, ROOM
from hybridloader.backends.process.zygote import ENDED, FORKED, STATUS
from hybridloader.engine.contract import GRACE, SLICE
from hybridloader.memory.descriptors import ours


class ForkedHandle(ProcessHandle):
    """Handle of a worker that was asked for, is forked, or has ended."""

    def __init__(
        self,
        zygote: ProcessHandle,  # the process that forks it
        status: socket.socket,  # on which that process tells of it; owned by the handle
    ) -> None:
        self._zygote = zygote
        status.setblocking(False)
        self._status = status.detach()  # a socket object would warn at exit that it is open
        # All the mutable state:
        self.pidfd: int | None = None  # once it is forked, until `release`
        self._pid: int | None = None
        self._failure = ""  # why it could not be started
        self._ended = self._terminated = False
        self._code: int | None = None
        ours.add(self._status)
        # Not at `release`: as that of `multiprocessing.Process`, the sentinel outlives the worker.
        weakref.finalize(self, handles.close_ours, self._status).atexit = False

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
        return f"process {self._zygote.pid}"  # the zygote, which reports the codes of all others

    def told_end(self) -> bool:
        return not self.is_alive()

    def is_alive(self) -> bool:
        with handles.reaping:
            while not self._ended:
                status = socket.socket(fileno=self._status)
                try:
                    data, extra, _, _ = status.recvmsg(STATUS.size, ROOM, CLOSE_ON_EXEC)
                except BlockingIOError:
                    return True
                except OSError:  # the other end was closed with something unread
                    data, extra = b"", []
                finally:
                    status.detach()
                self._take_in(data, [fd for _, _, body in extra for fd in array.array("i", body)])
            return False

    def _take_in(self, data: bytes, fds: list[int]) -> None:
        if not data:  # the zygote is gone, and the kernel ends those that it has forked
            self._ended = True
            if self.pidfd is not None:
                multiprocessing.connection.wait([self.pidfd], GRACE)
            return
        kind, number = STATUS.unpack(data)
        if kind == FORKED:
            self._pid = number
            for self.pidfd in fds:  # none, if this process may have no more descriptors
                ours.add(self.pidfd)
                self._releasing = weakref.finalize(self, handles.close_ours, self.pidfd)
                self._releasing.atexit = False
        elif kind == ENDED:
            self._code, self._ended = number, True
        else:
            self.failed(f"could not be forked: {os.strerror(number)}")

    def failed(self, why: str) -> None:  # to start
        self._failure, self._ended = why, True

    def send_signal(self, signum: int) -> None:
        with handles.reaping:
            if not self.is_alive() or self.pidfd is None:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            signal.pidfd_send_signal(self.pidfd, signum)

    def kill(self) -> None:
        if self.is_alive() and self.pidfd is None:
            self._zygote.kill()  # it would fork it yet
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
        with handles.reaping:
            if self._ended:
                return
            try:
                status = os.dup(self._status)  # another thread may release the original
            except OSError:  # no descriptor left: as long as news may take
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
                "was not forked: the process that forks the workers can't have more descriptors; raise "
                "the limit (ulimit -n)"
            )
        how = "was not forked by" if self._pid is None else "ended with"
        return f"{how} the process that forks the workers, which {self._zygote.cause()}"
