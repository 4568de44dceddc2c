"""Workers in this process: threads, or the calling thread, which plays them.

Threads have one copy of the dataset, and nothing is pickled. Good where the work waits or releases
the GIL: reading, decoding, most of numpy and torch. A thread can't be killed: one that is stuck in the
user's code stays after close, as a daemon that ends with that code. Never touches process-wide settings:
torch's thread count is set for this thread only.

The calling thread does one task at a time: nothing runs beside anything else. With ``num_workers=0`` it
does the work in its own context, as torch does. With ``num_workers=k`` it plays k workers in turn, each
with its own random states and its own copy of the dataset, so that a debugger sees the very data that k
processes would have made.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import ClassVar

from hybridloader._support.text import brief, warn
from hybridloader._support.threads import join
from hybridloader._support.torch_env import is_datapipe, renew_autograd_engine
from hybridloader.engine import contract
from hybridloader.engine.contract import SLICE, Backend, Crew, WorkerHandle
from hybridloader.engine.messages import (
    Begin,
    ByReference,
    Done,
    Event,
    Exited,
    Message,
    Stop,
    Task,
    TaskContext,
    WorkerSpec,
)
from hybridloader.engine.meter import Measures
from hybridloader.engine.serving import serve, thread_worker
from hybridloader.engine.worker import NEW, Incoming, SharedTask, Worker, worker_info_set
from hybridloader.errors import WorkerPicklingError
from hybridloader.fetching.collate import teach_torch
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory
from hybridloader.memory.shipping import replicate
from hybridloader.memory.slots import PrivateSlots, on_this_thread, set_slots
from hybridloader.seeding.sample_rng import Kind
from hybridloader.seeding.worker_seeds import InlineSeeds, WorkerSeeds

_OURS = (threading.__file__, os.path.dirname(os.path.abspath(contract.__file__)), __file__)
"""Files of this package. Their frames at the beginning of a stack are left out, being the same in all
workers."""


_LEAST = 5e-3
"""Least seconds of work in a task that is shared. With 2 ms of Python, two threads lose 5 % to handing
over the GIL; with 4 ms, no loss was measurable."""

_EACH = 5e-4
"""Least seconds of work per worker. Waking a thread takes about 10 us, 2 % of that."""


@dataclass(frozen=True)
class Threads(Backend):
    """Do the work on threads.

    Parameters
    ----------
    copy_dataset
        Whether each thread reads a copy of a map-style dataset, for datasets that keep state which
        threads must not share, such as a file position. Iterable datasets and data pipes are always
        copied, because each worker reads its own shard.
    memory
        Limit of the recycled slots in which large tensors are collated.
    """

    copy_dataset: bool = False
    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "threads"
    in_process: ClassVar[bool] = True

    @property
    def copies(self) -> bool:
        return self.copy_dataset

    def open(self) -> Crew:
        renew_autograd_engine()  # this process may be a fork
        return _ThreadCrew(self.copy_dataset, PrivateSlots(self.memory.bytes()))


class _Inbox:
    """Messages to a thread; usable from finalizers."""

    def __init__(self) -> None:
        queue: SimpleQueue[Incoming | None] = SimpleQueue()
        self.get: Callable[[], Incoming | None] = queue.get
        self.put: Callable[[Incoming | None], None] = queue.put
        self.ring: Callable[[], None] = partial(queue.put, None)

    def call(self, wake: Callable[[], None]) -> None:
        """Have `wake` called after each message from now on."""
        put = self.put

        def put_and_wake(message: Incoming | None) -> None:
            put(message)
            wake()

        self.put = put_and_wake


class _Thread(WorkerHandle):  # the thread itself has no reference to its handle
    name = "thread"

    def __init__(
        self,
        worker: Worker,
        stage: str,
        slots: PrivateSlots,
        report: Callable[[Event], None],
    ) -> None:
        self.context = worker.context
        self.messages = _Inbox()
        self._codes: list[int] = []
        self.thread = threading.Thread(
            target=copy_context().run,
            args=(_main, worker, self.messages, slots, report, self._codes),
            name=f"hybridloader-{stage}-{worker.worker}",
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
            join(self.thread, timeout)


def _main(
    worker: Worker,
    messages: _Inbox,
    slots: PrivateSlots,
    report: Callable[[Event], None],
    codes: list[int],
) -> None:
    def prepare() -> None:
        set_slots(slots)

    def listen() -> Callable[[], None]:
        if worker.wakes:
            messages.call(worker.wake)
        return messages.ring

    codes.append(serve(worker, messages.get, report, prepare=prepare, listen=listen))


def _stack_of(ident: int | None, who: str) -> str:
    frame = sys._current_frames().get(ident or 0)
    frames = list(traceback.extract_stack(frame)) if frame is not None else []
    while len(frames) > 1 and frames[0].filename.startswith(_OURS):
        del frames[0]  # the loop, equal in all workers
    return "".join([f"{who} (most recent call last):\n", *traceback.format_list(frames)])


class _TaskSharing:
    """Rule by which the tasks of a crew are shared, so that a slow sample delays only one; their way.

    All workers share a long task: each fetches samples of it in turn, and the one that ends the last
    sample collates. So all threads work on the oldest task first, and samples of several tasks are in
    flight at once. A task that is shorter than the time to wake the threads stays with its worker. The
    length of the first tasks is unknown, so they are shared until one of them has a result.

    `mean`, `limit` and `shares` are there for the crew, which notes the seconds of every task by
    `mean` and calls `turn` if ``shares != (mean > limit)``. They are changed without a lock: a lost
    note is no harm. Sharing begins above `_worth` seconds and ends below half of that.
    """

    def __init__(self, workers: int, listed: bool) -> None:
        self.listed = listed  # as `Fetch.listed`
        self._worth = max(_LEAST, workers * _EACH)
        # All the mutable state:
        self.shares = True  # all workers do each task together
        self.mean = 0.0  # recent seconds of a task
        self.limit = float("inf")  # for `mean`; crossing it changes `shares`
        self._workers: list[Worker] = []
        self.inboxes: list[_Inbox] = []
        self.measures: deque[Measures] = deque()  # sent with the answer of another worker

    def join(self, worker: Worker, inbox: _Inbox) -> None:
        """Let a worker, which has not started, take part."""
        self._workers.append(worker)
        self.inboxes.append(inbox)

    def begin(self) -> None:
        """Note that an epoch begins: measures of the one before are not sent any more."""
        self.measures = deque()

    @property
    def possible(self) -> bool:
        """False after a failed `init_fn`, whose error answers all tasks of its worker, and if one has
        seeded generators, from which its worker draws in the order of its tasks."""
        return not any(worker.broken or worker.draws_in_turn for worker in self._workers)

    def turn(self, seconds: float) -> None:
        """Decide again: `mean` has passed `limit`, or the first task took so many `seconds`."""
        if self.limit == float("inf"):
            # Sharing makes a short task up to three times longer, so that is measured again, alone.
            self.mean = seconds if seconds > 4 * self._worth else 0.0
        self.shares = self.mean > (self._worth / 2 if self.shares else self._worth)
        self.limit = self._worth / 2 if self.shares else self._worth

    def at_work(self, worker: int) -> tuple[SharedTask, dict[int, int]] | None:
        """Return the oldest task of `worker` that any worker is fetching, and its samples in flight.

        These are the places of the samples, each with the identity of its thread.
        """
        tasks = [other.shared for other in self._workers]
        mine = [task for task in tasks if task is not None and task.worker == worker]
        if not mine:
            return None
        oldest = min(mine, key=lambda task: task.seq)
        return oldest, oldest.begun.copy()


class _ThreadCrew(Crew):
    handles: Sequence[_Thread]

    def __init__(self, copies: bool, slots: PrivateSlots) -> None:
        teach_torch()
        self._copies, self._slots = copies, slots
        self._queued: list[tuple[_Inbox, Incoming]] = []  # sent by the next flush
        # One for each worker that may be running `init_fn`.
        self._opening: list[threading.Event] = []
        self._sharing: _TaskSharing | None = None  # None: each worker does its tasks alone

    def start(self, worker: int, spec: WorkerSpec) -> None:
        made = thread_worker(worker, spec, copies=self._copies)
        opened, report = threading.Event(), self._report
        if spec.init_fn is not None:
            report = partial(self._report_opened, opened)
        thread = _Thread(made, spec.stage, self._slots, report)
        if worker == 0 and not self._copies and spec.sharable:
            seeding = spec.seeding
            if seeding is None or seeding.kind is not Kind.WORKER:
                self._sharing = _TaskSharing(spec.workers, spec.fetch.listed)
        if self._sharing is not None:
            self._sharing.join(made, thread.messages)
        self.place(worker, thread)
        thread.thread.start()
        if spec.init_fn is not None:
            self._opening.append(opened)
            if is_datapipe(spec.fetch.dataset):
                self.settle()  # before the dataset is copied for the next worker

    def settle(self) -> None:
        if not self._opening:
            return
        while self._opening:
            opened = self._opening.pop()
            while not opened.wait(SLICE):  # in slices, because on Windows Ctrl-C ends no other wait
                pass
        if self._sharing is not None and not self._sharing.possible:
            self._sharing = None

    def send(self, worker: int, message: Message) -> None:
        sharing = self._sharing
        if type(message) is not Task:
            self.flush()
            if sharing is not None and type(message) is Begin:
                sharing.begin()
            self.handles[worker].messages.put(message)
            return
        if sharing is not None and sharing.shares:
            samples = message.index
            if sharing.listed:
                samples = samples[0] if type(samples) is list and len(samples) == 1 else None
            if type(samples) in (list, tuple) and len(samples) > 1:
                shared = SharedTask(worker, message, samples, sharing.measures)
                for inbox in sharing.inboxes:
                    self._queued.append((inbox, shared))
                return
        self._queued.append((self.handles[worker].messages, message))

    def flush(self) -> None:
        for messages, task in self._queued:
            messages.put(task)
        self._queued.clear()

    def stack(self, worker: int) -> str:
        found = None if self._sharing is None else self._sharing.at_work(worker)
        if found is None:
            return _stack_of(self.handles[worker].thread.ident, "The thread")
        number = {thread.ident: number for number, thread in enumerate(self.handles)}
        task, begun = found
        return "\n".join(
            _stack_of(ident, f"Worker {number.get(ident)}, at sample {place}: {brief(item)}")
            for place, item in enumerate(list(task.items))
            if (ident := begun.get(place)) is not None
        )

    def leave(self) -> None:
        for thread in self.handles:
            thread.context.cancelled = True  # the rest of a batch is skipped
        super().leave()

    def close(self) -> None:
        super().close()
        self._slots.close()

    def _report_opened(self, opened: threading.Event, event: Event) -> None:
        opened.set()
        self._report(event)

    def _report(self, event: Event) -> None:
        if self._slots.refusal is not None:  # warn on the thread that takes batches
            self.upkeep = self._slots.warn
        sharing = self._sharing
        if sharing is not None and type(event) is Done:
            sharing.mean += (event.seconds - sharing.mean) * NEW
            if sharing.shares != (sharing.mean > sharing.limit):
                sharing.turn(event.seconds)
        self.report(event)


# -- the calling thread as k workers


@dataclass(frozen=True)
class Inline(Backend):
    """Do the work on the thread that calls ``next()``; no workers.

    Parameters
    ----------
    copy_dataset
        Whether each simulated worker reads a copy of the dataset, as a process would. A map-style
        dataset that can't be copied is shared, with a warning. Without effect if ``num_workers=0``.
    memory
        Limit of the recycled slots in which large tensors are collated.
    """

    copy_dataset: bool = True
    memory: Memory = DEFAULT_MEMORY
    name: ClassVar[str] = "inline"
    in_process: ClassVar[bool] = True
    in_caller: ClassVar[bool] = True

    @property
    def copies(self) -> bool:
        return self.copy_dataset

    def open(self) -> Crew:
        return _InlineCrew(self.copy_dataset, PrivateSlots(self.memory.bytes()))


class _InlineHandle(WorkerHandle):
    name = "inline"

    def __init__(self, crew: _InlineCrew, worker: int) -> None:
        self._crew, self._worker = crew, worker

    def is_alive(self) -> bool:
        return self._worker in self._crew.workers

    def terminate(self) -> None:
        self._crew.kill(self._worker)

    def join(self, timeout: float | None = None) -> None: ...


class _InlineCrew(Crew):
    def __init__(self, copies: bool, slots: PrivateSlots) -> None:
        teach_torch()
        self._copies, self._slots = copies, slots
        self._context = TaskContext()
        self._events: deque[Event] = deque()
        self._todo: deque[tuple[int, Message]] = deque()
        self.workers: dict[int, Worker] = {}

    def start(self, worker: int, spec: WorkerSpec) -> None:
        seeds = WorkerSeeds()
        if spec.workers > 0:
            seeds = InlineSeeds()
            spec = replace(spec, fetch=spec.fetch.with_dataset(self._dataset_for(spec)))
        self._todo = deque(item for item in self._todo if item[0] != worker)
        made = Worker(worker, spec, seeds, ByReference, self._context)
        self.place(worker, _InlineHandle(self, worker))
        self.workers[worker] = made
        self._act(made, None)

    def send(self, worker: int, message: Message) -> None:
        self._todo.append((worker, message))

    def wait(self, timeout: float | None) -> Sequence[Event]:
        if self.upkeep is not None:
            self.upkeep()
        while self._todo and not self._events:
            worker, message = self._todo.popleft()
            made = self.workers.get(worker)
            if made is None:
                continue
            if isinstance(message, Stop):
                self.kill(worker, None)
            else:
                self._act(made, message)
        events = tuple(self._events)
        self._events.clear()
        return events

    def wake(self) -> None:
        return None  # `wait` never sleeps

    def kill(self, worker: int, cause: str | None = "was ordered to end") -> None:
        made = self.workers.pop(worker, None)
        if made is not None:
            made.close()
            self._events.append(Exited(worker, cause))

    def close(self) -> None:
        self._context.cancelled = True
        self._todo.clear()
        self._events.clear()
        workers = list(self.workers.values())
        self.workers.clear()
        try:
            for worker in workers:
                worker.close()
        finally:
            self._slots.close()

    def _act(self, worker: Worker, message: Task | Begin | None) -> None:
        """Open the worker (`message` None), or have it do one step, with its `WorkerInfo` in place."""
        info = nullcontext() if worker.info is None else worker_info_set(worker.info)
        before, on_this_thread.slots = on_this_thread.slots, self._slots
        try:
            with info:
                event = worker.open() if message is None else worker.step(message)
        finally:
            on_this_thread.slots = before
        if self._slots.refusal is not None:
            self.upkeep = self._slots.warn
        if event is not None:
            self._events.append(event)

    def _dataset_for(self, spec: WorkerSpec) -> object:
        fetch = spec.fetch
        if not (self._copies or fetch.private):
            return fetch.dataset
        try:
            return replicate(fetch.dataset, "the dataset")
        except WorkerPicklingError as error:
            if fetch.private:
                raise
            warn(
                f"inline workers share one dataset: {error} "
                "Inline(copy_dataset=False) silences this warning.",
                "shared-dataset",
            )
            return fetch.dataset
