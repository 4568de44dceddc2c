"""Crew of worker processes: the parent's side, whatever way the processes are started.

Crews differ only by their starter. The crew never opens a result, and does not depend on the work of
its workers.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hybridloader._support import system
from hybridloader._support.user_objects import Failure
from hybridloader.backends.process import frames
from hybridloader.backends.process.frames import (
    OTHER,
    TASK,
    Frame,
    encode_fields,
    into_slots,
    open_packed,
)
from hybridloader.backends.process.postmortem import WINDOWS_FATAL, OomWatch, PostmortemRecord
from hybridloader.backends.process.starters import (
    EXCEPTION,
    ZYGOTE,
    ProcessHandle,
    Starter,
    WorkerStart,
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
    Payload,
    Ready,
    Stop,
    Task,
    WorkerSpec,
)
from hybridloader.errors import DamagedMessage
from hybridloader.memory.limits import warn_of_overflow
from hybridloader.memory.packing import pack, reads_the_same_everywhere, unpack
from hybridloader.memory.shared_slots import BufferPlace, SlotMap, SlotReader, SlotWriter, limits_of
from hybridloader.memory.slots import OWN

# -- Slots between the parent and one worker, both ways, and results of other workers forwarded to it.
#
# Results come through slots of the worker's; large tasks go through slots of the parent's, made at the
# first large task. A result of one worker (of crew A) may be the task of another (of crew B) without
# being opened: its pickle is passed on, and its buffers are copied from the slots of A's worker into
# those of the parent. The parent uses the slots of A's worker until B's task is answered (done or
# failed), so that the result can be sent again if B's worker dies. Only where workers of B would read
# the pickle otherwise than the parent does (``__main__``, functions made on the spot, unless both crews
# are forks) is it loaded here and packed again.


Encoded = tuple[list[Any], Sequence[int]]
"""Parts of a frame, and descriptors to send along and then close."""


class SlotChannel:
    """The parent's side of one worker's slots."""

    def __init__(
        self,
        share: int,  # most bytes of all slots of this worker, both ways together
        *,
        forks: bool,  # the worker is a fork of this process
    ) -> None:
        self.share, self._forks = share, forks
        results, self._limit = limits_of(share)
        self.results = SlotReader(2 * results // 3)
        # All the other mutable state:
        self.refusal: str | None = None  # why a large task got no slot, until it is reported
        self.forwarded: dict[int, ProcessResult] = {}  # by task number, until the task is answered
        self.tasks: SlotWriter | None = None  # None before the first large task

    def encode(self, message: Message) -> Encoded:
        """Encode a message, with the slots that the worker may fill again."""
        returned = self.results.returned()
        try:
            if type(message) is not Task:
                packed, buffers = pack(message, "a message", other_main=not self._forks)
                return [encode_fields(OTHER, 0, packed, returned), *buffers], ()
            seq, index, item = message
            kind = type(index[0]) if type(index) is list and index else type(index)
            if kind is int or kind is str:  # a sampler's usual index
                try:
                    packed = pickle.dumps(index, 5)
                    return [encode_fields(TASK, seq, packed, returned, items=item)], ()
                except Exception:  # a mixed list may contain an object that plain pickle can't send
                    pass
            if isinstance(index, ProcessResult):
                return self._forward(message, returned, index)
            return self._enclose(message, returned, index)
        except BaseException:
            for number in returned:
                self.results.hand_back(number)
            raise

    def keep(self, seq: int, result: ProcessResult) -> None:
        """Keep the result that is task `seq`, so that it can be sent again, until it is answered."""
        result.forward()
        self.forwarded[seq] = result

    def take_back(self, numbers: Sequence[int]) -> None:
        """End the worker's use of these slots."""
        if self.tasks is not None:
            self.tasks.release(numbers)

    def answered(self, seq: int) -> None:
        """Let go of task `seq`, which need not be sent again."""
        result = self.forwarded.pop(seq, None)
        if result is not None:
            result.answered()

    def all_answered(self) -> None:
        """Let go of all tasks: none that this worker was given will be sent again."""
        for seq in list(self.forwarded):
            self.answered(seq)

    def worker_gone(self) -> None:
        """End the slots that were for the worker alone."""
        if self.tasks is not None:
            self.tasks.close()
            self.tasks = None

    def close(self) -> None:
        """Free everything: the worker is gone and nothing will be sent again."""
        self.worker_gone()
        self.all_answered()

    # -- the parts -----------------------------------------------------------------------------------

    def _enclose(self, task: Task, returned: list[int], index: Any) -> Encoded:
        packed = pack(index, "a task", other_main=not self._forks)
        return self._copy(task, returned, *packed)

    def _copy(
        self, task: Task, returned: list[int], header: Any, buffers: list[memoryview]
    ) -> Encoded:
        """Encode a task with copies of its buffers, in slots as far as there are any."""
        slot_map, fds = None, list[int]()
        if buffers or len(header) >= OWN:
            if self.tasks is None:
                self.tasks = SlotWriter(self._limit)
            slot_map, header, buffers, fds = into_slots(header, buffers, self.tasks)
            self.refusal = self.refusal or slot_map.refusal
        head = encode_fields(TASK, task.seq, header, returned, slot_map, items=task.item)
        return [head, *buffers], fds

    def _forward(self, task: Task, returned: list[int], result: ProcessResult) -> Encoded:
        """Encode a result, without loading it if that is possible."""
        self.keep(task.seq, result)
        try:
            buffers = result.buffers_in_place()  # may raise
            header = result.header or buffers.pop()
            if (self._forks and result.forks) or reads_the_same_everywhere(header):
                return self._copy(task, returned, header, buffers)
            return self._enclose(task, returned, result.peek())
        except BaseException:
            self.answered(task.seq)
            raise


