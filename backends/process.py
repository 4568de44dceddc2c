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

from hybridloader import arena, segments
from hybridloader.backends.child import main
from hybridloader.backends.frames import Frame
from hybridloader.backends.letters import DONE, EXHAUSTED, FAILED, decode_event, encode_message
from hybridloader.backends.portable import PortableChannel, PortablePost
from hybridloader.backends.sockets import SocketChannel, SocketPost, parent_ends
from hybridloader.contract import Crew, WorkerHandle
from hybridloader.errors import BackendUnavailable
from hybridloader.memory import Memory, warn_of_overflow
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
from hybridloader.packing import unpack
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


def slot_kind(memory: Memory, *, sockets: bool) -> str:
    """The kind of slots to use here.

    Raises
    ------
    BackendUnavailable
        `memory` asks for a kind that this platform does not have.
    """
    nameless = sockets and segments.nameless_available()
    if memory.kind == "nameless" and not nameless:
        raise BackendUnavailable(
            "this platform can't send memory without a name to another process; "
            "use Memory(kind='named') or leave the kind out"
        )
    return memory.kind or ("nameless" if nameless else "named")


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

    __slots__ = ("_buffers", "_header", "_parcel", "_slots")

    def __init__(
        self,
        header: memoryview,
        buffers: list[memoryview],
        slots: arena.Reader,
        parcel: arena.Parcel | None,
    ) -> None:
        self._header, self._buffers, self._slots, self._parcel = header, buffers, slots, parcel

    def open(self) -> Any:
        header, buffers = self._header, self._buffers
        if self._parcel is not None:
            buffers = self._slots.buffers(self._parcel, buffers)
            if not header:  # it was so large that it has a slot too
                header = buffers.pop()
        return unpack(header, buffers)

    def discard(self) -> None:
        if self._parcel is not None:
            self._slots.give_back(self._parcel)


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
    memory
        What slots for large buffers may take, and of which kind they are.
    sockets
        Whether the POSIX transport is used, or the portable one.
    """

    def __init__(self, context: Any, memory: Memory, *, sockets: bool) -> None:
        self._context = context
        self._forks = context.get_start_method() == "fork"
        self._kind = slot_kind(memory, sockets=sockets)
        self._limit = memory.bytes()
        self._sockets = sockets
        self._post: Any = SocketPost() if sockets else PortablePost()
        # All the mutable state:
        self._handles: list[_Handle] = []
        self._slots: list[arena.Reader] = []
        self._gone: set[int] = set()
        self._asked: set[int] = set()
        self._shipment: Shipment | None = None
        self._ready = 0
        self._warned = False
        self._overflow: str | None = None
        _crews.add(self)

    def start(self, worker: int, spec: WorkerSpec) -> None:
        if not self._forks and self._shipment is None:
            self._shipment = ship(spec, "the loader", share=self._sockets)
        share = max(1, self._limit // max(1, spec.workers))
        names = None
        if self._kind == "named":  # short: macOS allows 31 characters
            names = f"hl-{os.getpid()}-{os.urandom(4).hex()}-"
        slots = None if self._kind == "stream" else (share, names)
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
                slots,
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
        self._slots.append(arena.Reader(share // 2, names))
        self._post.watch(worker, process)
        if self._shipment is not None:
            self._post.send(worker, self._shipment.parts, self._shipment.fds)

    def send(self, worker: int, message: Message) -> None:
        if worker in self._gone:
            return
        if isinstance(message, Stop):
            self._asked.add(worker)
        self._post.send(worker, encode_message(message, self._slots[worker].returned()))

    def flush(self) -> None:
        self._post.flush()

    def wait(self, timeout: float | None) -> Sequence[Event]:
        if self._overflow is not None:  # before anything is taken in: a warning may be an error
            self._warn()
        events: list[Event] = []
        for worker, frame in self._post.wait(timeout):
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
        for slots in self._slots:
            slots.sweep()
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

    def _decode(self, worker: int, frame: Frame) -> Event:
        kind, seq, parcel, rest = decode_event(frame.parts[0])
        if kind == DONE:
            slots = self._slots[worker]
            if parcel is not None:
                slots.learn(parcel, frame.fds)
                self._overflow = self._overflow or parcel.refusal or slots.overflow
            return Done(worker, seq, _Payload(rest, frame.parts[1:], slots, parcel))
        if kind == FAILED:
            return Failed(worker, seq, pickle.loads(rest))
        if kind == EXHAUSTED:
            return Exhausted(worker, seq)
        self._ready += 1
        if self._ready == len(self._handles) and self._shipment is not None:
            self._shipment.close()  # every worker has mapped it
            self._shipment = None
        return Ready(worker)

    def _warn(self) -> None:
        reason, self._overflow = self._overflow, None
        if not self._warned:
            self._warned = True
            warn_of_overflow(str(reason))
