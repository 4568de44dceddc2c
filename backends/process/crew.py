"""Crew of worker processes: the parent's side, whatever way the processes are started.

`fork`, `spawn` and `shared-memory` differ only by the multiprocessing context that starts the
process. The crew never opens a result, and does not depend on the work of its workers.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hybridloader.backends.process import codec
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.handles import (
    ProcessHandle,
    bury,
    join_all,
    occupy_standard_descriptors,
)
from hybridloader.backends.process.memory_report import OomWatch
from hybridloader.backends.process.pipe_transport import PipeEndpoint, PipeTransport
from hybridloader.backends.process.postmortem import PostmortemRecord
from hybridloader.backends.process.result import ProcessResult, SlottedResult
from hybridloader.backends.process.slot_channel import SlotChannel
from hybridloader.backends.process.socket_transport import SocketEndpoint, SocketTransport
from hybridloader.backends.process.starters import (
    ZYGOTE,
    Starter,
    WorkerStart,
    ZygoteStarter,
    duplicates,
)
from hybridloader.engine.contract import GRACE, Crew
from hybridloader.engine.messages import (
    Begin,
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
from hybridloader.errors import BackendUnavailable, DamagedMessage
from hybridloader.memory import segments
from hybridloader.memory.limits import Memory, warn_of_overflow
from hybridloader.memory.shipping import Shipment, ship

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks

_DYING = 1.0
"""Seconds that the kernel gets to remove a killed process. It needs a few milliseconds, and more than a
tenth of a second if many end at the same time on few cores. A slower process is reaped when the next
crew is made or closed (`handles.bury`)."""


def slot_kind(memory: Memory, *, sockets: bool) -> str:
    """Choose the kind of slots: ``"nameless"``, ``"named"`` or ``"stream"``.

    Raises `BackendUnavailable` if `memory` asks for a kind that this platform does not have.
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
    """Forget the parent's workers, in a fork that the user's own code made.

    multiprocessing would terminate them when the fork exits, and then fail to join them.
    """
    for crew in list(_crews):
        crew.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


class _ProcessWorker(NamedTuple):
    channel: SlotChannel
    record: PostmortemRecord | None


