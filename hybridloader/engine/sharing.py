"""Items that several threads of a worker, or of a crew, process together: samples of tasks or calls.

There is no lock: items are handed out by `deque.popleft` and counted by `list.pop`, which are atomic on
every build of CPython. That takes 0.3 us for each item; a queue entry and a future each, as
`concurrent.futures` has them, 10.

A crew of threads sends such tasks to all its workers (`SharedTask`). The threads, or coroutines, of one
worker fetch the samples of several of its tasks at a time (`TasksUnderWay`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

from hybridloader._support.text import brief
from hybridloader._support.user_objects import Raised, add_note
from hybridloader.engine.messages import Done, Event, StartedTask, Task, TaskContext

NEW = 1 / 8  # part of the newest task in the mean of seconds

_LEAST = 1e-3
"""Seconds of a task, with all threads of a worker, from which the next tasks begin early; they do until
tasks take half of that. Passing a task to another thread takes 2 % of it. A crew of threads has a
similar limit."""


class SharedItems:
    """Items, begun in their order, each by one thread, and their results.

    After an error no other item is begun, and running ones still end. So all items before the failed
    one have ended when all have, and the error of the lowest place is the one that a loop would raise.
    """

    def __init__(self, items: Iterable[Any], name: str = "") -> None:
        self._name = name  # of an item, for the note that its error gets
        self.items = items if isinstance(items, (list, tuple, range)) else list(items)
        count = len(self.items)
        # All the mutable state:
        self.todo = deque(enumerate(self.items))
        self.begun: dict[int, int] = {}  # places in progress, and the identity of the thread
        self.results: list[Any] = [None] * count
        self.errors: dict[int, BaseException] = {}
        self.seconds: list[float] = []  # seconds of each item
        self.shared = False  # several threads may process them
        # One entry fewer than items: the last to end finds it empty.
        self._unfinished = [None] * (count - 1)

    def work(
        self,
        function: Callable[[Any], Any],
        context: TaskContext | None,  # checked after every item
        catch: type[BaseException] = Exception,  # errors of items; others are raised immediately
        *,
        alone: bool = False,  # until the items are `shared`
    ) -> bool:
        """Process items until all have begun; return True if this call has finished the last one."""
        todo, begun, results, me = self.todo, self.begun, self.results, get_ident()
        since = perf_counter()
        while True:
            try:
                place, item = todo.popleft()
            except IndexError:
                return False
            begun[place] = me
            try:
                results[place] = function(item)
            except catch as error:
                self.errors[place] = error
                self.stop()
            del item
            now = perf_counter()
            self.seconds.append(now - since)
            since = now
            del begun[place]
            if self._finish():
                return True
            if context is not None and context.cancelled:
                return self.stop()
            if alone and self.shared:
                return False

    def stop(self) -> bool:
        """Begin no more items; return True if none is in flight."""
        last = False
        try:
            while True:
                self.todo.popleft()
                last = self._finish()
        except IndexError:
            return last

    def _finish(self) -> bool:
        """Count an item that has ended or will not be begun; True for the last one."""
        try:
            self._unfinished.pop()
        except IndexError:
            return True
        return False

    def result(self) -> list[Any]:
        """Return the results, once all have ended; raise the error of the first bad item. Once."""
        try:
            if self.errors:
                place = min(self.errors)
                if self._name:
                    add_note(self.errors[place], f"{self._name} {brief(self.items[place])}")
                Raised(self.errors[place]).throw()
            return self.results
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop all objects of the user: a thread that comes late still finds this."""
        self.todo.clear()
        self.items = self.results = []
        self.errors = {}


class SharedTask(SharedItems):
    """Task of one worker, whose samples several workers fetch. A message to each of them."""

    def __init__(
        self,
        worker: int,
        task: Task,
        samples: Any,  # indices of the samples
        measures: deque[Any],
    ) -> None:
        super().__init__(samples)
        self.worker, self.seq, self.task = worker, task.seq, task
        self.measures = measures
        """Measures of workers that fetched samples of this epoch's tasks and have answered none of
        them."""

    def forget(self) -> None:
        super().forget()
        self.task = self.task._replace(index=None)


class UnsharedTask(NamedTuple):
    """Message: the worker fetches the samples of its task alone, until they are shared."""

    task: SharedTask


class Fetched(NamedTuple):
    """Message of a worker to itself: the samples of a task have ended."""

    task: Task
    samples: StartedTask


class TasksUnderWay:
    """Source of messages for a worker, which begins tasks as they come.

    The threads fetch samples of the oldest task first. They start on the next task as soon as all
    samples of the oldest have begun, so a slow sample delays one thread only. The worker's own thread
    fetches no samples of these tasks: it takes messages, and collates and answers the tasks in order,
    each after its samples have ended. So a collation that draws random numbers behaves as with one task
    at a time. Coroutines run on the worker's own thread, while it would wait for a message.

    Short tasks are done one at a time, and so is the first task with threads: passing a task to another
    thread and back takes about 20 us.

    Messages that are no such task wait until those before them are answered. `next` and `report` are for
    the worker's loop, in place of the functions given.
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
            if later and not begun:
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
            self._mean = seconds if not self._mean else self._mean + (seconds - self._mean) * NEW
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