# -- results, not yet opened: each is opened, discarded, or forwarded to a worker
#
# A result knows where its parts lie, and keeps the slots that it names in use. It loads nothing before
# it is asked to, because most results of a stage that feeds another are never loaded in the parent.

_NOTHING = memoryview(b"")


class ProcessResult(Payload):
    """Result of a worker process, none of it in slots unless `slots` and `slot_map` are given."""

    __slots__ = ("_state", "buffers", "count", "forks", "header", "slot_map", "slots")

    forwardable = True  # usable as the index of a `Task` for another crew of processes

    def __init__(
        self,
        header: memoryview,  # the pickle; empty if it is the last of the buffers
        buffers: list[memoryview],  # buffers from the stream
        count: int | None,  # number of items, if the worker's value was a list
        forks: bool,  # the worker is a fork of this process
        slots: SlotReader | None = None,  # slots of the worker
        slot_map: SlotMap | None = None,  # places of the other buffers in the slots
    ) -> None:
        self.header, self.buffers, self.count, self.forks = header, buffers, count, forks
        self.slots, self.slot_map = slots, slot_map
        self._state = ""

    @property
    def nbytes(self) -> int:  # of the header and all buffers, in any memory; 0 once freed
        return len(self.header) + sum(self._sizes)

    @property
    def array_bytes(self) -> int:
        return sum(self._sizes if self.header else self._sizes[:-1])

    @property
    def _sizes(self) -> list[int]:  # of the buffers
        stream = iter(self.buffers)
        return [next(stream).nbytes if span is None else span.size for span in self.spans()]

    def open(self) -> Any:
        if self._state:
            self._refuse("opened")
        self._state = "opened"
        if self.slot_map is None:
            return unpack(self.header, self.buffers)
        return open_packed(self.header, self.buffers, self.slots, self.slot_map)

    def discard(self) -> None:
        if self._state == "forwarded":
            self._let_go("forwarded and answered")
        elif not self._state:
            self._let_go("discarded")

    # -- forwarding ----------------------------------------------------------------------------------

    def forward(self) -> None:
        """Let it be sent to a worker, any number of times, until `answered`."""
        if self._state not in ("", "forwarded"):
            self._refuse("forwarded")
        self._state = "forwarded"

    answered = discard
    """Let go of it: the task that it was forwarded as is done, and will not be sent again."""

    def spans(self) -> tuple[BufferPlace | None, ...]:
        """Place of each buffer; None for a buffer that came through the stream."""
        return (None,) * len(self.buffers) if self.slot_map is None else self.slot_map.spans

    def buffers_in_place(self) -> list[memoryview]:
        """Give all buffers, where they lie: valid until it is let go of."""
        if self.slots is None:
            return list(self.buffers)
        stream, view = iter(self.buffers), self.slots.view
        return [next(stream) if span is None else view(span) for span in self.spans()]

    def peek(self) -> Any:
        """Load the value, over memory that is valid until it is let go of."""
        buffers = self.buffers_in_place()
        return unpack(self.header or buffers.pop(), buffers)

    # -- the parts -----------------------------------------------------------------------------------

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"a result that was already {self._state} can't be {what}: each is opened, discarded or "
            "forwarded to one stage. To use it more than once, open it and send the value."
        )

    def _let_go(self, state: str) -> None:
        """Return the slots, and drop the memory; the state stays, for errors."""
        if self.slots is not None and self.slot_map is not None:
            self.slots.give_back(self.slot_map)
        self._state = state
        self.header, self.buffers, self.slot_map = _NOTHING, [], None


