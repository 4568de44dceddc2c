"""Workers played by the calling thread, one task at a time: nothing runs beside anything else.

With ``num_workers=0`` the caller does the work in its own context, as torch does. With ``num_workers=k``
it plays k workers in turn, each with its own random states and its own copy of the dataset, so that
a debugger sees the very data that k processes would have made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hybridloader._support.text import warn
from hybridloader.engine.contract import Backend, Crew, WorkerHandle
from hybridloader.engine.messages import (
    Begin,
    ByReference,
    Event,
    Exited,
    Message,
    Stop,
    Task,
    TaskContext,
    WorkerSpec,
)
from hybridloader.engine.worker import Worker, worker_info_set
from hybridloader.errors import WorkerPicklingError
from hybridloader.fetching.collate import teach_torch
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory
from hybridloader.memory.shipping import replicate
from hybridloader.memory.slots import PrivateSlots, on_this_thread
from hybridloader.seeding.worker_seeds import CallerSeeds, InlineSeeds, WorkerSeeds

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks


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


class _Handle(WorkerHandle):
    name = "inline"

    def __init__(self, crew: _InlineCrew, worker: int) -> None:
        self._crew, self._worker = crew, worker

    def is_alive(self) -> bool:
        return self._worker in self._crew.workers

    def terminate(self) -> None:
        self._crew.kill(self._worker)

    def join(self, timeout: float | None = None) -> None: ...


class _InlineCrew(Crew):
    def __init__(self, copy_dataset: bool, slots: PrivateSlots) -> None:
        teach_torch()
        self._copy_dataset = copy_dataset
        self._slots = slots
        self._context = TaskContext()
        self._events: deque[Event] = deque()
        self._todo: deque[tuple[int, Message]] = deque()
        self.workers: dict[int, Worker] = {}

    def page_lock(self, locks: PageLocks) -> None:
        self._slots.page_lock(locks)
        self.upkeep = self._slots.warn

    def start(self, worker: int, spec: WorkerSpec) -> None:
        seeds: WorkerSeeds = CallerSeeds()
        if spec.workers > 0:
            seeds = InlineSeeds()
            spec = replace(spec, fetch=spec.fetch.with_dataset(self._dataset_for(spec)))
        self._todo = deque(item for item in self._todo if item[0] != worker)
        made = Worker(worker, spec, seeds, ByReference, self._context)
        self.place(worker, _Handle(self, worker))
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
        if not (self._copy_dataset or fetch.private):
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
