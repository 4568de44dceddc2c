"""Workers that are processes: the parent's side, whatever the way they were started.

`fork`, `spawn` and `shared-memory` differ only by the multiprocessing context that starts the
process and by whether large buffers come back through slots or in the stream.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hybridloader import arena
from hybridloader.backends.child import main
from hybridloader.backends.frames import Frame
from hybridloader.backends.portable import PortableChannel, PortablePost
from hybridloader.backends.sockets import SocketChannel, SocketPost, parent_ends
from hybridloader.contract import Crew, WorkerHandle
from hybridloader.errors import BackendUnavailable
from hybridloader.messages import (
    Done,
    Event,
    Exhausted,
    Exited,
    Failed,
    Message,
    Ready,
    Stop,
    WorkerSpec,
)
from hybridloader.packing import pack, unpack
from hybridloader.shipping import Shipment, ship

_GRACE = 1.0
"""Seconds that a worker gets to finish its sample before it is terminated, then killed."""


def check_children_allowed(name: str) -> None:
    """Refuse in a daemonic process, which may not have children (multiprocessing forbids it)."""
    if multiprocessing.current_process().daemon:
        raise BackendUnavailable(
            f"backend {name!r} can't serve inside a daemonic process, such as another loader's "
            "worker: it may not have children. Use backend='threads' or num_workers=0 there."
        )


_crews: weakref.WeakSet[ProcessCrew] = weakref.WeakSet()


def _disown() -> None:
    """In a fork that the user's own code made: the workers are the parent's.

    multiprocessing would terminate them when the fork exits, and then fail to join them.
    """
    for crew in list(_crews):
        crew.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


@contextmanager
def _interrupts_held_back(forks: bool) -> Iterator[None]:
    """Hold Ctrl-C back, from a process that starts within the block too: it inherits the mask.

    Until that has its own handler, Ctrl-C would end it with a traceback of its own.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if not forks:
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # else `start` does it, and that lifts the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Payload:
    """A batch that came from a process: loaded when its turn comes."""

    def __init__(
        self, header: memoryview, buffers: list[memoryview], slots: arena.Reader, place: Any
    ) -> None:
        self._header, self._buffers, self._slots, self._place = header, buffers, slots, place

    def open(self) -> Any:
        if self._place is None:
            return unpack(self._header, self._buffers)
        return unpack(self._header, self._slots.buffers(self._place))

    def discard(self) -> None:
        if self._place is not None:
            self._slots.give_back(self._place)


