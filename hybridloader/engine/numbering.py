"""Tells workers which pass it is and which items of their stage's input a task holds.

Under ``seeding="sample"`` that is what a sample is known by. A crew is wrapped, and says so in a message
before the task wherever the worker would not know: a new pass, other workers in between, a worker in
another's place. It changes no task, so results that come unopened stay unopened. Without a seeding
there is no such crew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridloader.engine.contract import Crew, WorkerHandle
from hybridloader.engine.feed import items_in
from hybridloader.engine.messages import (
    Begin,
    Done,
    Event,
    Failed,
    First,
    Message,
    Task,
    WorkerSpec,
)

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks


@dataclass
class Counter:
    """Where a stage is.

    Attributes
    ----------
    items
        Whether items are counted: not those of readers, nor batches of indices.
    epoch
        The number of the pass.
    next
        The number of the next item that is new.
    """

    items: bool = True
    epoch: int = 0
    next: int = 0

    def begin(self, epoch: int, first: int = 0) -> None:
        """A pass begins, with item number `first`. Before the stage is told so."""
        self.epoch, self.next = epoch, first

    def telling(self, crew: Crew) -> Crew:
        """Return `crew`, whose workers are told."""
        return _NumberingCrew(crew, self)


class _NumberingCrew(Crew):
    def __init__(self, crew: Crew, counter: Counter) -> None:
        self._crew, self._counter = crew, counter
        # All the mutable state:
        self._known: dict[int, tuple[int, int]] = {}  # by task: its pass and its first item
        self._told: dict[int, tuple[int, int]] = {}  # by worker: what it would take a task for

    def page_lock(self, locks: PageLocks) -> None:
        self._crew.page_lock(locks)

    def start(self, worker: int, spec: WorkerSpec) -> None:
        epoch = self._counter.epoch
        if spec.seeding is not None:
            spec = replace(spec, seeding=replace(spec.seeding, epoch=epoch))
        self._told[worker] = epoch, 0
        self._crew.start(worker, spec)

    def settle(self) -> None:
        self._crew.settle()

    def send(self, worker: int, message: Message) -> None:
        counter = self._counter
        if isinstance(message, Begin):
            message = replace(message, epoch=counter.epoch)
            self._told[worker] = counter.epoch, 0
        if not isinstance(message, Task):
            self._crew.send(worker, message)
            return
        count = items_in(message.index) if counter.items else 0
        new = message.seq not in self._known
        if new:
            self._known[message.seq] = counter.epoch, counter.next
        epoch, first = self._known[message.seq]
        if self._told.get(worker) != (epoch, first):
            self._crew.send(worker, First(first, epoch))
            self._told[worker] = epoch, first
        try:
            self._crew.send(worker, message)
        except BaseException:
            if new:
                del self._known[message.seq]
                if count == 1 or type(message.index) is not list:
                    counter.next += count  # lost; several of a list come again, each alone
            raise
        self._told[worker] = epoch, first + count
        if new:
            counter.next += count

    def wait(self, timeout: float | None) -> Sequence[Event]:
        events = self._crew.wait(timeout)
        for event in events:
            if isinstance(event, (Done, Failed)):
                self._known.pop(event.seq, None)
        return events

    def flush(self) -> None:
        self._crew.flush()

    def wake(self) -> None:
        self._crew.wake()

    def kill(self, worker: int) -> None:
        self._crew.kill(worker)

    def stack(self, worker: int) -> str:
        return self._crew.stack(worker)

    def leave(self) -> None:
        self._crew.leave()

    def close(self) -> None:
        self._crew.close()
        self._known.clear()

    def handles(self) -> Sequence[WorkerHandle]:
        return self._crew.handles()
