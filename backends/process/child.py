"""Workers that are processes: the worker's side. Light to import: it brings in no torch."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from hybridloader._support.errors import Failure, ResultNotSendable
from hybridloader._support.import_hooks import when_imported
from hybridloader._support.inheritance import Inherited
from hybridloader._support.native_threads import one_thread_in_this_process
from hybridloader.backends.process.codec import (
    Unreadable,
    decode_message,
    encode_done,
    encode_event,
)
from hybridloader.backends.process.parent_watch import ParentWatch, leave_signals
from hybridloader.backends.process.postmortem import PostmortemWriter
from hybridloader.engine.messages import Done, Event, Exited, Failed, Message, Task, WorkerSpec
from hybridloader.engine.payload import Payload
from hybridloader.engine.serving import received
from hybridloader.engine.worker import Worker, run
from hybridloader.engine.worker_info import set_process_info
from hybridloader.fetching.collate import set_slots, teach_torch
from hybridloader.memory import shared_slots
from hybridloader.memory.packing import Packed, pack, pack_in_band, unpack
from hybridloader.seeding.worker_seeds import ProcessSeeds

_LARGE = 64 * 1024
"""Bytes from which a frame is written by a thread of its own: it may not fit into the socket, and
the worker should make the next batch meanwhile."""


class _Result(Payload):
    """A packed result: the payload on its way to the stream."""

    def __init__(self, value: Any) -> None:
        self.packed: Packed = pack(value)
        self.count = len(value) if type(value) is list else None

    def open(self) -> Any:
        return unpack(*self.packed)

    def discard(self) -> None:
        return None


def main(
    number: int,
    endpoint_class: Any,
    pipe: Any,
    spec: WorkerSpec | None,
    parent: int,
    slots: tuple[int, str | None] | None,
    strays: Sequence[int],
    record: int | None = None,
    inherited: Inherited | None = None,
) -> None:
    """Run one worker until it is told to stop or the parent is gone.

    Parameters
    ----------
    spec
        What to do; None if it comes as the first frame.
    parent
        Process id of the parent.
    slots
        Bytes that the slots of this worker may take, both ways, and how the names of its own begin if
        they have any; None for no slots.
    strays
        Descriptors that the fork has copied and that belong to the parent alone.
    record
        Descriptor of this worker's postmortem record; -1 if it is the last that comes with the first
        frame, None if there is no record.
    inherited
        Objects of the first frame that could only come with the start of the process.
    """
    # A collection would touch, and so copy, every page that a fork shares. And garbage of the parent's
    # would close descriptors by numbers that are others by then.
    gc.freeze()
    for fd in strays:
        try:
            os.close(fd)
        except OSError:
            pass
    leave_signals()
    side = PostmortemWriter.open(record) if record is not None and record >= 0 else None
    endpoint = endpoint_class(pipe)
    writer = None if slots is None else shared_slots.SlotWriter(*slots)
    share, names = slots or (0, None)
    task_names = None if names is None else shared_slots.task_names(names)
    connection = _WorkerConnection(number, endpoint, writer, share, task_names)
    life = ParentWatch(endpoint, parent, connection.sweep)
    fresh = spec is None
    try:
        one_thread_in_this_process(fresh)
        set_slots(writer)
        when_imported("torch", teach_torch)
        if spec is None:
            frame = endpoint.get()
            if record is not None and frame.fds:  # the kernel drops what there is no room for
                side = PostmortemWriter.open(frame.fds.pop())
            spec = received(frame.parts, frame.fds, inherited)
            del frame
        if side is not None:
            connection.notes_on(side)
            if spec.tracked:
                life.change(side.context())
        worker = Worker(number, spec, ProcessSeeds(), _Result, life.context)
        set_process_info(worker.info)
        run(worker, connection.get, connection.report)
        connection.finish()
    except EOFError:  # the parent has closed the iterator, or is gone, and reads nothing more
        connection.sweep()
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
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # None, broken or closed
            pass
    os._exit(0)


class _WorkerConnection:
    """The worker's messages in, events out, over one endpoint.

    Parameters
    ----------
    worker
        Its number.
    results
        The worker's own slots, if it has any.
    share
        Bytes that all slots of this worker may take, both ways.
    names
        How the names of the parent's slots begin, if they have any.
    """

    def __init__(
        self,
        worker: int,
        endpoint: Any,
        results: shared_slots.SlotWriter | None,
        share: int,
        names: str | None,
    ) -> None:
        self._worker = worker
        self._endpoint = endpoint
        self._results = results
        self._share = share
        self._tasks = shared_slots.SlotReader(shared_slots.both_ways(share)[1], names)
        self._one_way = True
        self._told = False
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._unwritten = 0
        self._counting = threading.Lock()
        self._writer: threading.Thread | None = None
        self._side: PostmortemWriter | None = None

    def notes_on(self, side: PostmortemWriter) -> None:
        """From now on note on the worker's record which task it is at."""
        self._side = side

    def get(self) -> Message:
        while True:
            frame = self._endpoint.get()
            try:
                message, returned = decode_message(frame.parts, self._tasks, frame.fds)
            except Unreadable as lost:
                self._release(lost.returned)
                self.report(Failed(self._worker, lost.seq, Failure(lost.error)))
                continue
            if returned or (self._one_way and self._tasks.highest >= 0):
                self._release(returned)
            if self._side is not None and isinstance(message, Task):
                self._side.begin(message.seq)
            return message

    def report(self, event: Event) -> None:
        fds: Sequence[int] = ()
        extras = None
        if isinstance(event, Done) and event.extras is not None:
            try:
                extras = pack_in_band(event.extras, "metadata of a result")
            except ResultNotSendable as error:
                event = Failed(event.worker, event.seq, Failure(error), event.position)
        returned = self._tasks.returned()
        if isinstance(event, Done):
            assert isinstance(event.payload, _Result)
            parts, fds = encode_done(
                event.seq,
                event.payload.packed,
                self._results,
                count=event.payload.count,
                seconds=event.seconds,
                returned=returned,
                refusal=None if self._tasks.overflow is None else self._complaint(),
                position=event.position,
                extras=extras,
            )
        else:
            assert not isinstance(event, Exited)
            parts = encode_event(event, returned)
        self._write(parts, fds)
        if self._side is not None:
            self._side.end()

    def _release(self, returned: Sequence[int]) -> None:
        """The parent is done with these results."""
        if self._results is not None:
            self._results.release(returned)
            if self._one_way and self._tasks.highest >= 0:
                self._one_way = False  # from now on both ways share
                self._results.lower(shared_slots.both_ways(self._share)[0])

    def _complaint(self) -> str | None:
        """What the parent shall warn of: that tasks are copied, because too many are kept."""
        if self._told:
            return None
        self._told = True
        return f"in worker {self._worker}, {self._tasks.overflow}"

    def finish(self) -> None:
        """Wait until all is written."""
        if self._writer is not None:
            self._outgoing.put(None)
            self._writer.join()

    def sweep(self) -> None:
        """Take the names off all that only the parent, which is gone, would have unlinked."""
        if self._results is not None:
            self._results.sweep()
            self._tasks.sweep()

    def _write(self, parts: list[Any], fds: Sequence[int]) -> None:
        size = len(parts[0]) if len(parts) == 1 else sum(memoryview(p).nbytes for p in parts)
        if self._unwritten == 0 and size < _LARGE:  # only this thread adds to what is not written
            self._put(parts, fds)
            return
        with self._counting:
            self._unwritten += 1
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_behind, daemon=True)
            self._writer.start()
        self._outgoing.put((parts, fds))

    def _write_behind(self) -> None:
        while (item := self._outgoing.get()) is not None:
            try:
                self._put(*item)
            except EOFError:
                return  # the next read or direct write of the worker itself finds out
            except BaseException:  # a result is lost, for which the parent would wait for ever
                traceback.print_exc()
                os._exit(1)
            del item
            with self._counting:
                self._unwritten -= 1

    def _put(self, parts: list[Any], fds: Sequence[int]) -> None:
        self._endpoint.send(parts, fds)
        for fd in fds:
            os.close(fd)
