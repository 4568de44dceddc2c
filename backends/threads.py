"""Workers that are threads of this process: one copy of the dataset, nothing to pickle.

Good where the work waits or leaves the GIL: reading, decoding, most of numpy and torch. A thread can't
be killed: one that is stuck in the user's code is left behind at close, as a daemon that ends with
that code. Never touches process-wide settings: torch's thread count is set for this thread only.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar

from hybridloader import fetcher
from hybridloader.buffers.collate import set_slots, teach_torch
from hybridloader.buffers.memory import DEFAULT_MEMORY, Memory, warn_of_overflow
from hybridloader.buffers.slots import PrivateSlots
from hybridloader.contract import Backend, ByReference, Crew, WorkerHandle
from hybridloader.datapipes import is_datapipe
from hybridloader.fetcher import TaskContext
from hybridloader.messages import Event, Exited, Message, Stop, Task, WorkerSpec
from hybridloader.native import one_thread_on_this_thread
from hybridloader.seeds.seeding import ThreadSeeds
from hybridloader.shipping import replicate
from hybridloader.worker import Worker, run
from hybridloader.worker_info import set_worker_info

if TYPE_CHECKING:
    from hybridloader.buffers.page_locks import PageLocks

_PATIENCE = 1.9
"""Seconds that `close` waits for the threads."""

_OURS = (threading.__file__, os.path.dirname(os.path.abspath(fetcher.__file__)), __file__)
"""Files whose frames say nothing about where a worker is stuck, when they come first."""

_SLICE = 0.2 if sys.platform == "win32" else None
"""Seconds of one sleep. On Windows a wait for a lock can't be interrupted by Ctrl-C."""


@dataclass(frozen=True)
class Threads(Backend):
    """Do the work on threads.

    Parameters
    ----------
    copy_dataset
        Whether each thread reads a copy of a map-style dataset, for datasets that keep state
        (a file position, say) which threads must not share. Iterable datasets and data pipes are
        always copied, because each worker reads its own shard.
    memory
        What the recycled slots may take in which large tensors are collated.
    """

    copy_dataset: bool = False
    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "threads"
    in_process: ClassVar[bool] = True

    @property
    def copies(self) -> bool:
        return self.copy_dataset

    def open(self) -> Crew:
        return _ThreadCrew(self.copy_dataset, PrivateSlots(self.memory.bytes()))


class _Messages(SimpleQueue[Message]):
    """A worker's queue. `SimpleQueue` is written to be usable from finalizers."""


class _Noted:
    """The queue of a worker that notes which task it is at."""

    def __init__(self, messages: _Messages, context: TaskContext) -> None:
        self._messages, self._context = messages, context

    def get(self) -> Message:
        message = self._messages.get()
        if isinstance(message, Task):
            self._context.at, self._context.task = -1, message.seq
        return message


class _Thread(WorkerHandle):
    """A worker thread and how to reach it; the thread itself holds none of this."""

    name = "thread"

    def __init__(
        self,
        worker: int,
        spec: WorkerSpec,
        events: SimpleQueue[Event | None],
        slots: PrivateSlots,
        copy_dataset: bool,
    ) -> None:
        fetch = spec.fetch
        if copy_dataset or fetch.private:
            spec = replace(spec, fetch=fetch.with_dataset(replicate(fetch.dataset, "the dataset")))
        seeds = ThreadSeeds(borrows=spec.init_fn is not None)
        self.context = TaskContext(tracked=spec.tracked)
        self.messages = _Messages()
        self.opened = threading.Event()
        self._codes: list[int] = []
        self.thread = threading.Thread(
            target=_main,
            args=(
                worker,
                spec,
                seeds,
                self.messages,
                events,
                slots,
                self.context,
                self.opened,
                self._codes,
            ),
            name=f"hybridloader-{spec.stage}-{worker}",
            daemon=True,
        )

    @property
    def ident(self) -> int | None:
        return self.thread.ident

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else sum(self._codes)

    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def terminate(self) -> None:
        self.context.cancelled = True
        self.messages.put(Stop())

    def join(self, timeout: float | None = None) -> None:
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout)


