"""Worker whose methods another process calls: the far side of `CallingHandle`.

A worker's loop asks for messages and reports events, as suits a stream. Here it runs in one long call,
on a thread, and each message comes by another call, which returns the events that came of it. So the
last word of a worker is the return of the long call, whatever way it ends.
"""

from __future__ import annotations

import os
import pickle
import platform
import sys
import threading
import traceback
from pickle import PickleBuffer
from queue import SimpleQueue
from typing import Any

from hybridloader.engine.messages import Event, Exited, Message, Stop, WorkerSpec
from hybridloader.engine.serving import PackedSpec, dumps, loads, own, process_worker, serve
from hybridloader.engine.worker import Worker
from hybridloader.memory.slots import PrivateSlots

Parts = list[Any]
"""Pickle of an object, then the large buffers outside of it, as `bytes` and `PickleBuffer`."""

SentMessage = tuple[Parts, tuple[int, int] | None]
"""Message. If its task is a forwarded result: the number of the return that contains the result,
and the number of the event in that return."""

_ENDED = "the loop has ended"


def parts_of(thing: Message | Event, *, other_main: bool = False) -> Parts:
    """Pickle a message or an event as `dumps` does, with its large buffers apart."""
    buffers: list[Any] = []
    return [dumps(thing, buffers, other_main=other_main), *map(PickleBuffer, buffers)]


def work_of(spec: WorkerSpec) -> Parts:
    """Pickle the work of workers, as `CalledWorker` takes it. Raises `WorkerPicklingError`."""
    buffers: list[PickleBuffer] = []
    return [pickle.dumps(PackedSpec(spec), 5, buffer_callback=buffers.append), *buffers]


class CalledWorker:
    """Worker in a process, each method of which another process may call.

    `run` is called once, `step` for messages in their order, the others at any time; so three threads
    must be there for calls. Large batches are collated into recycled memory, so the value that a call of
    `step` returns must have been copied before the next one is made.

    Parameters
    ----------
    number
        Number of the worker.
    work
        By `work_of`.
    memory
        Bytes that the recycled memory may take.
    """

    def __init__(self, number: int, work: Parts, memory: int) -> None:
        self._number = number
        self._work: PackedSpec | None = loads(work[0], buffers=work[1:])
        self._slots = PrivateSlots(memory)
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._thread = 0
        self._worker: Worker | None = None
        self._exit = b""

    def where(self) -> tuple[int, str]:
        """Return the process id and the name of the machine."""
        return os.getpid(), platform.node()

    def run(self) -> bytes:
        """Run the worker until it gets a `Stop`; return its `Exited`, by `dumps`."""
        try:
            self._thread = threading.get_ident()
            work, self._work = self._work, None
            assert work is not None, "run() is called once"
            self._worker = process_worker(self._number, work, slots=self._slots)
            del work
            serve(self._worker, self._get, self._report)
            return self._exit
        finally:
            self._outbox.put(_ENDED)

    def step(self, sent: list[SentMessage], *returns: list[Parts]) -> list[Parts]:
        """Hand messages over, one after the other; return the events up to where the loop asks for more.

        Parameters
        ----------
        sent
            Messages, by `parts_of`; none for the events up to the first message.
        returns
            Return values of the calls whose results are tasks here.
        """
        made = [] if sent else self._events()
        for left, (parts, place) in zip(reversed(range(len(sent))), sent, strict=True):
            self._inbox.put(_opened(parts, place, returns))
            events = self._events()
            # The next task may overwrite the memory of these results.
            made += [[*map(bytes, event)] for event in events] if left else events
        return made

    def _events(self) -> list[Parts]:
        made: list[Parts] = []
        while (event := self._outbox.get()) is not None:
            if event is _ENDED:
                self._outbox.put(_ENDED)  # for the next call
                break
            made.append(event)
        return made

    def leave(self) -> None:
        """Leave out the rest of a batch, and end."""
        if self._worker is not None:
            self._worker.context.cancelled = True
        self._inbox.put(Stop())

    def stack(self) -> str:
        """Return the stack of the worker's thread."""
        frame = sys._current_frames().get(self._thread)
        return "".join(["Its stack (most recent call last):\n", *traceback.format_stack(frame)])

    def _get(self) -> Any:
        self._outbox.put(None)  # reports that the previous message is done
        return self._inbox.get()

    def _report(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._exit = dumps(event)
        else:
            self._outbox.put(parts_of(event))


def _opened(parts: Parts, place: tuple[int, int] | None, returns: tuple[list[Parts], ...]) -> Any:
    message = loads(parts[0], buffers=[*map(own, parts[1:])])
    if place is not None:
        call, at = place
        head, *buffers = returns[call][at]
        message = message._replace(index=loads(head, buffers=buffers).payload.open())
    return message