class SlottedResult(ProcessResult):
    """Result with data in slots, which are returned even if the result is never taken."""

    __slots__ = ()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Discard a result that was never taken, for instance in a closed queue.

        At Python's own end all memory goes back by itself, and modules may be empty already: nothing
        that `discard` needs is there, hence the function as a default.
        """
        if not ending() and getattr(self, "_state", None) == "":
            self.discard()


_DYING = 1.0
"""Seconds that the kernel gets to remove a killed process. It needs a few milliseconds, and more than a
tenth of a second if many end at the same time on few cores."""


class _ProcessWorker(NamedTuple):
    channel: SlotChannel
    record: PostmortemRecord | None


class ProcessCrew(Crew):
    handles: Sequence[ProcessHandle]

    def __init__(
        self,
        starter: Starter,
        limit: int,  # most bytes of all slots
        check: Callable[[], object],  # raises if no worker may be restarted
    ) -> None:
        self._starter, self.transport, self._check = starter, starter.transport, check
        self._limit = limit
        # All the mutable state:
        self._workers: list[_ProcessWorker] = []
        self._gone: set[int] = {ZYGOTE}  # workers whose frames are no longer events
        self._asked: set[int] = set()
        self._left: float | None = None  # time at which the workers were ordered to leave
        self._warned = False
        self._overflow: str | None = None
        self._warning: Callable[[], None] | None = None
        self._oom = OomWatch()

    def start(self, worker: int, spec: WorkerSpec) -> None:
        if worker < len(self._workers):
            self._check()
        by_path = bool(system.TEMPORARY)
        record = PostmortemRecord.make() if by_path or self.transport.carries_descriptors else None
        share, forks = max(1, self._limit // max(1, spec.workers)), self._starter.forks
        channel = SlotChannel(share, forks=forks)
        place = _ProcessWorker(channel, record)
        note = partial(self._take_place, worker, place)
        try:
            self._starter.start(WorkerStart(worker, spec, share, record, note))
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
                self._starter.dataset_changed()
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
        handle, record = self.handles[worker], self._workers[worker].record
        if record is None:
            return "The stack of a worker can't be read on this platform."
        pid = handle.known_pid
        if pid is None:
            return self._starter.stack()
        text, why_none = record.stack(pid, handle.send_signal)
        return text or f"Its stack could not be read: {why_none}."

    def leave(self) -> None:
        self.transport.hang_up()
        if self._left is None:
            self._left = time.monotonic()

    def close(self) -> None:
        self.leave()
        assert self._left is not None
        join_all(self.handles, self._left + GRACE)
        running = [handle for handle in self.handles if handle.is_alive()]
        for handle in running:
            handle.kill()
        join_all(running, time.monotonic() + _DYING)
        self._starter.close()
        for handle in self.handles:
            handle.release()
        self.transport.close()
        for channel, record in self._workers:
            channel.close()
            if record is not None:
                record.close()
        self._gone.update(range(len(self._workers)))

    def _decode(self, worker: int, frame: Frame) -> Event | None:
        """Return the event of a frame; None if its data is gone with the worker.

        The task then counts as not answered.
        """
        found = frames.decode_fields(frame.parts)
        seq, slot_map = found.seq, found.slot_map
        channel = self._workers[worker].channel
        if found.returned:
            channel.take_back(found.returned)
        if found.kind == frames.DONE:
            extras = found.extras
            if extras is not None:
                extras = frames.loaded(extras, dict, "the metadata of a result")
            slots = channel.results
            if slot_map is not None:
                slots.learn(slot_map, frame.fds)
                if (
                    not self.transport.carries_descriptors
                    and slots.lost(slot_map)
                    and self._has_ended(worker)
                ):
                    return None
            if channel.forwarded:
                channel.answered(seq)
            parts = (found.body, frame.parts[1:], found.items, self._starter.forks)
            if slot_map is None:
                result = ProcessResult(*parts)
            else:
                self._overflow = self._overflow or slot_map.refusal or slots.overflow
                result = SlottedResult(*parts, slots, slot_map)
            return Done(worker, seq, result, found.seconds, found.position, extras)
        if found.kind == frames.FAILED:
            channel.answered(seq)
            failure = frames.loaded(found.body, Failure, "a worker's error")
            return Failed(worker, seq, failure, found.position)
        if found.kind == frames.EXHAUSTED:
            channel.all_answered()
            start = frames.decode_shard_start(found.body)
            return Exhausted(worker, seq, found.position, start)
        if found.kind != frames.READY:
            raise DamagedMessage("a worker sent a message that is not an event")
        self._starter.arrived(worker)
        return Ready(worker, frames.decode_shard_start(found.body))

    def _has_ended(self, worker: int) -> bool:
        handle = self.handles[worker]
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
            self.handles[number].join(GRACE)
            self.handles[number].release()
            self._workers[number] = worker
            self._gone.discard(number)
        self.place(number, handle)
        self.transport.watch(number, handle)

    def _exited(self, worker: int) -> Exited:
        """Describe the end of a worker that is gone."""
        handle, (channel, record) = self.handles[worker], self._workers[worker]
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
        killed = "SIGKILL" in cause
        memory = self._oom.describe() if killed else ""
        slots = (channel.results.size, channel.share) if killed else None
        if record is None:
            return Exited(worker, cause, memory=memory, slots=slots)
        task, with_it = record.task, handle.ended_with
        at = -1 if task is None or with_it is not None else record.at
        raised, text = self._starter.end_of(record)
        if text.startswith(WINDOWS_FATAL) and (handle.exitcode or 0) < EXCEPTION:
            text = ""  # the program caught that exception, as ctypes does, and ended later
        if raised:
            cause = f"was ended by {raised} ({cause})"
        return Exited(worker, cause, task, at, text, memory, slots, with_it)
