"""Tasks of one worker whose samples its threads, or coroutines, fetch: several tasks at a time.

The threads fetch samples of the oldest task first. They start on the next task as soon as all samples of
the oldest have begun, so a slow sample delays one thread only. The worker's own thread fetches no
samples of these tasks: it takes messages, and collates and answers the tasks in order, each after its
samples have ended. So a collation that draws random numbers behaves as with one task at a time.

Coroutines run on the worker's own thread, while it would wait for a message.

Short tasks are done one at a time, and so is the first task with threads: passing a task to another
thread and back takes about 20 us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from hybridloader.engine.fetcher import StartedTask, TaskContext
from hybridloader.engine.messages import Done, Event, First, Task

_LEAST = 1e-3
"""Seconds of a task, with all threads of a worker, from which the next tasks begin early; they do until
tasks take half of that. Passing a task to another thread takes 2 % of it. `task_sharing` has a similar
limit for crews."""

_NEW = 1 / 8  # part of the newest task in the mean of seconds


class Fetched(NamedTuple):
    """Message of a worker to itself: the samples of a task have ended."""

    task: Task
    samples: StartedTask


class TasksUnderWay:
    """Source of messages for a worker, which begins tasks as they come.

    Messages that are no such task wait until those before them are answered; but not a `First`, as items
    are numbered when they are begun. `next` and `report` are for the worker's loop, in place of the
    functions given.
    """

    def __init__(
        self,
        begin: Callable[[Task, Callable[[], None]], StartedTask | None],  # `Worker.begin`
        context: TaskContext,
        get: Callable[[], Any],  # waits for a message; returns None if `ring` was called
        report: Callable[[Event], None],
        listen: Callable[[], Callable[[], None]],  # gives `ring`; called before it is needed
        *,
        early: bool = False,  # begin tasks early from the first on
    ) -> None:
        self._begin, self._context = begin, context
        self._get, self._report, self._listen = get, report, listen
        # All the mutable state:
        self._ring: Callable[[], None] | None = None  # called by threads when samples have ended
        self._mean = 0.0  # recent seconds of a task
        self._longest = 0.0  # most seconds of a sample of the current task
        self._early = early  # tasks begin before earlier ones are answered
        self._begun: deque[Fetched] = deque()
        self._later: deque[Any] = deque()

    def next(self) -> Any:
        """Wait for the worker's next message."""
        begun, later = self._begun, self._later
        while True:
            if begun and begun[0].samples.ended:
                # With fewer samples than threads, a task takes as long as its longest sample.
                self._longest = max(begun[0].samples.seconds, default=0.0)
                return begun.popleft()
            if later and self._started(later[0]):
                later.popleft()
                continue
            if later and (not begun or type(later[0]) is First):
                return later.popleft()
            waited = bool(begun) and begun[0].samples.wait_here()
            if waited and self._ring is not None:
                self._ring()  # its None follows the messages so far, so `get` does not wait
            while (message := self._get()) is not None and not self._context.cancelled:
                later.append(message)
                if not waited:
                    break
            if self._context.cancelled:
                return message

    def _started(self, message: Any) -> bool:
        """Have the threads begin a task; False if the worker is to do it, as a whole and in its turn."""
        if not (self._early and isinstance(message, Task)):
            return False
        if self._ring is None:
            self._ring = self._listen()
        samples = self._begin(message, self._ring)
        if samples is None:
            return False
        self._begun.append(Fetched(message, samples))
        return True

    def report(self, event: Event) -> None:
        """Report an event, and learn from it."""
        if type(event) is Done:
            seconds, self._longest = max(event.seconds, self._longest), 0.0
            self._mean = seconds if not self._mean else self._mean + (seconds - self._mean) * _NEW
            self._early = self._mean > (_LEAST / 2 if self._early else _LEAST)
        self._report(event)

    def close(self) -> None:
        """Begin no more samples, and wait for those in flight."""
        left = [task.samples for task in self._begun]
        self._begun.clear()
        for samples in left:
            samples.stop()
        for samples in left:
            if not samples.leave():
                break
