"""Main function of a worker process, its end of the connection, and its watch on the parent.

It imports no torch by itself.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import spawn
from queue import Queue, SimpleQueue
from typing import Any, NamedTuple, NoReturn

from hybridloader._support import system
from hybridloader._support.inheritance import Inherited
from hybridloader._support.torch_env import one_thread_in_this_process, when_imported
from hybridloader._support.user_objects import Failure, show
from hybridloader.backends.process import frames
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.postmortem import PostmortemWriter
from hybridloader.engine.messages import Done, Event, Failed, Message, Task, TaskContext, WorkerSpec
from hybridloader.engine.serving import Pickled, received
from hybridloader.engine.worker import Worker, run, set_process_info
from hybridloader.fetching.collate import teach_torch
from hybridloader.memory.shared_slots import SlotReader, SlotWriter, limits_of
from hybridloader.memory.slots import set_slots
from hybridloader.seeding.worker_seeds import ProcessSeeds

_LARGE = 64 * 1024
"""Bytes of a frame from which a separate thread writes it: it may not fit into the socket, and the
worker should make the next batch in the meantime."""


class FirstFrame(NamedTuple):
    """Content of the first frame of the connection: work, and a postmortem record if `recorded`."""

    recorded: bool | str  # its last descriptor is that of the record; or the path of the record
    # The work, if this process has it; then that in the frame is dropped.
    loaded: WorkerSpec | None = None
    inherited: Inherited | None = None  # objects that can be sent only when the process starts
    # The script whose top this process runs before it loads, for `multiprocessing.spawn.prepare`.
    script: dict[str, str] | None = None

    def record(self, frame: Frame) -> PostmortemWriter | None:
        if isinstance(self.recorded, str):
            return PostmortemWriter.open(self.recorded)
        # The kernel drops descriptors if there is no room.
        return PostmortemWriter.open(frame.fds.pop()) if self.recorded and frame.fds else None

    def load(self, frame: Frame) -> WorkerSpec:
        """Return the work, and close the descriptors of `frame`."""
        if self.loaded is None:
            current: Any = multiprocessing.current_process()
            current._inheriting = True  # until it is deleted, this process may start no others
            try:
                if self.script is not None:
                    # As ``__mp_main__``, as multiprocessing runs it in processes it spawns. A start
                    # method of the standard library, not loky's, as the script may make locks by it.
                    spawn.prepare({**self.script, "start_method": "forkserver"})
                spec = received(frame.parts, frame.fds, self.inherited)
            finally:
                del current._inheriting
            if "torch" in sys.modules:  # as torch, which sets it last
                one_thread_in_this_process(False)
            return spec
        for fd in frame.fds:
            os.close(fd)
        return self.loaded


def main(
    number: int,  # number of the worker
    endpoint_class: Any,  # class of the worker's end of the connection
    pipe: Any,  # argument of `endpoint_class`
    first: FirstFrame,
    parent: int,  # process id
    share: int,  # most bytes of this worker's slots, both ways
    strays: Sequence[int],  # descriptors of the parent that the fork copied
    fresh: bool,  # the process is no fork of the user's process
) -> None:
    """Run one worker until it gets a `Stop` or the parent is gone."""
    # A collection would touch, and so copy, all pages that the fork shares. Garbage of the parent would
    # also close descriptors whose numbers are in use for others by then.
    gc.freeze()
    for fd in strays:
        with suppress(OSError):
            os.close(fd)
    leave_signals()
    endpoint = endpoint_class(pipe)
    connection = _WorkerConnection(number, endpoint, share)
    watch = ParentWatch(endpoint, parent)
    postmortem = None
    try:
        frame = endpoint.get()
        connection.postmortem = postmortem = first.record(frame)
        one_thread_in_this_process(fresh)
        set_slots(connection.results)
        when_imported("torch", teach_torch)
        spec = first.load(frame)
        del frame
        if postmortem is not None and spec.tracked:
            watch.change(postmortem.context())
        worker = Worker(number, spec, ProcessSeeds(), Pickled, watch.context)
        set_process_info(worker.info)
        listen = partial(connection.read_ahead, worker.wake if worker.wakes else None)
        run(worker, connection.get, connection.report, listen)
        connection.finish()
    except EOFError:
        pass
    except BaseException as error:
        if postmortem is not None:
            postmortem.ended_by(error)
        raise
    finally:
        endpoint.close()
    if fresh:
        _leave()


def _leave() -> None:
    """End a fresh process as multiprocessing ends a forked one: without taking Python apart.

    Taking torch apart would take another 0.4 s, which the end of every epoch would wait for, and now
    and then ends in "terminate called without an active exception".
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # None, broken or closed
            stream.flush()
    os._exit(0)


def _read(endpoint: Any, arrived: SimpleQueue[Any], wake: Callable[[], None] | None = None) -> None:
    """Pass frames on until there are no more; the last is the error that ended them.

    `wake` is called after each.
    """
    last = False
    while not last:
        try:
            arrived.put(endpoint.get())
        except BaseException as error:
            arrived.put(error)
            last = True
        if wake is not None:
            wake()


