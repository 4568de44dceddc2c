"""Workers that are processes: the parent's side, whatever the way they were started.

`fork`, `spawn` and `shared-memory` differ only by the multiprocessing context that starts the
process and by whether large buffers come back through slots or in the stream.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridloader._support.errors import BackendUnavailable, DamagedMessage
from hybridloader.backends.process import descriptors
from hybridloader.backends.process.child import main
from hybridloader.backends.process.codec import (
    DONE,
    EXHAUSTED,
    FAILED,
    READY,
    decode_extras,
    decode_failure,
    decode_fields,
    decode_told,
)
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.handles import GRACE, ProcessHandle, bury, join_all
from hybridloader.backends.process.memory_report import OomWatch
from hybridloader.backends.process.pipe_transport import PipeEndpoint, PipeTransport
from hybridloader.backends.process.postmortem import PostmortemRecord
from hybridloader.backends.process.result import ProcessResult, SlottedResult
from hybridloader.backends.process.slot_channel import SlotChannel
from hybridloader.backends.process.socket_transport import SocketEndpoint, SocketTransport
from hybridloader.backends.process.starting import occupy_standard_descriptors, starting
from hybridloader.engine.contract import Crew, WorkerHandle
from hybridloader.engine.messages import (
    Done,
    Event,
    Exhausted,
    Exited,
    Failed,
    Message,
    Ready,
    Stop,
    Task,
    WorkerSpec,
)
from hybridloader.memory import segments
from hybridloader.memory.limits import Memory, warn_of_overflow
from hybridloader.memory.shipping import Shipment, ship

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks

_DYING = 1.0
"""Seconds that the kernel gets to remove a killed process. It needs some milliseconds, and more
than a tenth of a second where many end at once on few cores. A process that takes longer is reaped
when the next crew is made or closed (`handles.bury`)."""


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
        self._method = context.get_start_method()
        self._forks = self._method == "fork"
        self._kind = slot_kind(memory, sockets=sockets)
        self._limit = memory.bytes()
        self._sockets = sockets
        occupy_standard_descriptors()
        self.transport: Any = SocketTransport() if sockets else PipeTransport()
        # All the mutable state:
        self._handles: list[ProcessHandle] = []
        self.channels: list[SlotChannel] = []
        self.records: list[PostmortemRecord | None] = []
        self._gone: set[int] = set()
        self._asked: set[int] = set()
        self._shipments: dict[int, tuple[WorkerSpec, Shipment]] = {}  # to workers not yet ready
        self._left: float | None = None  # when the workers were told to leave
        self._warned = False
        self._overflow: str | None = None
        self._locks: PageLocks | None = None
        self._oom = OomWatch()
        _crews.add(self)

    def page_lock(self, locks: PageLocks) -> None:
        self._locks = locks

    def start(self, worker: int, spec: WorkerSpec) -> None:
        shipment = None if self._forks else self._shipment(spec)
        notes = PostmortemRecord.make() if self._sockets else None
        try:
            self._start(worker, spec, notes, shipment)
        except BaseException:  # no process or descriptor can be had any more, for instance
            if notes is not None and notes not in self.records:
                notes.close()
            if shipment is not None and not any(s is shipment for _, s in self._shipments.values()):
                shipment.close()
            raise
        if shipment is not None:
            self._shipments[worker] = spec, shipment
            fds: list[int] = []
            try:
                for fd in shipment.fds if notes is None else [*shipment.fds, notes.fd]:
                    fds.append(os.dup(fd))
            except OSError:
                for fd in fds:
                    os.close(fd)
                raise
            self.transport.send(worker, shipment.parts, fds)

    def _start(
        self,
        worker: int,
        spec: WorkerSpec,
        notes: PostmortemRecord | None,
        shipment: Shipment | None,
    ) -> None:
        share = max(1, self._limit // max(1, spec.workers))
        channel = SlotChannel(share, self._kind, forks=self._forks, locks=self._locks)
        told = None if notes is None else (notes.fd if self._forks else -1)
        ours, theirs = self._context.Pipe(duplex=True)
        self.transport.connect(worker, ours)
        endpoint = SocketEndpoint if self._sockets else PipeEndpoint
        process = self._context.Process(
            target=main,
            args=(
                worker,
                endpoint,
                theirs,
                spec if self._forks else None,
                os.getpid(),
                channel.slots,
                tuple(descriptors.ours - {told}) if self._forks else (),
                told,
                None if shipment is None else shipment.inherited,
            ),
            name=f"hybridloader-{spec.stage}-{worker}",
            daemon=True,
        )
        try:
            with starting(self._method):
                process.start()
                handle = ProcessHandle(process)
                self._take_place(worker, handle, channel, notes)
        finally:
            theirs.close()
        self.transport.watch(worker, handle)

    def send(self, worker: int, message: Message) -> None:
        channel = self.channels[worker]
        if worker in self._gone or self._left is not None:
            if isinstance(message, Task) and isinstance(message.index, ProcessResult):
                channel.hold(message.seq, message.index)  # it may be sent again, to another
                if self._left is not None:
                    channel.answered(message.seq)
            return
        if isinstance(message, Stop):
            self._asked.add(worker)
        self.transport.send(worker, *channel.encode(message))
        if channel.refusal is not None:
            self._overflow, channel.refusal = self._overflow or channel.refusal, None

    def flush(self) -> None:
        self.transport.flush()

    def wait(self, timeout: float | None) -> Sequence[Event]:
        if self._overflow is not None:  # before anything is taken in: a warning may be an error
            self._warn()
        if self._locks is not None:
            self._locks.warn()
        events: list[Event] = []
        for worker, frame in self.transport.wait(timeout):
            event = None
            try:
                if worker in self._gone:
                    continue
                if frame is not None:
                    event = self._decode(worker, frame)
            except DamagedMessage as error:
                self.transport.drop(worker)
                self.transport.damaged[worker] = str(error)
            finally:
                while frame is not None and frame.fds:  # which nobody has taken over
                    os.close(frame.fds.pop())
            if event is not None:
                events.append(event)
            else:
                self._gone.add(worker)
                events.append(self._exited(worker))
        return events

    def wake(self) -> None:
        self.transport.wake()

    def kill(self, worker: int) -> None:
        self._handles[worker].kill()

    def stack(self, worker: int) -> str:
        notes, handle = self.records[worker], self._handles[worker]
        if notes is None or handle.pid is None:
            return "Its stack can't be had on this platform."
        return (
            notes.stack(handle.pid, send=handle.send_signal)
            or f"Its stack could not be had: {notes.why_none}."
        )

    def leave(self) -> None:
        self.transport.hang_up()
        if self._left is None:
            self._left = time.monotonic()

    def close(self) -> None:
        self.leave()
        self.transport.close()
        assert self._left is not None
        deadline = self._left + GRACE
        join_all(self._handles, deadline)
        running = [handle for handle in self._handles if handle.is_alive()]
        for handle in running:
            handle.kill()
        join_all(running, time.monotonic() + _DYING)
        for handle in self._handles:
            handle.release()
        bury()
        if isinstance(self.transport, PipeTransport):
            self.transport.join()
        for channel in self.channels:
            channel.close()
        for worker in list(self._shipments):
            self._arrived(worker)
        for notes in self.records:
            if notes is not None:
                notes.close()
        self._gone.update(range(len(self._handles)))

    def handles(self) -> Sequence[WorkerHandle]:
        return self._handles

    def disown(self) -> None:
        """Forget the processes."""
        for handle in self._handles:
            handle.disown()
        self._handles = []

    def _decode(self, worker: int, frame: Frame) -> Event:
        found = decode_fields(frame.parts)
        kind, seq, body, returned, slot_map, extras, count, seconds, position = found
        channel = self.channels[worker]
        if returned:
            channel.take_back(returned)
        if kind == DONE:
            told = None if extras is None else decode_extras(extras)
            if channel.forwarded:
                channel.answered(seq)
            if slot_map is None:
                result = ProcessResult(body, frame.parts[1:], count, self._forks)
            else:
                slots = channel.results
                slots.learn(slot_map, frame.fds)
                self._overflow = self._overflow or slot_map.refusal or slots.overflow
                result = SlottedResult(body, frame.parts[1:], count, self._forks, slots, slot_map)
            return Done(worker, seq, result, seconds, position, told)
        if kind == FAILED:
            channel.answered(seq)
            return Failed(worker, seq, decode_failure(body), position)
        if kind == EXHAUSTED:
            channel.all_answered()
            return Exhausted(worker, seq, position, decode_told(body))
        if kind != READY:
            raise DamagedMessage("a worker sent what is no event")
        self._arrived(worker)
        return Ready(worker, decode_told(body))

    def _shipment(self, spec: WorkerSpec) -> Shipment:
        """What the worker is sent first: packed once for all that start together."""
        for told, shipment in self._shipments.values():
            if told is spec:
                return shipment
        return ship(spec, "the loader", share=self._sockets)

    def _arrived(self, worker: int) -> None:
        """The worker has mapped its shipment, or is gone."""
        _, shipment = self._shipments.pop(worker, (None, None))
        if shipment is not None and not any(s is shipment for _, s in self._shipments.values()):
            shipment.close()

    def _take_place(
        self,
        worker: int,
        handle: ProcessHandle,
        channel: SlotChannel,
        notes: PostmortemRecord | None,
    ) -> None:
        """Note what belongs to a worker that has started."""
        if worker == len(self._handles):
            self._handles.append(handle)
            self.channels.append(channel)
            self.records.append(notes)
            return
        former, board_before = self.channels[worker], self.records[worker]
        channel.forwarded.update(
            former.forwarded
        )  # it will be sent again, and answered by the new one
        former.forwarded.clear()
        former.close()
        if board_before is not None:
            board_before.close()
        self._handles[worker].join(GRACE)
        self._handles[worker].release()
        self._handles[worker], self.channels[worker], self.records[worker] = handle, channel, notes
        self._gone.discard(worker)

    def _exited(self, worker: int) -> Exited:
        """What is known of a worker that is gone."""
        self.channels[worker].worker_gone()
        self._arrived(worker)
        if worker in self._asked:
            return Exited(worker)
        handle, notes = self._handles[worker], self.records[worker]
        damage = self.transport.damaged.get(worker)
        if damage is None:
            cause = handle.cause()
        else:
            handle.kill()
            handle.join(GRACE)
            cause = f"sent what can't be read ({damage}), and was killed"
        killed = next((name for name in ("SIGKILL", "SIGBUS") if name in cause), None)
        memory = "" if killed is None else self._oom.describe(killed)
        slots = None if killed is None else self.channels[worker].taken
        if notes is None:
            return Exited(worker, cause, memory=memory, slots=slots)
        task = notes.task
        at = -1 if task is None else notes.at
        return Exited(worker, cause, task, at, notes.crash(), memory, slots)

    def _warn(self) -> None:
        reason, self._overflow = self._overflow, None
        if not self._warned:
            self._warned = True
            warn_of_overflow(str(reason))
