"""Watch of a worker process on its parent: it leaves signals to it, and ends when it is gone.

It does not depend on tasks; it only cancels the current work of the worker.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hybridloader._support import system
from hybridloader.engine.fetcher import TaskContext

_GRACE = 1.0
"""Seconds that a worker gets to end by itself after the parent's end."""

LEFT_TO_PARENT = system.signals("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
"""Signals to all processes of a terminal (Ctrl-C) or of a job (Slurm, torchrun, Kubernetes).

On a job's signal the trainer writes a checkpoint, for which it may need more batches. So a worker
ignores them. It ends when its connection ends, or by SIGKILL. SIGUSR1 and SIGUSR2 are those that Slurm
sends before a time limit (``--signal=USR1@90``): Lightning and submitit requeue the job in a handler,
which a forked worker has inherited.
"""


def _leave_to_parent(*_: object) -> None:
    """Do nothing, as a handler: programs that the dataset starts would inherit SIG_IGN."""


def leave_signals() -> None:
    """Leave some signals to the parent, and do not run its handlers here."""
    if threading.current_thread() is not threading.main_thread():
        return
    for signum in LEFT_TO_PARENT:
        signal.signal(signum, _leave_to_parent)
    system.at_fork(after_in_child=_be_terminable)
    signal.set_wakeup_fd(-1)
    if system.SIGNAL_MASKS:  # the parent has blocked them until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENT)


def _be_terminable() -> None:
    """Let SIGTERM end a fork that the user's own code made in a worker, as it ends others."""
    if signal.getsignal(signal.SIGTERM) is _leave_to_parent:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class ParentWatch:
    """Watches the parent and the connection from a thread.

    When the iterator is closed the rest of a batch is left out; when the parent is gone the process
    ends, whatever it is doing. `multiprocessing.parent_process().sentinel` would not do: it is None
    under loky.
    """

    def __init__(
        self,
        endpoint: Any,
        parent: int,  # process id
        sweep: Callable[[], None],  # called before the process ends because the parent has ended
    ) -> None:
        self.context = TaskContext()
        self._sweep = sweep
        self._changing = threading.Lock()
        args = endpoint.fileno(), parent
        name = "hybridloader-parent-watch"
        threading.Thread(target=self._watch, args=args, name=name, daemon=True).start()

    def change(self, context: TaskContext) -> None:
        """Cancel `context` from now on; cancel it at once if the one before was."""
        with self._changing:
            context.cancelled, self.context = self.context.cancelled, context

    def _watch(self, connection: int | None, parent: int) -> None:
        if connection is None or not system.PIDFD:
            self._watch_without_pidfd(parent)
            return
        try:
            pidfd = os.pidfd_open(parent)
        except ProcessLookupError:
            os._exit(1)  # the parent has ended already
        except OSError:  # a kernel before 5.3, or a sandbox that forbids it
            self._watch_without_pidfd(parent)
            return
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(connection, 0)  # POLLHUP is always reported
        while True:
            for fd, _ in poll.poll():
                if fd == pidfd:
                    self._end()
                with self._changing:
                    self.context.cancelled = True
                poll.unregister(connection)

    def _watch_without_pidfd(self, parent: int) -> None:
        system.await_end(parent)
        self._end()

    def _end(self) -> NoReturn:
        """Let the worker close its sources, and end the process in any case."""
        with self._changing:
            self.context.cancelled = True
        # In this time the worker reads the end of its stream and ends the process.
        time.sleep(_GRACE)
        self._sweep()
        os._exit(1)
