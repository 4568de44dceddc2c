"""Crew of worker processes: the parent's side, whatever way the processes are started.

Crews differ only by their starter. The crew never opens a result, and does not depend on the work of
its workers.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from hybridloader._support import system
from hybridloader.backends.process import codec
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.postmortem import OomWatch, PostmortemRecord
from hybridloader.backends.process.slot_channel import ProcessResult, SlotChannel, SlottedResult
from hybridloader.backends.process.starters import (
    ZYGOTE,
    ProcessHandle,
    Starter,
    WorkerStart,
    bury,
    join_all,
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
from hybridloader.errors import DamagedMessage
from hybridloader.memory.limits import warn_of_overflow

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks

_DYING = 1.0
"""Seconds that the kernel gets to remove a killed process. It needs a few milliseconds, and more than a
tenth of a second if many end at the same time on few cores. A slower process is reaped when the next
crew is made or closed (`starters.bury`)."""


_crews: weakref.WeakSet[ProcessCrew] = weakref.WeakSet()


def _disown() -> None:
    """Forget the parent's workers, in a fork that the user's own code made.

    multiprocessing would terminate them when the fork exits, and then fail to join them.
    """
    for crew in list(_crews):
        crew.disown()


system.at_fork(after_in_child=_disown)


class _ProcessWorker(NamedTuple):
    channel: SlotChannel
    record: PostmortemRecord | None


class ProcessCrew(Crew):
    def __init__(
        self,
        starter: Starter,
        nameless: bool,  # slots have no names
        limit: int,  # most bytes of all slots
        check: Callable[[], object],  # raises if no worker may be restarted
    ) -> None:
        self._starter, self.transport, self._check = starter, starter.transport, check
        self._nameless, self._limit = nameless, limit
        # All the mutable state:
        self._handles = cast("list[ProcessHandle]", self.handles())  # the list that `place` changes
        self._workers: list[_ProcessWorker] = []
        self._gone: set[int] = {ZYGOTE}  # workers whose frames are no longer events
        self._asked: set[int] = set()
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
        record = PostmortemRecord.make() if self.transport.carries_descriptors else None
        share, forks = max(1, self._limit // max(1, spec.workers)), self._starter.forks
        channel = SlotChannel(share, self._nameless, forks=forks, locks=self._locks)
        place = _ProcessWorker(channel, record)
        fd, note = None if record is None else record.fd, partial(self._take_place, worker, place)
        try:
            self._starter.start(WorkerStart(worker, spec, channel.slots, fd, note))
        except BaseException:  # for example, no further process or descriptor
            if record is not None and not any(other is place for other in self._workers):
                record.close()
            self._starter.arrived(worker)
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
                    if event is None:
                        self.transport.drop(worker)
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
        for channel, record in self._workers:
            channel.close()
            if record is not None:
                record.close()
        self._gone.update(range(len(self._workers)))

    def disown(self) -> None:
        for handle in self._handles:
            handle.disown()
        self._handles.clear()
        self._starter.disown()

    def _decode(self, worker: int, frame: Frame) -> Event | None:
        """Return the event of a frame; None if its data is gone with the worker.

        The task then counts as not answered.
        """
        found = codec.decode_fields(frame.parts)
        kind, seq, body, returned, slot_map, extras, count, seconds, position = found
        channel = self._workers[worker].channel
        if returned:
            channel.take_back(returned)
        if kind == codec.DONE:
            metadata = None if extras is None else codec.decode_extras(extras)
            slots = channel.results
            if slot_map is not None:
                slots.learn(slot_map, frame.fds)
                if slots.names is not None and slots.lost(slot_map) and self._has_ended(worker):
                    return None
            if channel.forwarded:
                channel.answered(seq)
            if slot_map is None:
                result = ProcessResult(body, frame.parts[1:], count, self._starter.forks)
            else:
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
        self._starter.arrived(worker)
        return Ready(worker, codec.decode_shard_start(body))

    def _has_ended(self, worker: int) -> bool:
        handle = self._handles[worker]
        handle.join(GRACE)  # the system is about to report the end
        return not handle.is_alive()

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
        self._starter.arrived(worker)
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
        raised, text = self._starter.end_of(record)
        if raised:
            cause = f"was ended by {raised} ({cause})"
        return Exited(worker, cause, task, at, text, memory, slots, with_it)