class _Handle:
    """A worker process; also what tells how it ended."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.name = "process"

    @property
    def pid(self) -> int | None:
        return self._process.pid  # type: ignore[no-any-return]

    def is_alive(self) -> bool:
        return self._process.is_alive()  # type: ignore[no-any-return]

    def terminate(self) -> None:
        self._process.terminate()

    def join(self, timeout: float | None = None) -> None:
        self._process.join(timeout)

    def kill(self) -> None:
        """SIGKILL where there is one (`LokyProcess.kill` raises AttributeError in loky 3.7)."""
        if hasattr(signal, "SIGKILL") and self.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        else:
            self._process.terminate()

    def disown(self) -> None:
        """Take it off the list of those that multiprocessing ends when this process exits."""
        children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]
        children.discard(self._process)

    def cause(self) -> str:
        """How it ended, for a worker that was not asked to."""
        self.join(_GRACE)
        code = self._process.exitcode
        if code is None:
            if not self.is_alive():
                return "ended; its exit code is not known"
            self.kill()
            self.join(_GRACE)
            return "closed its connection while it was running, and was killed"
        if code < 0:
            try:
                return f"was killed by signal {signal.Signals(-code).name} ({-code})"
            except ValueError:
                return f"was killed by signal {-code}"
        return f"exited with code {code}"


class ProcessCrew(Crew):
    """Workers of one stage, each in a process.

    Parameters
    ----------
    context
        A multiprocessing context, or loky's.
    slots
        Whether large buffers come back through recycled slots of shared memory.
    sockets
        Whether the POSIX transport is used, or the portable one.
    """

    def __init__(self, context: Any, *, slots: bool, sockets: bool) -> None:
        self._context = context
        self._forks = context.get_start_method() == "fork"
        self._use_slots = slots and sockets
        self._sockets = sockets
        self._post: Any = SocketPost() if sockets else PortablePost()
        # All the mutable state:
        self._handles: list[_Handle] = []
        self._slots: list[arena.Reader] = []
        self._gone: set[int] = set()
        self._asked: set[int] = set()
        self._shipment: Shipment | None = None
        self._events: list[Event] = []
        _crews.add(self)

    def start(self, worker: int, spec: WorkerSpec) -> None:
        if not self._forks and self._shipment is None:
            self._shipment = ship(spec, "the loader", share=self._sockets)
        ours, theirs = self._context.Pipe(duplex=True)
        self._post.connect(worker, ours)
        channel = SocketChannel if self._sockets else PortableChannel
        process = self._context.Process(
            target=main,
            args=(
                worker,
                channel,
                theirs,
                spec if self._forks else None,
                os.getpid(),
                self._use_slots,
                tuple(parent_ends) if self._forks else (),
            ),
            name=f"hybridloader-{spec.stage}-{worker}",
            daemon=True,
        )
        try:
            with _interrupts_held_back(self._forks):
                process.start()
                self._handles.append(_Handle(process))
        finally:
            theirs.close()
        self._slots.append(arena.Reader())
        self._post.watch(worker, process)
        if self._shipment is not None:
            self._post.send(worker, [self._shipment.data], self._shipment.fds)

    def send(self, worker: int, message: Message) -> None:
        if worker in self._gone:
            return
        if isinstance(message, Stop):
            self._asked.add(worker)
        header, buffers = pack((message, self._returned(worker)))
        self._post.send(worker, [header, *buffers])

    def wait(self, timeout: float | None) -> Sequence[Event]:
        events, self._events = self._events, []
        arrived = self._post.wait(0 if events else timeout)
        for worker, frame in arrived:
            if frame is not None:
                events.append(self._decode(worker, frame))
            elif worker not in self._gone:
                self._gone.add(worker)
                handle = self._handles[worker]
                clean = worker in self._asked
                events.append(Exited(worker, None if clean else handle.cause()))
        return events

    def wake(self) -> None:
        self._post.wake()

    def kill(self, worker: int) -> None:
        self._handles[worker].kill()

    def close(self) -> None:
        self._post.close()
        deadline = time.monotonic() + _GRACE
        for handle in self._handles:
            handle.join(max(0.0, deadline - time.monotonic()))
        for end in (_Handle.terminate, _Handle.kill):
            left = [handle for handle in self._handles if handle.is_alive()]
            for handle in left:
                end(handle)
            deadline = time.monotonic() + _GRACE / 2
            for handle in left:
                handle.join(max(0.0, deadline - time.monotonic()))
        if isinstance(self._post, PortablePost):
            self._post.join()
        if self._shipment is not None:
            self._shipment.close()
        self._gone.update(range(len(self._handles)))

    def handles(self) -> Sequence[WorkerHandle]:
        return self._handles

    def disown(self) -> None:
        """Forget the processes."""
        for handle in self._handles:
            handle.disown()
        self._handles = []

    def _returned(self, worker: int) -> list[int]:
        """The slots that the worker may use again."""
        returned, found = self._slots[worker].returned, []
        while returned:
            found.append(returned.popleft())
        return found

    def _decode(self, worker: int, frame: Frame) -> Event:
        kind, seq, detail = pickle.loads(frame.parts[0])
        if kind == "done":
            place, size, retired = detail
            slots = self._slots[worker]
            slots.retire(retired)
            if frame.fds:
                slots.add(place.slot, frame.fds[0], size)
            return Done(worker, seq, _Payload(frame.parts[1], frame.parts[2:], slots, place))
        if kind == "failed":
            return Failed(worker, seq, detail)
        if kind == "exhausted":
            return Exhausted(worker, seq)
        return Ready(worker)