def _main(
    number: int,
    spec: WorkerSpec,
    seeds: ThreadSeeds,
    messages: _Messages,
    events: SimpleQueue[Event | None],
    slots: PrivateSlots,
    context: TaskContext,
    opened: threading.Event,
    codes: list[int],
) -> None:
    def report(event: Event) -> None:
        context.task = -1
        opened.set()
        events.put(event)

    cause, evidence = None, ""
    try:
        worker = Worker(number, spec, seeds, ByReference, context)
        set_worker_info(worker.info)
        set_slots(slots)
        if slots.locks is not None:
            slots.locks.enter()
        one_thread_on_this_thread()
        run(worker, _Noted(messages, context) if context.tracked else messages, report)
    except BaseException as error:  # whatever ends a worker, its crew must hear of it
        if not context.cancelled:
            evidence = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            cause = f"was ended by {type(error).__name__}: {error}"
            codes.append(1)  # as of a process that an exception has ended
    finally:
        opened.set()
        task, at = (context.task, context.at) if context.tracked else (None, None)
        if context.task >= 0 and context.at < 0:
            at = None  # at a task, but at none of its samples alone
        events.put(Exited(number, cause, task, at, evidence))


class _ThreadCrew(Crew):
    def __init__(self, copy_dataset: bool, slots: PrivateSlots) -> None:
        teach_torch()
        self._copy_dataset = copy_dataset
        self._slots = slots
        self._warned = False
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # None wakes
        self._threads: list[_Thread] = []
        self._opening: list[_Thread] = []  # whose `init_fn` may run
        self._patience = _PATIENCE
        self._left: float | None = None  # when the threads were told to leave

    def page_lock(self, locks: PageLocks) -> None:
        self._slots.page_lock(locks)

    def start(self, worker: int, spec: WorkerSpec) -> None:
        thread = _Thread(worker, spec, self._events, self._slots, self._copy_dataset)
        self._threads[worker : worker + 1] = [thread]
        thread.thread.start()
        if spec.init_fn is not None:
            self._opening.append(thread)
            if is_datapipe(spec.fetch.dataset):
                self.settle()  # before the next one is copied

    def settle(self) -> None:
        while self._opening:
            self._opening.pop().opened.wait()

    def send(self, worker: int, message: Message) -> None:
        self._threads[worker].messages.put(message)

    def wait(self, timeout: float | None) -> Sequence[Event]:
        if self._slots.refusal is not None and not self._warned:
            self._warned = True
            warn_of_overflow(self._slots.refusal)
        if self._slots.locks is not None:
            self._slots.locks.warn()
        if _SLICE is not None:
            timeout = _SLICE if timeout is None else min(timeout, _SLICE)
        found = []
        try:
            event = self._events.get(timeout=timeout)
            while event is not None:
                found.append(event)
                event = self._events.get_nowait()
        except Empty:
            pass
        return found

    def wake(self) -> None:
        self._events.put(None)

    def kill(self, worker: int) -> None:
        self._threads[worker].terminate()

    def stack(self, worker: int) -> str:
        frame = sys._current_frames().get(self._threads[worker].thread.ident or 0)
        frames = list(traceback.extract_stack(frame)) if frame is not None else []
        while len(frames) > 1 and frames[0].filename.startswith(_OURS):
            del frames[0]  # how any task is come by
        return "".join(["The thread (most recent call last):\n", *traceback.format_list(frames)])

    def leave(self) -> None:
        for thread in self._threads:
            thread.terminate()
        if self._left is None:
            self._left = time.monotonic()

    def close(self) -> None:
        self.leave()
        assert self._left is not None
        # Only the first close waits: who is stuck then will be stuck again at exit.
        deadline, self._patience = self._left + self._patience, 0.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        try:
            while True:  # results that nobody has asked for hold slots
                self._events.get_nowait()
        except Empty:
            pass
        self._slots.close()

    def handles(self) -> Sequence[WorkerHandle]:
        return self._threads
