"""Handle of a worker that a zygote forks: by its pidfd, and by what the zygote tells of it."""

from __future__ import annotations

import errno
import multiprocessing.connection
import os
import signal
import socket
import time
import weakref

from hybridloader.backends.process import handles
from hybridloader.backends.process.handles import GRACE, ProcessHandle
from hybridloader.backends.process.zygote import ENDED, FORKED, STATUS
from hybridloader.memory.descriptors import ours


class ForkedHandle(ProcessHandle):
    """Handle of a worker that was asked for, is forked, or has ended.

    Parameters
    ----------
    zygote
        Handle of the process that forks it.
    status
        Socket on which that process tells of it; owned by the handle.
    """

    def __init__(self, zygote: ProcessHandle, status: socket.socket) -> None:
        self._zygote, self._status = zygote, status
        status.setblocking(False)
        # All the mutable state:
        self.pidfd: int | None = None  # once it is forked, until `release`
        self._pid: int | None = None
        self._failure = ""  # why it could not be started
        self._ended = self._terminated = False
        self._code: int | None = None
        ours.add(status.fileno())
        self._releasing = weakref.finalize(self, _close_status, status, status.fileno())
        self._releasing.atexit = False

    @property
    def pid(self) -> int | None:
        self.is_alive()
        return self._pid

    @property
    def sentinel(self) -> int:
        return self._status.fileno()

    def told_end(self) -> bool:
        return not self.is_alive()

    def is_alive(self) -> bool:
        with handles.reaping:
            while not self._ended:
                try:
                    data, fds, _, _ = socket.recv_fds(
                        self._status, STATUS.size, 1, socket.MSG_CMSG_CLOEXEC
                    )
                except BlockingIOError:
                    return True
                except OSError:
                    data, fds = b"", []
                self._take_in(data, fds)
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
                self._closing = weakref.finalize(self, handles.close_pidfd, self.pidfd)
                self._closing.atexit = False
        elif kind == ENDED:
            self._code, self._ended = number, True
        else:
            self.failed(f"could not be forked: {os.strerror(number)}")

    def failed(self, why: str) -> None:
        """Note that the worker was not started."""
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
        while True:
            with handles.reaping:
                if not self.is_alive():
                    return
                status = os.dup(self._status.fileno())  # another thread may release the original
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                told = multiprocessing.connection.wait([status], left)
            finally:
                os.close(status)
            if not told:
                return

    def disown(self) -> None:
        """Do nothing: the workers are the zygote's children, and that is disowned itself."""

    def release(self) -> None:
        """Close the descriptors once the worker has ended; nobody may wait by them any more."""
        with handles.reaping:
            if self.is_alive():
                handles.dying.add(self)
                return
            handles.dying.discard(self)
            self._releasing()
            if self.pidfd is not None:
                self._closing()
                self.pidfd = None

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


def _close_status(status: socket.socket, fd: int) -> None:
    ours.discard(fd)
    status.close()
