"""Worker that is driven by calls: for transports that call a method far away, and return its value.

A worker's loop asks for messages and reports events, as suits a stream. Here it runs in one call that
lasts, on a thread of its own, and each message is another call, which returns the events that came of
it. So the last word of a worker is the return of the long call, whatever way it ends.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import traceback
from pickle import PickleBuffer
from queue import SimpleQueue
from typing import Any

from hybridloader.engine.messages import Done, Event, Exited, Stop, Task
from hybridloader.engine.serving import PackedSpec, dumps, loads, own, process_worker, serve
from hybridloader.engine.worker import Worker
from hybridloader.memory.slots import PrivateSlots

Parts = list[Any]
"""Pickle of an object, then the large buffers left out of it, as `bytes` and `PickleBuffer`."""

_ENDED = "the loop has ended"


def parts_of(thing: Any, **options: Any) -> Parts:
    """Pickle a message or an event as `dumps` does, with its large buffers apart."""
    buffers: list[Any] = []
    return [dumps(thing, buffers, **options), *map(PickleBuffer, buffers)]


class CalledWorker:
    """Worker in a process of its own, each method of which another process may call.

    `run` is called once. `step` is called for one message after the other, the others at any time; so
    three threads must be there for calls. Large batches are collated into recycled memory, so what a
    call of `step` returns must have been copied before the next one is made.

    Parameters
    ----------
    number
        Number of the worker.
    work
        Pickle of a `PackedSpec`, with its buffers.
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
        """Run the worker until it has been told to stop; return its `Exited`, by `dumps`."""
        try:
            self._thread = threading.get_ident()
            work, self._work = self._work, None
            assert work is not None, "it runs once"
            self._worker = process_worker(self._number, work, slots=self._slots)
            del work
            serve(self._worker, self._get, self._report)
            return self._exit
        finally:
            self._outbox.put(_ENDED)

    def step(self, message: Parts | None, forwarded: list[Parts] | None = None) -> list[Parts]:
        """Hand a message over; return the events up to where the loop asks for another.

        Parameters
        ----------
        message
            A message, by `parts_of`; None for the events up to the first message.
        forwarded
            Return of the call that had the result which is this task, if it was sent on unopened.
        """
        if message is not None:
            found = loads(message[0], buffers=[*map(own, message[1:])])
            if forwarded is not None:
                events = (loads(head, buffers=buffers) for head, *buffers in forwarded)
                (value,) = (event.payload.open() for event in events if isinstance(event, Done))
                found = Task(found.seq, value)
                del value
            self._inbox.put(found)
            del found
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
        self._outbox.put(None)  # done with the message before
        return self._inbox.get()

    def _report(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._exit = dumps(event)
        else:
            self._outbox.put(parts_of(event))