class ProcessCrew(Crew):
    def __init__(
        self,
        context: Any,  # of multiprocessing, or loky
        memory: Memory,
        check: Callable[[], object],  # raises if no worker may be restarted
        *,
        sockets: bool,  # True: the POSIX transport, False: the portable one
        # One process, started by the context, forks the workers; needs sockets.
        zygote: bool = False,
    ) -> None:
        self._context, self._check = context, check
        self._kind = slot_kind(memory, sockets=sockets)
        self._limit = memory.bytes()
        self._sockets = sockets
        occupy_standard_descriptors()
        self.transport: SocketTransport | PipeTransport
        self.transport = SocketTransport() if sockets else PipeTransport()
        self._starter = Starter(context, SocketEndpoint if sockets else PipeEndpoint)
        if zygote and isinstance(self.transport, SocketTransport):
            self._starter = ZygoteStarter(context, self.transport)
        # All the mutable state:
        self._handles = cast("list[ProcessHandle]", self.handles())  # the list that `place` changes
        self._workers: list[_ProcessWorker] = []
        self._gone: set[int] = {ZYGOTE}  # workers whose frames are no longer events
        self._asked: set[int] = set()
        # Of workers that are not yet ready.
        self._shipments: dict[int, tuple[WorkerSpec, Shipment]] = {}
        self._left: float | None = None  # time at which the workers were ordered to leave
        self._warned = False
        self._overflow: str | None = None
        self._warning: Callable[[], None] | None = None
        self._locks: PageLocks | None = None
        self._oom = OomWatch()
        _crews.add(self)

    def page_lock(self, locks: PageLocks) -> None:
        self._locks = locks

    @property
    def channels(self) -> list[SlotChannel]:  # by worker number
        return [worker.channel for worker in self._workers]

    def start(self, worker: int, spec: WorkerSpec) -> None:
        if worker < len(self._workers):
            self._check()
        starter = self._starter
        shipment = self._shipment(spec) if starter.ships(spec) else None
        record = PostmortemRecord.make() if self._sockets else None
        share = max(1, self._limit // max(1, spec.workers))
        channel = SlotChannel(share, self._kind, forks=starter.forks, locks=self._locks)
        place = _ProcessWorker(channel, record)
        try:
            if shipment is not None:
                self._shipments[worker] = spec, shipment
            ours, theirs = self._context.Pipe(duplex=True)
            self.transport.connect(worker, ours)
            try:
                fd = None if record is None else record.fd
                start = WorkerStart(worker, spec, theirs, channel.slots, fd, shipment)
                starter.start(start, partial(self._take_place, worker, place))
            finally:
                theirs.close()
            if not starter.forks:
                fds = [] if shipment is None else shipment.fds
                fds = duplicates(fds if record is None else [*fds, record.fd])
                self.transport.send(worker, [b""] if shipment is None else shipment.parts, fds)
        except BaseException:  # for example, no further process or descriptor
            if record is not None and not any(other is place for other in self._workers):
                record.close()
            self._arrived(worker)
            raise

    def send(self, worker: int, message: Message) -> None:
        channel = self._workers[worker].channel
        if worker in self._gone or self._left is not None:
            if isinstance(message, Task) and isinstance(message.index, ProcessResult):
                # It may be sent again, to a restarted worker.
                channel.keep(message.seq, message.index)
                if self._left is not None:
                    channel.answered(message.seq)
            return
        if type(message) is not Task:
            if isinstance(message, Stop):
                self._asked.add(worker)
            elif isinstance(message, Begin) and message.changes:
                self._starter.change(message.changes)
        self.transport.send(worker, *channel.encode(message))
        if channel.refusal is not None:
            self._overflow, channel.refusal = self._overflow or channel.refusal, None

    def flush(self) -> None:
        self.transport.flush()

    def wait(self, timeout: float | None) -> Sequence[Event]:
        reason, self._overflow = self._overflow, None
        if reason is not None and not self._warned:
            self._warned = True
            warn_of_overflow(reason)  # before events are read: a warning may be raised as an error
        if self._warning is not None:
            warning, self._warning = self._warning, None
            warning()
        if self._locks is not None:
            self._locks.warn()
        events: list[Event] = []
        for worker, frame in self.transport.wait(timeout):
            event = None
            try:
                if worker in self._gone:
                    if worker == ZYGOTE:
                        self._warning = self._starter.hear(frame) or self._warning
                    continue
                if frame is not None:
                    event = self._decode(worker, frame)
            except DamagedMessage as error:
                self.transport.drop(worker)
                self.transport.damaged[worker] = str(error)
            finally:
                while frame is not None and frame.fds:  # descriptors without a new owner
                    os.close(frame.fds.pop())
            if event is not None:
                events.append(event)
            else:
                self._gone.add(worker)
                events.append(self._exited(worker))
        return events

    def wake(self) -> None:
        self.transport.wake()

    def stack(self, worker: int) -> str:
        handle, record = self._handles[worker], self._workers[worker].record
        if record is None:
            return "The stack of a worker can't be read on this platform."
        pid = handle.known_pid
        if pid is None:
            return self._starter.stack()
        return (
            record.stack(pid, send=handle.send_signal)
            or f"Its stack could not be read: {record.why_none}."
        )

    def leave(self) -> None:
        self.transport.hang_up()
        if self._left is None:
            self._left = time.monotonic()

    def close(self) -> None:
        self.leave()
        assert self._left is not None
        join_all(self._handles, self._left + GRACE)
        running = [handle for handle in self._handles if handle.is_alive()]
        for handle in running:
            handle.kill()
        join_all(running, time.monotonic() + _DYING)
        self._starter.close()
        for handle in self._handles:
            handle.release()
        bury()
        self.transport.close()
        for channel in self.channels:
            channel.close()
        for number in list(self._shipments):
            self._arrived(number)
        for _, record in self._workers:
            if record is not None:
                record.close()
        self._gone.update(range(len(self._workers)))

    def disown(self) -> None:
        for handle in self._handles:
            handle.disown()
        self._handles.clear()
        self._starter.disown()

    def _decode(self, worker: int, frame: Frame) -> Event:
        found = codec.decode_fields(frame.parts)
        kind, seq, body, returned, slot_map, extras, count, seconds, position = found
        channel = self._workers[worker].channel
        if returned:
            channel.take_back(returned)
        if kind == codec.DONE:
            metadata = None if extras is None else codec.decode_extras(extras)
            if channel.forwarded:
                channel.answered(seq)
            if slot_map is None:
                result = ProcessResult(body, frame.parts[1:], count, self._starter.forks)
            else:
                slots = channel.results
                slots.learn(slot_map, frame.fds)
                self._overflow = self._overflow or slot_map.refusal or slots.overflow
                result = SlottedResult(
                    body, frame.parts[1:], count, self._starter.forks, slots, slot_map
                )
            return Done(worker, seq, result, seconds, position, metadata)
        if kind == codec.FAILED:
            channel.answered(seq)
            return Failed(worker, seq, codec.decode_failure(body), position)
        if kind == codec.EXHAUSTED:
            channel.all_answered()
            return Exhausted(worker, seq, position, codec.decode_shard_start(body))
        if kind != codec.READY:
            raise DamagedMessage("a worker sent a message that is not an event")
        self._arrived(worker)
        return Ready(worker, codec.decode_shard_start(body))

    def _shipment(self, spec: WorkerSpec) -> Shipment:
        """Pack a spec: once for all workers that start together."""
        for sent, shipment in self._shipments.values():
            if sent is spec:
                return shipment
        return ship(spec, "the loader", share=self._sockets)

    def _arrived(self, worker: int) -> None:
        """Let go of a worker's shipment: the worker has mapped it, or is gone."""
        self._close_unless_awaited(self._shipments.pop(worker, (None, None))[1])

    def _close_unless_awaited(self, shipment: Shipment | None) -> None:
        if shipment is not None and not any(s is shipment for _, s in self._shipments.values()):
            shipment.close()

    def _take_place(self, number: int, worker: _ProcessWorker, handle: ProcessHandle) -> None:
        """Record a worker that has started, and free the resources of the one before it.

        It is the same worker if it had to be started another way.
        """
        if number == len(self._workers):
            self._workers.append(worker)
        else:
            former = self._workers[number]
            if former is not worker:
                # The restarted worker gets and answers these tasks.
                worker.channel.forwarded.update(former.channel.forwarded)
                former.channel.forwarded.clear()
                former.channel.close()
                if former.record is not None:
                    former.record.close()
            self._handles[number].join(GRACE)
            self._handles[number].release()
            self._workers[number] = worker
            self._gone.discard(number)
        self.place(number, handle)
        self.transport.watch(number, handle)

    def _exited(self, worker: int) -> Exited:
        """Describe the end of a worker that is gone."""
        handle, (channel, record) = self._handles[worker], self._workers[worker]
        channel.worker_gone()
        self._arrived(worker)
        if worker in self._asked:
            return Exited(worker)
        damage = self.transport.damaged.get(worker)
        if damage is None:
            cause = handle.cause()
        else:
            handle.kill()
            handle.join(GRACE)
            cause = f"sent an unreadable message ({damage}), and was killed"
        killed = next((name for name in ("SIGKILL", "SIGBUS") if name in cause), None)
        memory = "" if killed is None else self._oom.describe(killed)
        slots = None if killed is None else channel.taken
        if record is None:
            return Exited(worker, cause, memory=memory, slots=slots)
        task, with_it = record.task, handle.ended_with
        at = -1 if task is None or with_it is not None else record.at
        crash = record.crash() or self._starter.evidence()
        return Exited(worker, cause, task, at, crash, memory, slots, with_it)
