"""Numbers of the items in a stage's input, by which ``seeding="sample"`` knows a sample.

A worker counts the items of its tasks by itself. It is sent a `First` only where it can't know the
number: at a new pass, where other workers took tasks in between, and after a worker was replaced.
Tasks are not changed, so forwarded results stay unopened. A stage without such seeding has none of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridloader.engine.feed import items_in
from hybridloader.engine.messages import Begin, First, Message, Result, Task, WorkerSpec

if TYPE_CHECKING:
    from hybridloader.engine.contract import Crew


@dataclass
class ItemCounter:
    """Current epoch and item number of a stage."""

    items: bool = True  # False for readers, and for batches of indices, which have no items
    epoch: int = 0  # number of the epoch
    next: int = 0  # number of the next new item

    def begin(self, epoch: int, first: int = 0) -> None:
        """Begin an epoch with item number `first`; called before the stage begins it."""
        self.epoch, self.next = epoch, first


class NumberedSending:
    """Starts the workers of a crew and sends them messages, with the numbers that they can't know."""

    def __init__(self, crew: Crew, counter: ItemCounter) -> None:
        self._crew, self._counter = crew, counter
        self.send = self._number if counter.items else crew.send
        # All the mutable state:
        self._known: dict[int, tuple[int, int]] = {}  # by task: its epoch and its first item
        # By worker: epoch and first item that it expects for its next task.
        self._expected: dict[int, tuple[int, int]] = {}

    def start(self, worker: int, spec: WorkerSpec) -> None:
        epoch = self._counter.epoch
        # The unchanged spec if possible: crews pack one object for all workers once.
        if spec.seeding is not None and spec.seeding.epoch != epoch:
            spec = replace(spec, seeding=replace(spec.seeding, epoch=epoch))
        self._expected[worker] = epoch, 0
        self._crew.start(worker, spec)

    def _number(self, worker: int, message: Message) -> None:
        """Send a message, as `Crew.send`; a `First` goes before it where the worker needs one."""
        counter = self._counter
        if isinstance(message, Begin):
            self._expected[worker] = counter.epoch, 0
        if not isinstance(message, Task):
            self._crew.send(worker, message)
            return
        count = items_in(message.index)
        new = message.seq not in self._known
        if new:
            self._known[message.seq] = counter.epoch, counter.next
        epoch, first = self._known[message.seq]
        if self._expected.get(worker) != (epoch, first):
            self._crew.send(worker, First(first, epoch))
            self._expected[worker] = epoch, first
        self._crew.first = first
        try:
            self._crew.send(worker, message)
        except BaseException:
            if new:
                del self._known[message.seq]
                if count == 1 or type(message.index) is not list:
                    # The item is lost; items of a longer list are sent again one by one.
                    counter.next += count
            raise
        if self._crew.first == first:
            self._expected[worker] = epoch, first + count
        else:  # the worker does not count them
            del self._expected[worker]
        if new:
            counter.next += count

    def take_in(self, results: Iterable[Result]) -> None:
        """Forget tasks that are answered: they will not be sent again."""
        for result in results:
            self._known.pop(result.seq, None)