class _WorkerConnection:
    """The worker's side of its connection: messages in, events out, large buffers through slots."""

    def __init__(self, worker: int, endpoint: Any, share: int) -> None:
        self._worker = worker
        self._endpoint = endpoint
        results, tasks = limits_of(share)
        self.results = SlotWriter(results)
        self._tasks = SlotReader(2 * tasks // 3)
        self.postmortem: PostmortemWriter | None = None
        # Unanswered tasks; before `read_ahead`, the latest one.
        self._asked: deque[int] = deque()
        self._arrived: SimpleQueue[Frame | BaseException | None] | None = None
        self._complained = False  # the parent knows that tasks are copied, as too many are kept
        self._outgoing: Queue[tuple[list[Any], Sequence[int]]] = Queue()
        self._writer: threading.Thread | None = None

    def read_ahead(self, wake: Callable[[], None] | None = None) -> Callable[[], None]:
        """Read frames on a thread from now on; return a function that has `get` return None, from any
        thread.

        The thread calls `wake` after each frame.
        """
        self._arrived = SimpleQueue()
        args = self._endpoint, self._arrived, wake
        threading.Thread(target=_read, args=args, name="hybridloader-reader", daemon=True).start()
        return partial(self._arrived.put, None)

    def get(self) -> Message | None:
        """Wait for the next message; None if a thread of this worker asks for that.

        Raises `EOFError` when the parent has hung up.
        """
        while True:
            frame = self._endpoint.get() if self._arrived is None else self._arrived.get()
            if frame is None:
                return None
            if isinstance(frame, BaseException):
                raise frame
            try:
                message, returned = frames.decode_message(frame.parts, self._tasks, frame.fds)
            except frames.Unreadable as lost:
                self.results.release(lost.returned)
                self.report(Failed(self._worker, lost.seq, Failure(lost.error)))
                continue
            if returned:
                self.results.release(returned)
            if self.postmortem is not None and isinstance(message, Task):
                if self._arrived is None:
                    self._asked.clear()
                self._asked.append(message.seq)
                if len(self._asked) == 1:
                    self.postmortem.begin(message.seq)
            return message

    def report(self, event: Event) -> None:
        """Write an event, now or from the writer's thread."""
        returned, refusal = self._tasks.returned(), None
        if self._tasks.overflow is not None and not self._complained and isinstance(event, Done):
            self._complained = True
            refusal = f"in worker {self._worker}, {self._tasks.overflow}"
        parts, fds = frames.encode_event(event, returned, self.results, refusal)
        self._write(parts, fds)
        if self.postmortem is not None:
            asked = self._asked
            if asked and asked[0] == getattr(event, "seq", None):
                asked.popleft()
            if asked:
                self.postmortem.begin(asked[0])
            else:
                self.postmortem.end()

    def finish(self) -> None:
        """Wait until everything is written."""
        self._outgoing.join()

    def _write(self, parts: list[Any], fds: Sequence[int]) -> None:
        size = len(parts[0]) if len(parts) == 1 else sum(memoryview(p).nbytes for p in parts)
        if not self._outgoing.unfinished_tasks and size < _LARGE:  # only this thread adds to them
            self._put(parts, fds)
            return
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_queued, daemon=True)
            self._writer.start()
        self._outgoing.put((parts, fds))

    def _write_queued(self) -> None:
        while True:
            item = self._outgoing.get()
            try:
                self._put(*item)
            except EOFError:
                pass  # the worker's next read or direct write raises it
            except BaseException as error:
                if self.postmortem is not None:
                    self.postmortem.ended_by(error)
                show(error)  # a result is lost, and the parent would wait for it forever
                os._exit(1)
            del item
            self._outgoing.task_done()

    def _put(self, parts: list[Any], fds: Sequence[int]) -> None:
        self._endpoint.send(parts, fds)
        for fd in fds:
            os.close(fd)


# -- the watch on the parent: a worker leaves signals to it, and ends when it is gone

_GRACE = 1.0  # seconds that a worker gets to end by itself after the parent's end

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
    ) -> None:
        self.context = TaskContext()
        self._changing = threading.Lock()
        args = endpoint.fileno(), parent
        name = "hybridloader-parent-watch"
        threading.Thread(target=self._watch, args=args, name=name, daemon=True).start()

    def change(self, context: TaskContext) -> None:
        """Cancel `context` from now on; cancel it at once if the one before was."""
        with self._changing:
            context.cancelled, self.context = self.context.cancelled, context

    def _watch(self, connection: int | None, parent: int) -> None:
        pidfd = None
        if connection is not None and system.PIDFD:
            try:
                pidfd = os.pidfd_open(parent)
            except ProcessLookupError:
                os._exit(1)  # the parent has ended already
            except OSError:  # a kernel before 5.3, or a sandbox that forbids it
                pass
        if pidfd is None or connection is None:
            system.await_end(parent)
            self._end()
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

    def _end(self) -> NoReturn:
        """Let the worker close its sources, and end the process in any case."""
        with self._changing:
            self.context.cancelled = True
        # In this time the worker reads the end of its stream and ends the process.
        time.sleep(_GRACE)
        os._exit(1)
